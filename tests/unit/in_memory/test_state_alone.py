"""`State` in one process without a launcher: its steps, its checkpoints, its random numbers, and what it refuses."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import run_ranks
from tests.unit.in_memory.models import build
from tests.unit.library.sample_logs import PLAN
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR

from elastipod import ElasticBatches, State
from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.checkpoint.rng import rank_seed
from elastipod.checkpoint.saver import Saver
from elastipod.errors import StateDiffersError
from elastipod.gradients import announce_reduced_gradients
from elastipod.in_memory import phase_limit
from elastipod.in_memory.durable_tier import DurableTier
from elastipod.in_memory.optimizer_watch import OUTSIDE, TWICE
from elastipod.in_memory.pass_watch import PassWatch
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import LIMITS, Phase
from elastipod.in_memory.world_life import WorldLife

DATA = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, indices: Iterable[int]) -> torch.Tensor:
    loss: torch.Tensor = model(DATA[list(indices)]).square().mean()
    return loss


def train(state: State, *, until: int = 0, plan: ElasticBatches = PLAN) -> list[int]:
    """Train a plan to its end, or until the script breaks at a step; give the steps."""
    done = []
    for step in state.steps(plan):
        with step as batch:
            if batch.step == until:
                raise ZeroDivisionError
            loss = loss_of(state.model, batch.indices)
            loss.backward()  # type: ignore[no-untyped-call]
            step.loss = loss.item()
        done.append(batch.step)
    return done


def trained_alone(steps: int = PLAN.total_steps) -> dict[str, str]:
    """Train as a script without this library would; give the digests of its state."""
    return trained_members(steps)._members.digests()


def trained_members(steps: int, seed: int = 0) -> State:
    state = State(partial(build, seed))
    for number in range(1, steps + 1):
        state.optimizer.zero_grad()
        loss_of(state._members.model, PLAN.batch(number, 0, 1).indices).backward()  # type: ignore[no-untyped-call]
        for call in (state.optimizer.step, state.scheduler.step):
            call()
        state.ema.update_parameters(state._members.model)
    return state


def test_a_single_process_trains_every_step_as_a_plain_loop_does() -> None:
    state = State(build)
    assert (state.rank, state.world_size, state.generation, state.completed) == (0, 1, 1, 0)
    assert train(state) == list(range(1, PLAN.total_steps + 1))
    assert state.completed == PLAN.total_steps
    assert state._members.digests() == trained_alone()


def test_members_are_attributes() -> None:
    state = State(build)
    assert isinstance(state.optimizer, torch.optim.AdamW)
    assert state.model is state._members.model
    with pytest.raises(AttributeError, match="no member 'sampler'"):
        _ = state.sampler


def test_what_a_script_raises_in_a_step_leaves_the_loop_and_nothing_of_the_step_is_applied() -> None:
    state = State(build)
    with pytest.raises(ZeroDivisionError):
        train(state, until=3)
    assert state.completed == 2
    assert state._members.digests() == trained_alone(2)


def test_a_job_that_broke_goes_on_from_its_checkpoint_and_trains_every_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launcher that starts a single rank in each generation has it."""
    port = free_port()

    def state(generation: int) -> State:
        place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port + generation}
        for name, value in {**place, "ELASTIPOD_GENERATION": generation}.items():
            monkeypatch.setenv(name, str(value))
        return State(
            partial(build, generation),
            checkpoints=tmp_path / "checkpoints",
            checkpoint_every=2,
            sample_log=tmp_path / "samples",
            wrap=lambda model: DistributedDataParallel(model),
        )

    def body(rank: int) -> Any:
        broken = state(1)
        with pytest.raises(ZeroDivisionError):
            train(broken, until=6)
        resumed = state(2)
        done = train(resumed)
        again = state(3)
        assert train(again) == [], "the last step is a checkpoint too"
        assert again.completed == PLAN.total_steps
        assert resumed.model is resumed._members.model, "no wrapper is left"
        return [done, resumed.generation, [each.tolist() for each in resumed.model.parameters()]]

    ((done, generation, weights),) = run_ranks(1, body)
    assert done in [list(range(first, PLAN.total_steps + 1)) for first in (3, 5)], (
        "the save of step 4 may have been cut off"
    )
    assert generation == 2
    for (name, expected), own in zip(
        trained_members(PLAN.total_steps, 1).model.named_parameters(), weights, strict=True
    ):
        if (
            name != "0.bias"
        ):  # before a BatchNorm its gradients are rounding errors, and those are another process's own
            assert torch.allclose(torch.tensor(own), expected, atol=1e-4), name
    report = audit(read_logs(tmp_path / "samples"))
    assert report.exact


def test_the_sample_log_says_of_each_step_that_it_is_complete_and_at_the_end_that_all_are(tmp_path: Path) -> None:
    train(State(build, sample_log=tmp_path))
    (log,) = tmp_path.glob("*.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = list(range(1, PLAN.total_steps + 1))
    assert [record["step"] for record in records if record["kind"] == "step"] == steps
    assert [(record["step"], record["loss"] > 0) for record in records if record["kind"] == "done"] == [
        (step, True) for step in steps
    ]
    assert {key: records[-1][key] for key in ("kind", "step", "why")} == {
        "kind": "end", "step": PLAN.total_steps, "why": "completed"
    }  # fmt: skip


def test_each_step_is_reported_with_its_samples_its_loss_and_how_fast_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr("elastipod.in_memory.elastic_state.report", lambda *values: told.append(values))
    times = iter(range(100))
    monkeypatch.setattr("elastipod.in_memory.elastic_state.time", SimpleNamespace(monotonic=lambda: next(times) / 4))
    train(State(build))
    sizes = [len(PLAN.batch(step, 0, 1).indices) for step in range(1, PLAN.total_steps + 1)]
    assert len(set(sizes)) == 2, "the last step of an epoch is a short one"
    assert [values[:2] for values in told] == list(enumerate(accumulate(sizes), start=1))
    assert [values[2] > 0 for values in told] == [True] * PLAN.total_steps
    assert [values[3] for values in told] == [4 * size for size in sizes], "a quarter of a second for each step"


def test_a_save_that_is_under_way_is_completed_where_the_script_leaves_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops early, as its loss is small enough: nothing else is saved, and the process may live on."""
    write = Saver._write

    def slowly(saver: Saver, *arguments: Any) -> None:
        time.sleep(0.5)
        write(saver, *arguments)

    monkeypatch.setattr(Saver, "_write", slowly)
    state = State(build, checkpoints=tmp_path / "c", checkpoint_every=2)
    for step in state.steps(PLAN):
        with step as batch:
            loss_of(state.model, batch.indices).backward()  # type: ignore[no-untyped-call]
        if state.completed == 3:
            break
    assert [int(path.name.split("-")[1]) for path in (tmp_path / "c").glob("step-*")] == [2]


def test_only_as_many_checkpoints_are_kept_as_wanted(tmp_path: Path) -> None:
    train(State(build, checkpoints=tmp_path / "c", checkpoint_every=3, keep=1))
    kept = sorted(path.name for path in (tmp_path / "c").glob("step-*"))
    assert [int(name.split("-")[1]) for name in kept] == [PLAN.total_steps]


@pytest.mark.parametrize("seed", [0, 5])
def test_random_numbers_follow_from_seed_step_and_rank(seed: int) -> None:
    state, drawn = State(build, seed=seed), []
    for step in state.steps(PLAN):
        with step as batch:
            drawn.append(float(torch.rand(())))
            loss_of(state.model, batch.indices).backward()  # type: ignore[no-untyped-call]
    expected = [
        float(torch.rand((), generator=torch.Generator().manual_seed(rank_seed(number + (seed << 40), 0))))
        for number in range(1, PLAN.total_steps + 1)
    ]
    assert drawn == expected


def test_a_script_may_apply_by_itself_and_nothing_is_applied_twice() -> None:
    state = State(build)
    for step in state.steps(PLAN):
        with step as batch:
            loss_of(state.model, batch.indices).backward()  # type: ignore[no-untyped-call]
            state.optimizer.step()
            state.scheduler.step()
            state.ema.update_parameters(state._members.model)
    assert state._members.digests() == trained_alone()


def test_a_step_that_the_scaler_of_a_script_has_left_out_is_not_tried_again() -> None:
    def with_scaler() -> dict[str, Any]:
        return {**build(), "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}

    state = State(with_scaler, checks_changes=False)
    last = 3
    for step in state.steps(ElasticBatches(12, 4)):
        with step as batch:
            factor = 1.0 if batch.step == last else float("inf")
            state.scaler.scale(loss_of(state.model, batch.indices) * factor).backward()
            state.scaler.step(state.optimizer)
            state.scaler.update()
    assert state.completed == last
    assert state.scaler.get_scale() == 256.0, "two steps were left out, each of them once"
    assert state.scheduler.last_epoch == 0, "a script that applies runs its schedule as well"
    assert next(iter(state.optimizer.state.values()))["step"] == 1


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a mistake that is planted here
@pytest.mark.parametrize(("what", "said"), [("optimizer", OUTSIDE), ("scheduler", TWICE)])
@pytest.mark.parametrize("is_in_block", [True, False], ids=["in the block", "after it"])
def test_what_a_plain_loop_has_after_its_backward_pass_is_not_run_twice(
    what: str, said: str, is_in_block: bool
) -> None:
    state = State(build)

    def trains() -> None:
        for step in state.steps(PLAN):
            with step as batch:
                loss_of(state.model, batch.indices).backward()  # type: ignore[no-untyped-call]
                if is_in_block:
                    getattr(state, what).step()
            if not is_in_block:
                getattr(state, what).step()

    if (what, is_in_block) == ("optimizer", True):
        trains()
        assert state.completed == PLAN.total_steps
        return
    with pytest.raises(TypeError, match=re.escape(said)):
        trains()
    state.optimizer.step()  # the loop has ended


def test_a_script_that_leaves_its_optimizer_to_the_library_is_not_told_otherwise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorldLife, "outlives_generation", True)
    monkeypatch.setattr(PassWatch, "begin", lambda _: None)
    train(State(build))
    assert caplog.records == []


def test_the_apply_of_a_script_is_called_once_a_step_with_its_gradients() -> None:
    seen: list[tuple[int, bool]] = []

    def apply(state: State) -> None:
        seen.append((state.completed, all(each.grad is not None for each in state._members.model.parameters())))

    train(State(build, apply=apply))
    assert seen == [(number, True) for number in range(PLAN.total_steps)]


def test_gradients_from_before_a_step_are_not_added_to_its_own() -> None:
    state = State(build)
    for step in state.steps(PLAN):
        loss_of(state.model, [0, 1]).backward()  # type: ignore[no-untyped-call]
        with step as batch:
            loss_of(state.model, batch.indices).backward()  # type: ignore[no-untyped-call]
    parameters = [key for key in trained_alone() if key.startswith("model.")]
    found, expected = state._members.digests(), trained_alone()
    assert [found[key] for key in parameters] == [expected[key] for key in parameters]


def wrong_first_step(state: State) -> None:
    for step in state.steps(PLAN):
        with step as batch:
            loss_of(state.model, batch.indices).backward()  # type: ignore[no-untyped-call]
            announce_reduced_gradients(3.0)


def test_a_wrong_first_step_does_not_count_and_leaves_a_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    places: dict[str, Any] = {"checkpoints": tmp_path, "checkpoint_every": 1}
    with pytest.raises(ZeroDivisionError):
        train(State(build, **places), until=5)
    state = State(build, **places)
    with pytest.raises(
        StateDiffersError, match=r"step \d, the first of generation 1, does not count: the reduced grad"
    ):
        wrong_first_step(state)
    assert state.completed > 0
    assert state._members.digests() == trained_alone(state.completed)
    statistics = [each.tolist() for each in trained_members(state.completed)._members.model.buffers()]
    assert [each.tolist() for each in state.model.buffers()] == statistics
    resumed = State(build, **places)
    assert train(resumed)[0] == state.completed + 1
    assert int(resumed.model[1].num_batches_tracked) == PLAN.total_steps  # type: ignore[index]


def test_the_check_of_the_first_step_can_be_left_out_and_is_of_the_first_alone() -> None:
    wrong_first_step(State(build, checks_changes=False))
    state = State(build)
    for step in state.steps(PLAN):
        with step as batch:
            loss_of(state.model, batch.indices).backward()  # type: ignore[no-untyped-call]
            announce_reduced_gradients(1.0 if batch.step == 1 else 3.0)
    assert state.completed == PLAN.total_steps


def test_a_loop_without_its_block_is_told_so() -> None:
    with pytest.raises(TypeError, match="must be one block: `with step as batch:`"):
        for _ in State(build).steps(PLAN):
            pass


def test_a_checkpoint_may_take_longer_to_load_than_a_regroup_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large state on slow storage does; the process ended itself then, and so did every one after it."""
    assert train(State(build, checkpoints=tmp_path)) == list(range(1, PLAN.total_steps + 1))
    ended: list[str] = []
    limit_s = 2.0  # enough for all that is not the load
    monkeypatch.setattr(phase_limit, "LIMITS", {**LIMITS, Phase.AGREEING: timedelta(seconds=limit_s)})
    monkeypatch.setattr("elastipod.in_memory.elastic_state.PhaseLimit", lambda: PhaseLimit(ended.append))
    load = DurableTier.load

    def slow_load(self: DurableTier, *, fills_others: bool) -> Any:
        threading.Event().wait(3 * limit_s)
        return load(self, fills_others=fills_others)

    monkeypatch.setattr(DurableTier, "load", slow_load)
    state = State(build, checkpoints=tmp_path)
    assert train(state) == []
    assert state.completed == PLAN.total_steps
    assert ended == []


def test_a_step_has_one_block() -> None:
    state = State(build)
    step = next(iter(state.steps(PLAN)))
    with step as batch:
        with pytest.raises(TypeError, match="a second block of the same step"):
            step.__enter__()
        loss_of(state.model, batch.indices).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError, match="compute all gradients of a step in one block"):
        step.__enter__()
    assert state.completed == 1


def test_a_state_trains_one_plan_in_one_loop() -> None:
    state = State(build)
    train(state)
    with pytest.raises(TypeError, match=r"Call steps\(\) once; set epochs= in ElasticBatches"):
        train(state)


def test_members_that_torch_makes_in_an_unusual_way_are_members_all_the_same() -> None:
    def built() -> dict[str, Any]:
        members = build()
        chained = ChainedScheduler([ConstantLR(members["optimizer"]), ExponentialLR(members["optimizer"], 0.9)])
        return {**members, "scheduler": chained, "scaler": torch.amp.GradScaler("cpu", enabled=False)}

    state = State(built)
    assert train(state) == list(range(1, PLAN.total_steps + 1))
    assert state.scheduler.get_last_lr()[0] < 0.1 * 0.9**PLAN.total_steps * 1.001


def test_a_process_that_a_script_forks_does_not_end_the_training_of_its_parent() -> None:
    state = State(build)
    loop = state.steps(PLAN)
    next(loop)
    state._pid += 1  # as in a child, whose exit handlers are the parent's
    state._close()
    assert not state._is_closed
    state._pid -= 1
    state._close()
    assert state._is_closed
