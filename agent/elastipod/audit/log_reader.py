"""Reads sample logs into generations and refuses logs that allow no verdict."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastipod.errors import UnusableLogsError

_NAME = re.compile(r"gen-(\d{6,})-rank-(\d{5,})\.jsonl")
_HEADER_FIELDS = ("world_size", "resumed_step", "resumed_generation", "dataset_size", "epochs", "global_batch")


def _no_samples() -> array[int]:
    return array("q")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One rank's part of one step. ranges: dataset indices as half-open (first, end); samples: others one by one."""

    epoch: int
    ranges: tuple[tuple[int, int], ...] = ()
    samples: array[int] = field(default_factory=_no_samples)

    @property
    def count(self) -> int:
        return sum(end - first for first, end in self.ranges) + len(self.samples)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Give all dataset indices as half-open (first, end)."""
        yield from self.ranges
        for index in self.samples:
            yield index, index + 1


@dataclass(frozen=True, slots=True)
class LogHeader:
    """The first line of a log, which must be the same on all ranks of a generation.

    sources: (name, size, draws over all epochs) of each source of a weighted mixture; empty for other data.
    """

    world_size: int
    resumed_step: int
    resumed_generation: int
    dataset_size: int
    epochs: int
    global_batch: int
    sources: tuple[tuple[str, int, int], ...] = ()


@dataclass(slots=True)
class LoggedGeneration:
    """Everything that the logs of one generation say.

    steps: step -> its lines, one per rank. saved, loaded: step -> optimizer norm, None where it was not logged. ends: how ranks
    ended ("drained", "completed") -> their last step. contradicted_by: the log of a rank whose first line differs.
    """

    number: int
    start: LogHeader
    ranks: set[int] = field(default_factory=set)
    steps: dict[int, list[LoggedStep]] = field(default_factory=dict)
    saved: dict[int, float | None] = field(default_factory=dict)
    loaded: dict[int, float | None] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    contradicted_by: Path | None = None

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks of which there is no log, in order."""
        return sorted(set(range(self.start.world_size)) - self.ranks)

    @property
    def has_trained(self) -> bool:
        """True when any rank completed a step or logged its end."""
        return bool(self.steps or self.ends)

    @property
    def data(self) -> str:
        """The data as text, which must be equal for all generations; the number of epochs may differ."""
        said = f"{self.start.dataset_size} samples an epoch"
        sources = [f"{draws // self.start.epochs} of the {size} of {name}" for name, size, draws in self.start.sources]
        return f"{said}, {', '.join(sources)}" if sources else said


def read_logs(directory: str | os.PathLike[str]) -> dict[int, LoggedGeneration]:
    """Read all sample logs in a directory; give generation number -> its logs.

    Raises UnusableLogsError when files are damaged or contradict each other, and OSError when they cannot be read. Whether files are
    missing that are needed depends on the lineage, so `audit` tells.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise UnusableLogsError(f"{folder} is not a directory")
    found = sorted(
        (int(match[1]), int(match[2]), match[0]) for match in map(_NAME.fullmatch, os.listdir(folder)) if match
    )
    if not found:
        raise UnusableLogsError(f"{folder} holds no sample logs (gen-*-rank-*.jsonl)")
    generations: dict[int, LoggedGeneration] = {}
    for number, rank, name in found:
        _read_file(folder / name, number, rank, generations)
    generations = _drop_refused_starts(generations)
    _check_headers_agree(generations)
    _check_same_data(generations)
    return generations


def _read_file(path: Path, number: int, rank: int, generations: dict[int, LoggedGeneration]) -> None:
    records = _records(path)
    first = next(records, None)
    if first is None:
        return  # killed while writing its first line, or lost with its node: as if there were no file
    try:
        if first["kind"] != "start" or (first["generation"], first["rank"]) != (number, rank):
            raise UnusableLogsError(f"{path} does not begin with the start line of its own generation and rank")
        sources = tuple((str(name), int(size), int(draws)) for name, size, draws in first.get("sources", ()))
        start = LogHeader(**{name: int(first[name]) for name in _HEADER_FIELDS}, sources=sources)
        generation = generations.setdefault(number, LoggedGeneration(number, start))
        if generation.start != start:
            generation.contradicted_by = path
        generation.ranks.add(rank)
        for record in records:
            _add(generation, record)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnusableLogsError(f"{path} has a line that this audit cannot read: {error!r}") from error


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Give the records of a file. A last line that was cut off by a kill is left out; any other bad line is an error."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UnusableLogsError(f"{path} line {number} is not JSON: the log was changed or damaged") from error
            if not isinstance(record, dict):
                raise UnusableLogsError(f"{path} line {number} is not a record")
            yield record


def _add(generation: LoggedGeneration, record: dict[str, Any]) -> None:
    kind = record["kind"]
    if kind == "step":
        generation.steps.setdefault(int(record["step"]), []).append(_logged_step(record))
    elif kind in ("saved", "loaded"):
        found, step, norm = getattr(generation, kind), int(record["step"]), record.get("optimizer_norm")
        found[step] = found.get(step) if norm is None else norm  # not all ranks of a replicated state log it
    elif kind == "end":
        generation.ends[str(record["why"])] = int(record["step"])
    elif kind != "done":  # when a step was complete, and its loss; its samples count from its beginning on
        raise ValueError(f"kind {kind!r}")


def _logged_step(record: dict[str, Any]) -> LoggedStep:
    epoch = int(record["epoch"])
    if "ids" in record:
        return LoggedStep(epoch, tuple((int(first), int(end)) for first, end in record["ids"]))
    return LoggedStep(epoch, samples=array("q", [int(index) for index in record["samples"]]))


def _drop_refused_starts(generations: dict[int, LoggedGeneration]) -> dict[int, LoggedGeneration]:
    """Leave out generations that were started with other data and failed before their first step."""
    trained = [each for each in generations.values() if each.has_trained]
    if not trained:
        return generations
    data = trained[-1].data
    return {
        each.number: each
        for each in generations.values()
        if each.has_trained or (each.data == data and each.contradicted_by is None)
    }


def _check_headers_agree(generations: dict[int, LoggedGeneration]) -> None:
    for each in generations.values():
        if each.contradicted_by is not None:
            raise UnusableLogsError(
                f"{each.contradicted_by} contradicts the other ranks of generation {each.number} in its first line"
            )


def _check_same_data(generations: dict[int, LoggedGeneration]) -> None:
    first, *others = generations.values()
    for other in others:
        if other.data != first.data:
            raise UnusableLogsError(
                f"the generations do not train on the same data: generation {first.number} on {first.data}, generation "
                f"{other.number} on {other.data}"
            )
