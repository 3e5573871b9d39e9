"""Lists of pods as short texts: runs of ordinals, so that thousands of pods fit into a record of 16 KiB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from .names import PodId
from .sizes import MAX_REPLICAS

MAX_READABLE_RUNS = 64
# Each slot of two specs may have a pod, and as many pods that were given up may still exist.
MAX_PODS = 2 * MAX_REPLICAS


def encode_pods(pods: Sequence[PodId]) -> list[list[str]]:
    """Write pods in their order: for each stretch of one spec its name and runs such as `0-6,7.2,9-12` (7.2: incarnation 2).

    Many runs are written as three columns of numbers, which compress well: distances from the end of the previous run, lengths,
    incarnations.
    """
    stretches: list[tuple[str, list[list[int]]]] = []
    for before, pod in pairwise((None, *pods)):
        assert pod is not None
        if before is None or before.spec != pod.spec:
            stretches.append((pod.spec, []))
        runs = stretches[-1][1]
        if runs and (runs[-1][1] + 1, runs[-1][2]) == (pod.ordinal, pod.incarnation):
            runs[-1][1] = pod.ordinal
        else:
            runs.append([pod.ordinal, pod.ordinal, pod.incarnation])
    return [_stretch(spec, runs) for spec, runs in stretches]


def _stretch(spec: str, runs: list[list[int]]) -> list[str]:
    if len(runs) <= MAX_READABLE_RUNS:
        return [spec, ",".join(_run(*run) for run in runs)]
    ends = [0, *(last + 1 for _, last, _ in runs)]
    steps = (first - end for (first, _, _), end in zip(runs, ends, strict=False))
    columns = steps, (last - first for first, last, _ in runs), (incarnation for _, _, incarnation in runs)
    return [spec, *(",".join(map(str, column)) for column in columns)]


def _run(first: int, last: int, incarnation: int) -> str:
    ordinals = str(first) if first == last else f"{first}-{last}"
    return f"{ordinals}.{incarnation}" if incarnation else ordinals


def decode_pods(stretches: list[list[str]], most: int = MAX_PODS) -> tuple[PodId, ...]:
    """Read what encode_pods() wrote. Raises ValueError, also for more than `most` pods."""
    pods: list[PodId] = []
    for spec, *columns in stretches:
        for first, last, incarnation in _read_columns(*columns[:3]) if len(columns) >= 3 else _read_runs(columns[0]):
            if first < 0 or not 0 <= last - first < most - len(pods):
                raise ValueError(f"{first}-{last} is not a run of pods")
            pods += (PodId(str(spec), ordinal, incarnation) for ordinal in range(first, last + 1))
    return tuple(pods)


def _read_runs(runs: str) -> Iterator[tuple[int, int, int]]:
    for run in runs.split(","):
        ordinals, _, incarnation = run.partition(".")
        first, _, last = ordinals.partition("-")
        yield int(first), int(last or first), int(incarnation or 0)


def _read_columns(steps: str, lengths: str, incarnations: str) -> Iterator[tuple[int, int, int]]:
    end = 0
    columns = (map(int, column.split(",")) for column in (steps, lengths, incarnations))
    for step, length, incarnation in zip(*columns, strict=True):
        first = end + step
        end = first + length + 1
        yield first, end - 1, incarnation
