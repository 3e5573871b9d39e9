"""Loads of a given step, of weights only, and of a checkpoint that has more or less than the objects."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.nonempty import every
from tests.unit.checkpoint.trainer import Trainer, entries, flip_a_byte, shard
from tests.unit.in_memory.forked_ranks import run_ranks, world

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.errors import CheckpointError
from elastipod.group_release import wait_until_released


def saved(folder: Path, *, steps: int = 3) -> list[list[torch.Tensor]]:
    """Train and save each step; gives the weights after each."""
    run, weights = Trainer(), []
    with CheckpointManager(folder, memory=False, keep=9) as manager:
        for step in range(1, steps + 1):
            run.step(step)
            run.save(manager, step)
            weights.append(run.weights())
    return weights


def test_a_given_step_is_loaded_and_training_goes_on_from_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = saved(tmp_path)
    run = Trainer(seed=1)
    with CheckpointManager(tmp_path, memory=False, keep=9) as manager:
        resume = manager.load(2, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
        assert (resume.step, resume.extra, resume.missing) == (2, {"note": 2}, ())
        assert every(map(torch.equal, run.weights(), weights[1]))
        run.step(3)
        assert every(map(torch.equal, run.weights(), weights[2])), "optimizer and schedule too"
        assert not caplog.messages
        run.save(manager, 3)
    assert [
        "holds the checkpoint of step 3, which this run did not resume from" in each for each in caplog.messages
    ] == [True]


def steps_in(folder: Path) -> list[int]:
    return [each.step for each in DirectoryStore(folder).list_complete()]


def gone_back(folder: Path, *, keep: int, to: int, of: int) -> tuple[Trainer, CheckpointManager]:
    """A run that has saved some steps and then loaded an earlier one, which it kept for good."""
    run = Trainer()
    manager = CheckpointManager(folder, memory=False, keep=keep, keep_every=to)
    for step in range(1, of + 1):
        run.step(step)
        run.save(manager, step)
    manager.load(to, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    return run, manager


def test_a_run_that_went_back_keeps_what_it_has_just_saved(tmp_path: Path) -> None:
    run, manager = gone_back(tmp_path, keep=1, to=2, of=5)
    with manager:
        assert run.save(manager, 3).is_dir()
        assert steps_in(tmp_path) == [5, 4, 3, 2], "the newest, those to be kept for good, and the last"
        assert run.save(manager, 6).is_dir()
        assert steps_in(tmp_path) == [6, 4, 2]


@pytest.mark.parametrize("is_last_save", [True, False])
def test_a_run_that_went_back_is_told_that_a_later_step_is_saved_already(tmp_path: Path, is_last_save: bool) -> None:
    """With the weights of before, which are not those of the run any more."""
    run, manager = gone_back(tmp_path, keep=9, to=2, of=5)
    if not is_last_save:
        run.step(13)
        with pytest.raises(CheckpointError):
            run.save(manager, 3)
        shutil.rmtree(tmp_path / "step-0000000003-gen-000001")
        assert run.save(manager, 3).is_dir()
    run.step(15)
    with pytest.raises(CheckpointError) as raised:
        run.save(manager, 5)
    assert str(raised.value) == (
        f"{tmp_path / 'step-0000000005-gen-000001'} was saved before this run went back to step 2, and holds other weights; delete "
        "the checkpoints after step 2, or save to another directory"
    )
    shutil.rmtree(tmp_path / "step-0000000005-gen-000001")
    wanted = run.weights()
    run.save(manager, 5)
    manager.load(5, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    assert every(map(torch.equal, run.weights(), wanted))
    assert run.save(manager, 5).is_dir(), "it is the state that was loaded"
    manager.close()


def test_a_damaged_step_is_written_again_by_the_run_that_wrote_it(tmp_path: Path) -> None:
    run, manager = gone_back(tmp_path, keep=9, to=3, of=3)
    flip_a_byte(shard(tmp_path / "step-0000000003-gen-000001"))
    assert run.load(manager) == 2
    run.step(3)
    wanted = run.weights()
    run.save(manager, 3)
    manager.close()
    with CheckpointManager(tmp_path, memory=False) as successor:
        assert run.load(successor) == 3
    assert every(map(torch.equal, run.weights(), wanted))


def test_a_step_in_memory_is_loaded_by_its_number(tmp_path: Path) -> None:
    run, other = Trainer(), Trainer(seed=1)
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        run.save(manager, 4)
        run.step(5)
        manager.save_async(5, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler, durable=False)
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as manager:
        resume = manager.load(5, model=other.model, optimizer=other.optimizer, scheduler=other.scheduler)
        assert (resume.step, resume.tier) == (5, "memory")
    assert every(map(torch.equal, run.weights(), other.weights()))


@pytest.mark.parametrize(("steps", "there"), [(3, "1, 2, 3"), (0, "no step at all")])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, steps: int, there: str) -> None:
    saved(tmp_path, steps=steps)
    run = Trainer()
    with CheckpointManager(tmp_path, memory=False) as manager:
        with pytest.raises(CheckpointError, match=f"has no checkpoint of step 7; it has {there}"):
            manager.load(7, model=run.model, optimizer=run.optimizer)
        with pytest.raises(CheckpointError, match=f"has no checkpoint of step 7; it has {there}"):
            manager.load_weights(model=run.model, step=7)
        with pytest.raises(ValueError, match="step is -1; it is the number of completed optimizer steps"):
            manager.load(-1, model=run.model, optimizer=run.optimizer)


def test_a_damaged_step_is_not_replaced_by_another_one(tmp_path: Path) -> None:
    saved(tmp_path)
    run = Trainer(seed=1)
    (folder,) = tmp_path.glob("step-0000000002-*")
    flip_a_byte(shard(folder))
    with (
        CheckpointManager(tmp_path, memory=False) as manager,
        pytest.raises(CheckpointError, match=r"the checkpoint of step 2 in .* is not intact; load another"),
    ):
        manager.load(2, model=run.model, optimizer=run.optimizer)


@pytest.mark.parametrize(("step", "loaded"), [(None, 3), (1, 1)])
def test_weights_alone_change_nothing_else_and_claim_nothing(tmp_path: Path, step: int | None, loaded: int) -> None:
    weights = saved(tmp_path)
    run = Trainer(seed=1)
    run.step(1)
    moments = copy.deepcopy(run.optimizer.state_dict())
    noise = torch.get_rng_state()
    with CheckpointManager(tmp_path, memory=False) as trains, CheckpointManager(tmp_path) as reads:
        generation = trains.claim()
        resume = reads.load_weights(model=run.model, step=step)
        assert resume is not None
        assert (resume.step, resume.missing, resume.unexpected) == (loaded, (), ())
        assert run.save(trains, 9), "the other run has not been fenced"
    assert every(map(torch.equal, run.weights(), weights[loaded - 1]))
    assert entries(tmp_path / ".claims") == [f"gen-{generation:06d}", "id"]
    assert repr(run.optimizer.state_dict()) == repr(moments)
    assert torch.equal(torch.get_rng_state(), noise)


def test_weights_of_another_model_are_refused_or_loaded_in_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = saved(tmp_path)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
    model.add_module("adapter", torch.nn.Linear(8, 1, bias=False))
    before = copy.deepcopy(model.state_dict())
    with CheckpointManager(tmp_path, memory=False) as manager:
        with pytest.raises(CheckpointError, match=r"does not fit this model: it has no model\.adapter\.weight$"):
            manager.load_weights(model=model)
        assert every(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        resume = manager.load_weights(model=model, strict=False)
    assert resume is not None
    assert resume.missing == ("model.adapter.weight",)
    assert resume.unexpected == ("model.2.weight", "model.2.bias")
    assert caplog.messages == [
        "the checkpoint of step 3 was loaded in part: it has no model.adapter.weight, which stays as it is; its model.2.bias, "
        "model.2.weight is not loaded"
    ]
    assert torch.equal(model.get_parameter("0.weight"), weights[2][0])
    assert torch.equal(model.get_parameter("adapter.weight"), before["adapter.weight"])


def test_other_shapes_are_refused_even_when_a_part_is_enough(tmp_path: Path) -> None:
    saved(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9))
    with (
        CheckpointManager(tmp_path, memory=False) as manager,
        pytest.raises(CheckpointError, match=r"its model\.0\.weight has the shape \[8, 4\], here it is \[9, 4\]"),
    ):
        manager.load_weights(model=model, strict=False)


@pytest.mark.parametrize("in_memory", [False, True], ids=["durable", "memory"])
def test_a_model_that_grew_goes_on_with_what_was_saved(tmp_path: Path, in_memory: bool) -> None:
    run = Trainer()
    run.step(1)
    memory = tmp_path / "memory" if in_memory else False
    with CheckpointManager(tmp_path / "disk", memory=memory) as manager:
        manager.save_async(1, model=run.model, optimizer=run.optimizer, durable=not in_memory)
        manager.wait()
    grown = Trainer(seed=1)
    grown.model.append(torch.nn.Linear(2, 1, bias=False))
    first, *others, new = grown.model.parameters()
    optimizer = torch.optim.AdamW([{"params": [new, *others], "lr": 0.7}, {"params": [first], "lr": 0.7}])
    new.grad = torch.ones_like(new)
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    arguments: dict[str, Any] = {"model": grown.model, "optimizer": optimizer, "stateful": {"scaler": scaler}}
    with CheckpointManager(tmp_path / "disk", memory=memory) as manager:
        with pytest.raises(CheckpointError, match=r"does not fit this model and optimizer: it has no model\.3\.weight"):
            manager.load_latest(**arguments)
        assert optimizer.state[new]
        resume = manager.load_latest(**arguments, strict=False)
    assert resume is not None
    assert (resume.missing, resume.unexpected) == (("model.3.weight", "stateful.scaler.values"), ())
    assert every(map(torch.equal, run.weights(), grown.weights()[:-1]))
    assert not optimizer.state[new], "nothing was saved for it, so it begins anew"
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert torch.equal(optimizer.state[first]["exp_avg"], run.optimizer.state[next(run.model.parameters())]["exp_avg"])
    assert scaler.get_scale() == 8.0


def test_moments_of_another_kind_of_optimizer_are_left_out(tmp_path: Path) -> None:
    run, other = Trainer(), Trainer(seed=1)
    run.step(1)
    optimizer = torch.optim.SGD(other.model.parameters(), lr=0.3, momentum=0.9)
    with CheckpointManager(tmp_path, memory=False) as manager:
        run.save(manager, 1)
        resume = manager.load_latest(model=other.model, optimizer=optimizer, strict=False)
    assert resume is not None
    assert not resume.missing
    assert sorted({key.rpartition(".")[2] for key in resume.unexpected}) == ["exp_avg", "exp_avg_sq", "step"]
    assert every(map(torch.equal, run.weights(), other.weights()))
    assert not optimizer.state


def test_loads_of_weights_leave_no_groups_behind(tmp_path: Path) -> None:
    """An evaluation loads those of one checkpoint after the other."""
    port = free_port()

    def body(rank: int) -> Any:
        run = Trainer()
        counts: list[int] = []
        with world(rank, 2, port):
            with CheckpointManager(tmp_path, memory=False) as manager:
                run.save(manager, 1)
            for _ in range(6):
                resume = CheckpointManager(tmp_path, memory=False).load_weights(model=run.model)
                assert resume is not None
                wait_until_released()
                counts.append(len(dist.distributed_c10d._world.pg_map))
        return counts

    for counts in run_ranks(2, body):
        assert counts == counts[:1] * 6
