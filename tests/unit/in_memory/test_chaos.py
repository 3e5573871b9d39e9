"""Faults on purpose happen where they are planned, and nowhere else."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.unit.in_memory.models import build

from elastipod import ElasticBatches, State, chaos
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


KINDS = "kill, stop, raise, hang, slow"
MOMENTS = "step, forward, backward, collective, before_apply, apply, copy, hand_over, following, connecting, agreeing, filling, verifying"
FIELDS = "kind, at, rank, step, from_generation, seconds, once"
KILL = {"kind": "kill", "at": "step"}
EXAMPLE = '[{"kind": "kill", "at": "backward", "rank": 1, "step": 40}]'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"kind": "burn", "at": "step"}, f"kind is 'burn'; it must be one of {KINDS}"),
        ({"kind": "kill", "at": "stepp"}, f"at is 'stepp'; it must be one of {MOMENTS}"),
        ({"at": "step"}, f"kind is missing; it must be one of {KINDS}"),
        ({"kind": "kill"}, f"at is missing; it must be one of {MOMENTS}"),
        ({**KILL, "stepp": 4, "time": 1}, f"there is no field stepp, time; a fault has {FIELDS}"),
        ({**KILL, "rank": "1"}, "rank is '1'; it must be a whole number"),
        ({**KILL, "step": 1.5}, "step is 1.5; it must be a whole number"),
        ({**KILL, "from_generation": None}, "from_generation is None; it must be a whole number"),
        ({**KILL, "seconds": "1"}, "seconds is '1'; it must be a number, at least 0"),
        ({**KILL, "seconds": -1}, "seconds is -1; it must be a number, at least 0"),
        ({**KILL, "once": 5}, "once is 5; it must be the path of a file"),
        (
            {**KILL, "once": "/no/such/folder/file"},
            "once is /no/such/folder/file, and the folder /no/such/folder does not exist",
        ),
        (3, f"3 is no fault; the value is a list of objects, such as {EXAMPLE}"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused_with_its_variable_and_number(
    value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(chaos.CHAOS_ENV, json.dumps([KILL, value]))
    with pytest.raises((ValueError, TypeError)) as caught:
        is_planned(Moment.COPY)
    assert str(caught.value) == f"ELASTIPOD_CHAOS, fault 1: {said}"
    with pytest.raises((ValueError, TypeError)):
        State(build, mesh={"shard": -1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{",
            "ELASTIPOD_CHAOS is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ("{}", f"ELASTIPOD_CHAOS is an object; the value is a list of objects, such as {EXAMPLE}"),
        ("3", f"ELASTIPOD_CHAOS is 3; the value is a list of objects, such as {EXAMPLE}"),
    ],
)
def test_a_plan_that_is_no_list_is_refused(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chaos.CHAOS_ENV, text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 its whole text follows
        is_planned(Moment.STEP)
    assert str(caught.value) == said


def test_a_blank_variable_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chaos.CHAOS_ENV, " \n")
    assert not is_planned(Moment.STEP)


def test_faults_in_words_happen_and_others_than_faults_are_refused(tmp_path: Path) -> None:
    kind: Any = "raise"
    at: Any = "step"
    plan_faults([PlannedFault(kind, at, once=str(tmp_path / "once"))])
    with pytest.raises(ChaosError):
        reached(Moment.STEP, rank=0, step=1)
    wrong: Any = KILL
    with pytest.raises(TypeError, match=r"^fault 0: it is a dict; PlannedFault\.from_json gives a fault$"):
        plan_faults([wrong])
    with pytest.raises(ValueError, match=r"^fault 0: once is /no/file, and the folder /no does not exist$"):
        plan_faults([PlannedFault(FaultKind.KILL, Moment.STEP, once="/no/file")])


def test_rank_0_says_which_faults_are_planned(caplog: pytest.LogCaptureFixture) -> None:
    plan_faults(
        [
            PlannedFault(FaultKind.KILL, Moment.COPY, rank=1, step=40),
            PlannedFault(FaultKind.SLOW, Moment.FILLING, from_generation=2),
        ]
    )
    state = State(build)
    assert caplog.records == []
    next(iter(state.steps(ElasticBatches(12, 4))))
    assert caplog.messages == [
        "faults are planned: kill at copy, rank 1, step 40; slow at filling, any rank, any step, from generation 2"
    ]


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
