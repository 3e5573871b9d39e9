"""What a checkpoint manager of one process promises: copies, tiers, whose directory it is, and what it says when it cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nonempty import every
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.memory_places import ONE_PROCESS, Regression, save_async
from tests.unit.checkpoint.trainer import Trainer, entries
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from elastipod import save_checkpoint
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.optimizer_state import initial_state
from elastipod.errors import CheckpointError, FencedError


def test_training_goes_on_while_its_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, manager, may_write = Trainer(), CheckpointManager(tmp_path), threading.Event()
    create_file = DirectoryStore.create_file

    def held_back(self: DirectoryStore, *arguments: object) -> object:
        assert may_write.wait(PATIENCE_S)
        return create_file(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectoryStore, "create_file", held_back)
    trainer.step(1)
    wanted = trainer.weights()
    save_async(trainer, manager, 1)
    trainer.step(2)  # while nothing has been written yet
    assert manager._store.list_complete() == []
    may_write.set()
    assert manager.wait() == tmp_path / CheckpointId(1, 1).name
    again = Trainer(seed=4)
    assert again.load(CheckpointManager(tmp_path)) == 1
    assert every(torch.equal(mine, saved) for mine, saved in zip(again.weights(), wanted, strict=True))


def test_the_newest_and_every_so_many_are_kept(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path, keep=2, keep_every=3)
    for step in range(1, 9):
        trainer.save(manager, step)
    assert [each.step for each in manager._store.list_complete()] == [8, 7, 6, 3]


def test_a_random_number_drawn_after_a_resume_is_the_one_that_was_next(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path)
    torch.manual_seed(5)
    trainer.save(manager, 1)
    wanted = torch.rand(3)
    trainer.load(CheckpointManager(tmp_path))
    assert torch.equal(torch.rand(3), wanted)


@ONE_PROCESS
def test_torchs_own_reader_can_load_it(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.step(1)
    path = trainer.save(CheckpointManager(tmp_path), 1)
    state = {"model": {name: torch.zeros_like(value) for name, value in trainer.model.state_dict().items()}}
    load_dcp(state, storage_reader=FileSystemReader(path))
    assert every(torch.equal(value, state["model"][name]) for name, value in trainer.model.state_dict().items())


def test_what_is_being_written_is_awaited_before_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, manager, is_loading = Trainer(), CheckpointManager(tmp_path), threading.Event()
    trainer.save(manager, 1)
    create_file = DirectoryStore.create_file

    def slow(self: DirectoryStore, *arguments: object) -> object:
        assert is_loading.wait(PATIENCE_S)
        time.sleep(0.2)  # a load that does not wait is through by then, with step 1
        return create_file(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectoryStore, "create_file", slow)
    save_async(trainer, manager, 2)
    is_loading.set()
    assert trainer.load(manager) == 2


# -- whose directory it is -------------------------------------------------------------------------------------------


def test_another_job_is_refused_unless_it_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIPOD_GENERATION", "1")
    monkeypatch.setenv("ELASTIPOD_RUN_ID", "uid-a")
    monkeypatch.setenv("ELASTIPOD_JOB", "team/a")
    first = CheckpointManager(tmp_path, memory=False)
    Trainer().save(first, 1)
    monkeypatch.setenv("ELASTIPOD_RUN_ID", "uid-b")
    monkeypatch.setenv("ELASTIPOD_JOB", "team/b")
    with pytest.raises(
        CheckpointError, match=r"holds the checkpoints of job team/a; give team/b a directory of its own"
    ):
        Trainer().load(CheckpointManager(tmp_path, memory=False))
    Trainer().save(first, 2)
    assert Trainer().load(CheckpointManager(tmp_path, memory=False, adopt=True)) == 2
    with pytest.raises(FencedError):
        Trainer().save(first, 3)


# -- what it says when it cannot -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param(
            torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)),
            r"its model\.0\.weight has the shape \[8, 4\], here it is \[9, 4\]",
            id="another shape",
        ),
        pytest.param(
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2), torch.nn.Linear(2, 2)),
            r"it has no model\.3\.bias, .*model\.3\.weight",
            id="a missing key",
        ),
        pytest.param(
            torch.nn.Sequential(torch.nn.Linear(4, 8)),
            r"it also has model\.2\.bias, model\.2\.weight, .* which this model and optimizer have not",
            id="keys too many",
        ),
    ],
)
def test_another_model_is_refused_and_nothing_is_overwritten(
    tmp_path: Path, other: torch.nn.Module, words: str
) -> None:
    trainer = Trainer()
    trainer.step(1)
    trainer.save(CheckpointManager(tmp_path), 1)
    before = [parameter.detach().clone() for parameter in other.parameters()]
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointError, match=words):
        CheckpointManager(tmp_path).load_latest(model=other, optimizer=optimizer)
    assert every(torch.equal(mine, old) for mine, old in zip(other.parameters(), before, strict=True))
    assert entries(tmp_path)[-1] == CheckpointId(1, 1).name


Optimizers = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@ONE_PROCESS
@pytest.mark.parametrize(
    ("make", "has_state"),
    [
        pytest.param(lambda parameters: torch.optim.Adam(parameters, amsgrad=True), True, id="Adam"),
        pytest.param(lambda parameters: torch.optim.AdamW(parameters, fused=True), True, id="AdamW"),
        pytest.param(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), True, id="momentum"),
        pytest.param(lambda parameters: torch.optim.SGD(parameters, lr=0.1), False, id="SGD"),
        pytest.param(torch.optim.RMSprop, True, id="another"),
    ],
)
def test_a_new_optimizer_has_room_for_moments_as_torch_makes_it(make: Optimizers, has_state: bool) -> None:
    def described(states: Mapping[Any, Mapping[str, torch.Tensor]]) -> list[dict[str, object]]:
        return [
            {
                name: (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
                for name, value in sorted(states[parameter].items())
            }
            for parameter in trained
        ]

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    model[0].bias.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter.detach().clone() for parameter in trained]
    ours, theirs = make(model.parameters()), make(model.parameters())
    made = initial_state(ours, trained)
    assert not ours.state, "the optimizer itself is as it was"
    get_state_dict(model, theirs)  # makes them with a step of zeros
    if has_state:
        assert described(made) == described(theirs.state)
    assert len(made) == len(theirs.state) == (3 if has_state else 0)
    assert every(torch.equal(mine, before) for mine, before in zip(trained, weights, strict=True))
    assert every(parameter.grad is None for parameter in trained)


def test_a_refused_checkpoint_leaves_a_new_optimizer_new(tmp_path: Path) -> None:
    run = Regression(0)
    run.train(2)
    save_checkpoint(run.model, run.optimizer, run.scheduler, {"step": 2}, tmp_path)
    other = torch.nn.Linear(9, 1)
    optimizer = torch.optim.Adam(other.parameters())
    with pytest.raises(CheckpointError, match="has the shape"):
        CheckpointManager(tmp_path).load_latest(model=other, optimizer=optimizer)
    assert not optimizer.state


def test_values_that_cannot_be_kept_are_named(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(CheckpointError, match=r"hook is an object; only tensors and plain values can be saved"):
        trainer.save(CheckpointManager(tmp_path), 1)
