"""How it is known that a script has run its optimizer itself, and what it may not run."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from tests.unit.in_memory.models import build
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR

from elastipod.chaos import Moment
from elastipod.in_memory import optimizer_watch
from elastipod.in_memory.apply_step import apply_gradients
from elastipod.in_memory.members import Members
from elastipod.in_memory.optimizer_watch import OUTSIDE, TWICE, OptimizerWatch

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a mistake that is planted here


class Watched:
    """A training whose members are watched, in the block of a step unless is_in_block says otherwise."""

    def __init__(self, *, steps_schedules: bool = True) -> None:
        self.members = Members(build())
        self.is_in_block = True
        self.watch = OptimizerWatch(self.members, lambda: self.is_in_block, steps_schedules=steps_schedules)

    def apply(self) -> None:
        """Apply a step as State does."""
        self.is_in_block = False
        self.watch.check_schedules()
        with self.watch.applying():
            apply_gradients(self.members)
        self.watch.committed(by_script=False, is_kept=True)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Mock:
    mock = Mock()
    monkeypatch.setattr(optimizer_watch, "reached", mock)
    return mock


def test_each_optimizer_that_has_run_passes_its_moment_at_this_rank_and_step(reached: Mock) -> None:
    watched = Watched()
    watched.watch.begin(3, 7)
    assert not watched.watch.has_run
    watched.members["optimizer"].step()
    assert watched.watch.has_run
    assert reached.mock_calls == [call(Moment.APPLY, rank=3, step=7)]
    watched.watch.committed(by_script=True, is_kept=False)
    watched.watch.begin(3, 8)
    assert not watched.watch.has_run


def test_steps_of_others_that_a_newcomer_repeats_are_not_its_own(reached: Mock) -> None:
    watched = Watched()
    watched.is_in_block = False
    apply_gradients(watched.members)
    assert not watched.watch.has_run
    assert not reached.called


@pytest.mark.parametrize(("rank", "is_kept", "warnings"), [(0, True, 1), (0, False, 0), (1, True, 0)])
def test_rank_0_says_once_what_an_optimizer_that_the_script_runs_may_cost(
    rank: int, is_kept: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched()
    for step in (1, 2):
        watched.watch.begin(rank, step)
        watched.members["optimizer"].step()
        watched.watch.committed(by_script=True, is_kept=is_kept)
        assert not watched.watch.has_run
        assert len(caplog.records) == warnings
    if warnings:
        assert "leave the optimizer to State or to its apply=" in caplog.text


def test_nothing_is_said_where_state_runs_it(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.watch.begin(0, 1)
    watched.apply()
    assert caplog.records == []
    assert not watched.watch.has_run


# ---- what the script may not run


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_optimizer_does_not_run_after_the_block(is_committed: bool) -> None:
    """Also where the step does not count: the state of the step before is all that there is then."""
    watched = Watched()
    watched.watch.begin(0, 1)
    if is_committed:
        watched.apply()
    watched.is_in_block = False
    before = watched.members.digests()
    with pytest.raises(TypeError, match=re.escape(OUTSIDE)):
        watched.members["optimizer"].step()
    assert watched.members.digests() == before
    assert not watched.watch.has_run


def test_after_the_loop_it_does_as_it_likes() -> None:
    watched = Watched()
    watched.watch.begin(0, 1)
    watched.apply()
    watched.watch.close()
    apply_gradients(watched.members)


@pytest.mark.parametrize("is_in_block", [True, False], ids=["in the block", "after it"])
def test_a_schedule_does_not_run_twice_in_a_step(is_in_block: bool) -> None:
    watched = Watched()
    watched.watch.begin(0, 1)
    if not is_in_block:
        watched.apply()
    watched.members["scheduler"].step()
    with pytest.raises(TypeError, match=re.escape(TWICE)):
        watched.watch.begin(0, 2) if not is_in_block else watched.apply()


def test_schedules_that_state_steps_are_as_it_has_left_them() -> None:
    watched = Watched()
    for step in (1, 2, 3):
        watched.watch.begin(0, step)
        watched.apply()
    assert watched.members["scheduler"].last_epoch == 3


@pytest.mark.parametrize("how", ["the script applies in the block", "an apply function", "another world's state"])
def test_schedules_that_state_does_not_step_are_the_scripts(how: str) -> None:
    watched = Watched(steps_schedules=how != "an apply function")
    watched.watch.begin(0, 1)
    watched.watch.committed(by_script=how == "the script applies in the block", is_kept=False)
    if how == "another world's state":
        watched.watch.left()
    watched.members["scheduler"].step()
    watched.watch.begin(0, 2)


def test_a_step_does_not_wait_for_the_scale_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members({**build(), "scaler": torch.amp.GradScaler("cpu")})
    watch = OptimizerWatch(members, lambda: True, steps_schedules=True)
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda _: pytest.fail("the host waits for the device"))
    watch.begin(0, 1)
    watch.note_left_out()
    assert not watch.has_run


def test_a_scaler_that_has_left_the_optimizers_out_has_torn_the_step_as_well() -> None:
    """Its scale has changed: without the gradients of a peer that is gone, the step is on this rank only."""
    members = Members({**build(), "scaler": torch.amp.GradScaler("cpu")})
    watch, scaler = OptimizerWatch(members, lambda: True, steps_schedules=True), members["scaler"]
    assert not watch.is_torn
    watch.begin(0, 1)
    scaler.scale(members.model(torch.full((4, 3), torch.inf)).square().sum()).backward()
    assert not watch.is_torn
    scaler.step(members["optimizer"])
    scaler.update()
    assert (watch.has_run, watch.is_torn) == (False, True)
    watch.note_left_out()
    watch.committed(by_script=True, is_kept=False)
    assert not watch.is_torn
    watch.begin(0, 2)
    scaler.update(2.0)
    watch.left()
    assert not watch.is_torn, "another step's state may come"


def test_schedules_that_are_chained_are_watched_as_one_is() -> None:
    watched = Watched()
    optimizer = watched.members["optimizer"]
    chained = ChainedScheduler([ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)])
    watched.members.take({**dict(watched.members.items()), "scheduler": chained})
    watched.watch.begin(0, 1)
    watched.apply()
    watched.watch.begin(0, 2)
    chained.step()
    with pytest.raises(TypeError, match=re.escape(TWICE)):
        watched.watch.check_schedules()


class Counter:
    def __init__(self) -> None:
        self.count, self.mean = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"]


@pytest.mark.parametrize(
    "what", ["nothing", "a parameter", "a counter", "a tensor of an entry", "a schedule", "an average"]
)
def test_an_apply_that_fails_has_torn_the_step_if_it_has_changed_anything(what: str) -> None:
    watched = Watched(steps_schedules=False)
    members = watched.members
    members.take({**dict(members.items()), "counter": Counter()})
    watched.watch.begin(0, 1)
    members.model(torch.eye(4, 3)).square().sum().backward()
    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a parameter": lambda: nn.init.ones_(next(members.model.parameters())),
        "a counter": lambda: setattr(members["counter"], "count", 1),
        "a tensor of an entry": lambda: members["counter"].mean.add_(1),
        "a schedule": members["scheduler"].step,
        "an average": lambda: members["ema"].update_parameters(members.model),
    }
    with suppress(ZeroDivisionError), watched.watch.applying():
        assert not watched.watch.is_torn
        changes[what]()
        raise ZeroDivisionError
    assert watched.watch.is_torn is (what != "nothing")
    watched.watch.left()
    assert not watched.watch.is_torn


def test_a_step_that_counts_is_not_torn() -> None:
    watched = Watched(steps_schedules=False)
    watched.watch.begin(0, 1)
    with watched.watch.applying():
        apply_gradients(watched.members)
    assert watched.watch.is_torn
    watched.watch.committed(by_script=False, is_kept=True)
    assert not watched.watch.is_torn
