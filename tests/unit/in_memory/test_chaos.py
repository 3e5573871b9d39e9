"""Faults on purpose happen where they are planned, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    monkeypatch.setenv(chaos.CHAOS_ENV, json.dumps([fault.to_json()]))
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
