"""The sample logs of the workers of one job, merged by generation.

Only the logs show when a step was really made; conditions and Events show when the operator noticed.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Line = Mapping[str, Any]
LOG_NAME = re.compile(r"gen-\d{6}-rank-\d{5}\.jsonl")


@dataclass(frozen=True, slots=True)
class Step:
    """One complete step of the job. at: Unix seconds at which its last rank completed it; loss: mean over the ranks."""

    number: int
    at: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class Generation:
    """One run of the workers between two starts, according to its logs.

    resumed_step: the last step in its checkpoint, 0 at the beginning. drained_at: Unix seconds at which its last rank
    stopped for an elastic event, None if it was not drained. begun_step: the last step that any rank began; with
    `elastipod.State` it may have been interrupted, and is not among `steps` then.
    """

    number: int
    world_size: int
    resumed_step: int
    global_batch: int
    steps: tuple[Step, ...]
    drained_at: float | None = None
    begun_step: int = 0

    @property
    def step_s(self) -> float | None:
        """What a step usually takes here: the median time between two, None when there were not enough."""
        return median(after.at - before.at for before, after in pairwise(self.steps)) if len(self.steps) > 1 else None

    @property
    def first(self) -> Step | None:
        """The first step that was made here, None when there was none."""
        return self.steps[0] if self.steps else None

    @property
    def last(self) -> Step | None:
        """The last step that was made here, None when there was none."""
        return self.steps[-1] if self.steps else None


def read_run(folder: Path) -> tuple[Generation, ...]:
    """Read every rank's log below `folder`; give the generations in order."""
    return generations(parse_log(path.read_bytes()) for path in sorted(folder.glob("gen-*-rank-*.jsonl")))


def find_logs(shared: Path, job: str) -> Path | None:
    """Give the folder below `shared` with the sample logs of a job, None before a worker has made the first one.

    As in the examples, a job writes everything into a folder of its name.
    """
    for folder, _, names in os.walk(shared):  # unaffected by folders of checkpoints that come and go
        found = Path(folder)
        if job in found.relative_to(shared).parts and any(LOG_NAME.fullmatch(name) for name in names):
            return found
    return None


def parse_log(content: bytes) -> list[Line]:
    """Give the lines of one log. An incomplete last line (without a newline), as after a kill, is ignored."""
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def generations(logs: Iterable[Sequence[Line]]) -> tuple[Generation, ...]:
    """Merge the ranks' logs; give the generations in order. Logs without a start line are ignored."""
    ranks: defaultdict[int, list[Sequence[Line]]] = defaultdict(list)
    for log in logs:
        if log and log[0]["kind"] == "start":
            ranks[log[0]["generation"]].append(log)
    return tuple(_generation(number, ranks[number]) for number in sorted(ranks))


def _generation(number: int, logs: Sequence[Sequence[Line]]) -> Generation:
    start = logs[0][0]
    begun = _by_step("step", logs)
    # Scripts with `State` log a step when it begins, and again when it is done; others only then.
    made = _by_step("done", logs) or begun
    ends = [line["t"] for log in logs for line in log if line["kind"] == "end" and line["why"] == "drained"]
    return Generation(
        number=number,
        world_size=start["world_size"],
        resumed_step=start["resumed_step"],
        global_batch=start["global_batch"],
        steps=tuple(_step(step, lines) for step, lines in sorted(made.items())),
        drained_at=max(ends, default=None),
        begun_step=max(begun, default=start["resumed_step"]),
    )


def _by_step(kind: str, logs: Sequence[Sequence[Line]]) -> dict[int, list[Line]]:
    found: defaultdict[int, list[Line]] = defaultdict(list)
    for log in logs:
        for line in log:
            if line["kind"] == kind:
                found[line["step"]].append(line)
    return found


def _step(number: int, lines: Sequence[Line]) -> Step:
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    return Step(number, max(line["t"] for line in lines), sum(losses) / len(losses) if losses else None)
