"""Which planned fault happens where, once each, and what it does; the faults that end a process are recorded here."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastipod import chaos
from elastipod.chaos import (
    CHAOS_ENV,
    ChaosError,
    FaultKind,
    Moment,
    PlannedFault,
    plan_faults,
    reached,
)


class Process:
    """What faults do to this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.generation = 2
        monkeypatch.setattr("os.kill", lambda pid, number: self.done.append(("kill", pid == os.getpid(), number)))
        monkeypatch.setattr("time.sleep", self._sleep)
        monkeypatch.setattr(chaos, "store_generation", lambda: self.generation)

    def _sleep(self, seconds: float) -> None:
        self.done.append(("sleep", seconds))
        if len(self.done) == 3:
            raise KeyboardInterrupt


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    yield Process(monkeypatch)
    plan_faults([])


def fault(kind: FaultKind = FaultKind.RAISE, at: Moment = Moment.STEP, **where: Any) -> PlannedFault:
    return PlannedFault(kind, at, **where)


def test_a_fault_is_read_with_these_defaults() -> None:
    found = PlannedFault.from_json({"kind": "slow", "at": "forward"})
    assert found == PlannedFault(FaultKind.SLOW, Moment.FORWARD, None, None, 0, 0.05, "")
    whole = {"kind": "kill", "at": "apply", "rank": 1, "step": 2, "from_generation": 3, "seconds": 4.0, "once": "file"}
    assert PlannedFault.from_json(whole) == PlannedFault(FaultKind.KILL, Moment.APPLY, 1, 2, 3, 4.0, "file")


@pytest.mark.parametrize(
    ("where", "happens"),
    [
        ({}, True),
        ({"rank": 1}, True),
        ({"rank": 0}, False),
        ({"step": 5}, True),
        ({"step": 4}, False),
        ({"rank": 1, "step": 5, "from_generation": 2}, True),
        ({"from_generation": 3}, False),
        ({"at": Moment.FORWARD}, False),
    ],
)
def test_a_fault_happens_at_its_moment_rank_step_and_generation(
    process: Process, where: dict[str, Any], happens: bool
) -> None:
    plan_faults([fault(**where)])
    if happens:
        with pytest.raises(ChaosError, match=r"^raised on purpose at step of step 5 on rank 1$"):
            reached(Moment.STEP, rank=1, step=5)
    reached(Moment.STEP, rank=1, step=5)  # once at most
    assert chaos.is_planned(where.get("at", Moment.STEP)) is not happens
    assert process.done == []


def test_of_two_faults_at_a_moment_one_happens_each_time(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    plan_faults([fault(FaultKind.SLOW, seconds=0.5), fault(FaultKind.STOP)])
    for _ in range(3):
        reached(Moment.STEP, rank=3, step=9)
    assert process.done == [("sleep", 0.5), ("kill", True, signal.SIGSTOP)]
    said = ["chaos: slow at step, rank 3, step 9", "chaos: stop at step, rank 3, step 9"]
    assert capsys.readouterr().err.splitlines() == said
    assert not chaos.is_planned(Moment.STEP)


def test_a_process_is_killed_or_hangs_for_ever(process: Process) -> None:
    plan_faults([fault(FaultKind.KILL), fault(FaultKind.HANG)])
    reached(Moment.STEP, rank=0, step=1)
    assert process.done == [("kill", True, signal.SIGKILL)]
    with pytest.raises(KeyboardInterrupt):
        reached(Moment.STEP, rank=0, step=1)
    assert process.done[1:] == [("sleep", 3600)] * 2


@pytest.mark.parametrize("kind", FaultKind)
@pytest.mark.parametrize("at", Moment)
def test_each_kind_may_be_planned_at_each_moment(at: Moment, kind: FaultKind) -> None:
    assert PlannedFault.from_json({"kind": str(kind), "at": str(at)}) == PlannedFault(kind, at)


@pytest.mark.parametrize(
    ("where", "is_planned"),
    [({}, True), ({"rank": 1}, True), ({"rank": 0}, False), ({"step": 5}, True), ({"step": 4}, False)],
)
def test_whether_a_fault_is_planned_can_be_asked_for_a_rank_and_a_step(
    process: Process, where: dict[str, Any], is_planned: bool
) -> None:
    plan_faults([fault(**where)])
    assert chaos.is_planned(Moment.STEP, rank=1, step=5) is is_planned
    assert chaos.is_planned(Moment.STEP)
    assert not chaos.is_planned(Moment.APPLY, rank=1, step=5)


def test_a_fault_that_happens_once_leaves_a_file_with_the_process(process: Process, tmp_path: Path) -> None:
    once = tmp_path / "once"
    plan_faults([fault(once=str(once)), fault(once=str(once), step=2)])
    with pytest.raises(ChaosError):
        reached(Moment.STEP, rank=0, step=1)
    assert once.read_text() == str(os.getpid())
    assert once.stat().st_mode & 0o777 == 0o600
    reached(Moment.STEP, rank=0, step=2)
    assert chaos.is_planned(Moment.STEP), "it has not happened in this process"


def test_faults_are_planned_by_the_environment_once(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "_planned", None)
    monkeypatch.delenv(CHAOS_ENV, raising=False)
    assert not chaos.is_planned(Moment.STEP)
    monkeypatch.setenv(CHAOS_ENV, json.dumps([{"kind": "raise", "at": "step"}]))
    assert not chaos.is_planned(Moment.STEP), "it is read at the first moment"
    monkeypatch.setattr(chaos, "_planned", None)
    assert chaos.is_planned(Moment.STEP)
    assert not chaos.is_planned(Moment.APPLY)
