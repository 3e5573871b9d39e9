"""What a run has resumed from memory is written to storage as the images hold it, while training changes the live state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.memory_places import agent_page
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.in_memory.forked_ranks import run_ranks, world
from torch.nn.parallel import DistributedDataParallel

from elastipod.checkpoint import CheckpointManager, saver
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.staging import Staging
from elastipod.errors import CheckpointError
from elastipod.worker_file import EventLevel


@contextmanager
def broken_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take no file, so that a step that is to be durable stays in memory only."""

    def refuse(*_: object) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStore, "create_file", refuse)
        yield


def leave_in_memory(manager: CheckpointManager, trainer: Trainer, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with broken_storage(monkeypatch), pytest.raises(CheckpointError):
        trainer.save(manager, step)


def manager_of(root: Path, *, rank: int = 0) -> CheckpointManager:
    return CheckpointManager(root / "disk", memory=root / f"memory of rank {rank}")


def weights_after(*steps: int) -> list[Any]:
    trainer = Trainer()
    for step in steps:
        trainer.step(step)
    return [each.tolist() for each in trainer.weights()]


def durable(root: Path) -> list[CheckpointId]:
    return DirectoryStore(root / "disk").list_complete()


def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the steps that are copied to memory."""
    found: list[int] = []
    copy = Staging.copy

    def noted(self: Staging, capture: Any, target: CheckpointId, *rest: Any, **more: Any) -> Any:
        found.append(target.step)
        return copy(self, capture, target, *rest, **more)

    monkeypatch.setattr(Staging, "copy", noted)
    return found


def saved_in_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    trainer.step(1)
    with manager_of(root) as manager:
        leave_in_memory(manager, trainer, 1, monkeypatch)


def test_it_is_written_as_it_was_saved_whatever_training_does_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_in_memory(tmp_path, monkeypatch)
    copied, again = copies(monkeypatch), Trainer(seed=2)
    with agent_page(tmp_path, monkeypatch), manager_of(tmp_path) as manager:
        assert again.load(manager) == 1
        again.step(2)
        assert durable(tmp_path) == [], "nothing is written before the first step is reported"
        assert manager.wait() == tmp_path / "disk" / CheckpointId(1, 2).name
    assert copied == []
    last = Trainer(seed=3)
    with CheckpointManager(tmp_path / "disk", memory=False) as manager:
        assert last.load(manager) == 1
    assert [each.tolist() for each in last.weights()] == weights_after(1)
    last.step(2)
    assert [each.tolist() for each in last.weights()] == weights_after(1, 2), "its moments are those of the save, too"


def test_the_image_stays_the_best_place_to_resume_from_and_is_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_in_memory(tmp_path, monkeypatch)
    with manager_of(tmp_path) as manager:
        assert Trainer(seed=2).load(manager) == 1
    trainer = Trainer(seed=3)
    with manager_of(tmp_path) as manager:
        found = manager.load_latest(model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler)
        assert found is not None
        assert (found.tier, found.step, found.generation) == ("memory", 1, 1)
        assert manager.wait() is None, "no save has begun"
    assert [each.tolist() for each in trainer.weights()] == weights_after(1)
    assert durable(tmp_path) == [CheckpointId(1, 2)]


def test_who_deletes_what_was_written_has_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_in_memory(tmp_path, monkeypatch)
    with manager_of(tmp_path) as manager:
        assert Trainer(seed=2).load(manager) == 1
    for file in (tmp_path / "disk" / CheckpointId(1, 2).name).iterdir():
        file.unlink()
    (tmp_path / "disk" / CheckpointId(1, 2).name).rmdir()
    with manager_of(tmp_path) as manager:
        assert Trainer(seed=3).load(manager) is None


def test_a_save_of_the_same_step_waits_for_it_and_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_in_memory(tmp_path, monkeypatch)
    copied, again = copies(monkeypatch), Trainer(seed=2)
    with agent_page(tmp_path, monkeypatch), manager_of(tmp_path) as manager:
        assert again.load(manager) == 1
        assert again.save(manager, 1) == tmp_path / "disk" / CheckpointId(1, 2).name
    assert (copied, durable(tmp_path)) == ([], [CheckpointId(1, 2)])


def test_an_image_that_was_damaged_since_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved_in_memory(tmp_path, monkeypatch)
    with agent_page(tmp_path, monkeypatch), manager_of(tmp_path) as manager:
        assert Trainer(seed=2).load(manager) == 1
        (image,) = (tmp_path / "memory of rank 0").rglob("*.bin")
        with image.open("r+b") as file:
            first = file.read(1)[0]
            file.seek(0)
            file.write(bytes([first ^ 1]))
        with pytest.raises(
            CheckpointError, match="cannot write the checkpoint of step 1: rank 0's part in memory is damaged"
        ):
            manager.wait()
    assert "step 1 is not saved" in caplog.text
    assert durable(tmp_path) == []


@pytest.mark.parametrize("is_told", [True, False], ids=["a step is reported", "no step is reported"])
def test_it_is_written_once_training_has_made_a_step_or_was_given_time_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    saved_in_memory(tmp_path, monkeypatch)
    monkeypatch.setattr(saver, "_FIRST_STEP_S", 4 * PATIENCE_S if is_told else 0.2)
    with agent_page(tmp_path, monkeypatch) as file, manager_of(tmp_path) as manager:
        assert Trainer(seed=2).load(manager) == 1
        save = manager._save
        assert save is not None
        if is_told:
            assert not save.goes_on.done()
            file.report(0, step=2)
        save.thread.join(PATIENCE_S)
        assert save.path == tmp_path / "disk" / CheckpointId(1, 2).name


def test_a_short_drain_before_the_first_step_leaves_it_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_in_memory(tmp_path, monkeypatch)
    monkeypatch.setattr(saver, "_FIRST_STEP_S", 4 * PATIENCE_S)
    again = Trainer(seed=2)
    with agent_page(tmp_path, monkeypatch) as file:
        manager = manager_of(tmp_path)
        assert again.load(manager) == 1
        file.set_event(EventLevel.DRAIN, time.time() + 100, leaves=False)
        assert again.save(manager, 1) == manager._run().memory_path()
        assert manager._save is not None
        manager._save.thread.join(PATIENCE_S)
        assert not manager._save.thread.is_alive()
    assert durable(tmp_path) == []
    with manager_of(tmp_path) as manager:
        assert Trainer(seed=3).load(manager) == 1
        assert manager.wait() == tmp_path / "disk" / CheckpointId(1, 3).name


def saved_by(trainer: Trainer, manager: CheckpointManager, step: int) -> str:
    """Save; give what it says where it fails."""
    try:
        trainer.save(manager, step)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("before", "copied"), [(2, []), (1, [1])], ids=["two nodes have all of it", "one node has all of it"]
)
def test_a_larger_world_writes_it_and_copies_it_only_where_one_node_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, copied: list[int]
) -> None:
    first, second, third = free_port(), free_port(), free_port()

    def body(rank: int) -> Any:
        if rank < before:
            with world(rank, before, first), manager_of(tmp_path, rank=rank) as manager:
                trainer = Trainer()
                trainer.step(1)
                with broken_storage(monkeypatch):
                    assert "Input/output error" in saved_by(trainer, manager, 1)
        steps = copies(monkeypatch)
        with world(rank, 3, second), manager_of(tmp_path, rank=rank) as manager:
            trainer = Trainer(seed=2)
            trainer.model = DistributedDataParallel(trainer.model)  # type: ignore[assignment]
            assert trainer.load(manager) == 1
            trainer.step(2)
            told = [str(manager.wait()), steps]
        last = Trainer(seed=3)
        with world(rank, 3, third), CheckpointManager(tmp_path / "disk", memory=False) as manager:
            assert last.load(manager) == 1
        return [*told, [each.tolist() for each in last.weights()]]

    path = str(tmp_path / "disk" / CheckpointId(1, 2).name)
    assert run_ranks(3, body) == [[path, copied, weights_after(1)]] * 3
    files = sorted(each.name for each in Path(path).glob("__*"))
    assert files == [f"__{rank}_0.distcp" for rank in (range(2) if not copied else range(3))], "who has a part"
    headers = [ImageHeader.from_json(each.read_text()) for each in tmp_path.rglob("image-*.json")]
    assert len(headers) == (before if not copied else 3)
    assert {each.durable for each in headers} == {CheckpointId(1, 2)}, "on every node"


def test_random_states_of_the_former_world_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_in_memory(tmp_path, monkeypatch)
    with manager_of(tmp_path) as manager:
        assert Trainer(seed=2).load(manager) == 1
        resumed = torch.rand(3)
    with CheckpointManager(tmp_path / "disk", memory=False) as manager:
        assert Trainer(seed=3).load(manager) == 1
        assert torch.equal(torch.rand(3), resumed)
