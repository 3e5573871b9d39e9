"""Faults on purpose happen where they are planned, and nowhere else."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from tests.agent_client import until

from elastipod import chaos
from elastipod.chaos import ChaosError, FaultKind, Moment, PlannedFault, is_planned, plan_faults, reached


@pytest.fixture(autouse=True)
def nothing_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "_planned", None)


def test_a_fault_happens_once_at_its_moment_rank_and_step() -> None:
    plan_faults([PlannedFault(FaultKind.RAISE, Moment.FORWARD, rank=1, step=3)])
    assert is_planned(Moment.FORWARD)
    assert not is_planned(Moment.BACKWARD)
    for at, rank, step in [(Moment.BACKWARD, 1, 3), (Moment.FORWARD, 0, 3), (Moment.FORWARD, 1, 2)]:
        reached(at, rank=rank, step=step)
    with pytest.raises(ChaosError, match="at forward of step 3 on rank 1"):
        reached(Moment.FORWARD, rank=1, step=3)
    reached(Moment.FORWARD, rank=1, step=3)


def test_a_fault_with_a_file_happens_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = PlannedFault(FaultKind.RAISE, Moment.STEP, once=str(tmp_path / "happened"))
    monkeypatch.setenv(chaos.CHAOS_ENV, json.dumps([asdict(fault)]))
    with pytest.raises(ChaosError):
        reached(Moment.STEP, rank=0, step=1)
    monkeypatch.setattr(chaos, "_planned", None)  # as in a process that replaces the first one
    reached(Moment.STEP, rank=0, step=1)


def test_a_fault_waits_for_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_faults([PlannedFault(FaultKind.RAISE, Moment.FILLING, from_generation=2)])
    monkeypatch.setenv("ELASTIPOD_GENERATION", "1")
    reached(Moment.FILLING, rank=0, step=1)
    monkeypatch.setenv("ELASTIPOD_GENERATION", "2")
    with pytest.raises(ChaosError):
        reached(Moment.FILLING, rank=0, step=1)


@pytest.mark.parametrize("value", [{"kind": "burn", "at": "step"}, {"kind": "kill", "at": "never"}])
def test_a_fault_that_does_not_exist_is_refused(value: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is not a valid"):
        PlannedFault.from_json(value)


def test_what_a_fault_does_to_its_process(tmp_path: Path) -> None:
    """Each in a process of its own: it is killed, stopped, goes on after a while, or never."""

    def begin(kind: FaultKind) -> int:
        pid = os.fork()
        if not pid:
            plan_faults([PlannedFault(kind, Moment.STEP, seconds=0.3)])
            began = time.monotonic()
            reached(Moment.STEP, rank=0, step=1)
            os._exit(7 if time.monotonic() - began >= 0.3 else 8)
        return pid

    _, killed = os.waitpid(begin(FaultKind.KILL), 0)
    assert os.WTERMSIG(killed) == signal.SIGKILL
    _, slow = os.waitpid(begin(FaultKind.SLOW), 0)
    assert os.waitstatus_to_exitcode(slow) == 7
    stopped = begin(FaultKind.STOP)
    _, status = os.waitpid(stopped, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    hanging = begin(FaultKind.HANG)
    until(lambda: psutil.Process(hanging).status() == psutil.STATUS_SLEEPING, "the process to hang")
    for pid in (stopped, hanging):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_transfer_passes_its_moment_with_each_message_if_a_fault_is_planned_there() -> None:
    told: list[str] = []

    def progress() -> None:
        told.append("progress")

    plan_faults([PlannedFault(FaultKind.RAISE, Moment.COPY, rank=1, step=6)])
    for at, rank, step in [(Moment.HAND_OVER, 1, 6), (Moment.COPY, 0, 6), (Moment.COPY, 1, 7)]:
        assert chaos.passing(at, progress, rank=rank, step=step) is progress
    passing = chaos.passing(Moment.COPY, progress, rank=1, step=6)
    assert told == []
    with pytest.raises(ChaosError, match="at copy of step 6 on rank 1"):
        passing()
    passing()
    assert told == ["progress"] * 2, "the message had come before"


def test_the_file_of_a_fault_names_its_process_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "happened"
    plan_faults([PlannedFault(FaultKind.SLOW, Moment.STEP, seconds=0, once=str(file))])
    reached(Moment.STEP, rank=0, step=1)
    assert file.read_text() == str(os.getpid())
    assert file.stat().st_mode & 0o777 == 0o600
