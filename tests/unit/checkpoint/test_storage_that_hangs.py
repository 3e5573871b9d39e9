"""Storage that does not answer inside a call: who waits how long, what becomes of that save, and what the next one uses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.in_memory.forked_ranks import run_ranks, world

from elastipod.checkpoint import CheckpointManager, saver
from elastipod.checkpoint.communicator import Communicator, RanksLost
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.drain import DrainNotice
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.saver import Save
from elastipod.checkpoint.staged_state import StagedState
from elastipod.errors import CheckpointError

SILENCE_S = 0.01


class Hanging:
    """Makes the first call of a store's method that ``hangs`` names hang until `release`."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str, hangs: Callable[..., bool]) -> None:
        self.began, self.release = threading.Event(), threading.Event()
        real = getattr(DirectoryStore, method)

        def call(store: DirectoryStore, *arguments: Any, **more: Any) -> Any:
            if not self.began.is_set() and hangs(*arguments):
                self.began.set()
                assert self.release.wait(PATIENCE_S)
            return real(store, *arguments, **more)

        patch.setattr(DirectoryStore, method, call)


@contextmanager
def impatience(hanging: Hanging) -> Iterator[None]:
    """Have the ranks wait a moment only, once storage hangs; it may be slow before and afterwards."""
    assert hanging.began.wait(PATIENCE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "STORAGE_SILENCE_S", SILENCE_S)
        yield


def steps(folder: Path) -> list[int]:
    return [each.step for each in DirectoryStore(folder).list_complete()]


def save_async(manager: CheckpointManager, trainer: Trainer, step: int) -> None:
    manager.save_async(step, model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler)


def staged(save: Save) -> StagedState:
    """Give the copy that a save writes."""
    assert isinstance(save.staged, StagedState)
    return save.staged


def hanging_save(
    manager: CheckpointManager, trainer: Trainer, step: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Hanging, Save]:
    """Begin a save of which storage takes no file until it is released."""
    hanging = Hanging(monkeypatch, "create_file", lambda *_: True)
    save_async(manager, trainer, step)
    assert manager._save is not None
    return hanging, manager._save


def given_up(step: int, place: Path) -> str:
    return (
        f"cannot write the checkpoint of step {step} in {place}: storage has not answered for {SILENCE_S:g} s; the earlier "
        "checkpoints are untouched and the next save tries again"
    )


CALLS = [
    pytest.param("begin", lambda *_: True, [3, 1], id="before the draft"),
    pytest.param("create_file", lambda *_: True, [3, 1], id="in a rank's file"),
    pytest.param("create_file", lambda draft, name, *_: name == ".metadata", [3, 1], id="before the commit"),
    pytest.param("commit", lambda *_: True, [3, 2, 1], id="in the commit"),
    pytest.param("prune", lambda *_: True, [3, 2], id="behind the commit"),
]


@pytest.mark.parametrize(("method", "hangs", "complete"), CALLS)
@pytest.mark.parametrize("memory", [False, True], ids=["storage alone", "memory"])
def test_a_save_whose_storage_hangs_is_given_up_and_the_next_ones_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: bool,
    method: str, hangs: Callable[..., bool], complete: list[int],
) -> None:  # fmt: skip
    disk, trainer = tmp_path / "disk", Trainer()
    with CheckpointManager(disk, memory=tmp_path / "memory" if memory else False) as manager:
        trainer.save(manager, 1)
        hanging = Hanging(monkeypatch, method, hangs)
        save_async(manager, trainer, 2)
        hanging_save = manager._save
        assert hanging_save is not None
        trainer.step(1)
        with impatience(hanging):
            save_async(manager, trainer, 3)
        assert manager.wait() == disk / CheckpointId(3, 1).name
        assert caplog.messages == [given_up(2, disk)]
        hanging.release.set()
        hanging_save.thread.join(PATIENCE_S)
        assert steps(disk) == complete, "what was given up before its commit does not appear"
        manifest = DirectoryStore(disk).manifest(CheckpointId(complete[1], 1))
        assert not DirectoryStore(disk).find_problems(manifest, manifest.files)
        trainer.step(2)
        trainer.save(manager, 4)
        assert steps(disk) == [4, 3]
    assert len(caplog.messages) == 1, "it is told once"
    assert sorted(each.name for each in disk.iterdir()) == [".claims", CheckpointId(3, 1).name, CheckpointId(4, 1).name]
    again = Trainer(seed=3)
    with CheckpointManager(disk, memory=False) as manager:
        assert again.load(manager) == 4
    assert all(map(torch.equal, again.weights(), trainer.weights()))


@pytest.mark.parametrize("at", [0, 1], ids=["rank 0", "another rank"])
def test_where_the_storage_of_one_rank_hangs_all_give_that_save_up_and_write_the_next_over_new_connections(
    tmp_path: Path, at: int
) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, 2, port), pytest.MonkeyPatch.context() as patch:
            trainer = Trainer()
            with CheckpointManager(tmp_path, memory=False) as manager:
                trainer.save(manager, 1)
                used = manager._run().comm
                if rank == at:
                    hanging = Hanging(patch, "create_file", lambda draft, name, *_: name == f"__{at}_0.distcp")
                save_async(manager, trainer, 2)
                older = manager._save
                assert older is not None
                if rank == at:
                    with impatience(hanging):
                        older.await_end()
                save_async(manager, trainer, 3)
                said = [str(older.failure)]
                if rank == at:
                    hanging.release.set()  # while the next one is being written
                manager.wait()
                older.thread.join(PATIENCE_S)
                trainer.save(manager, 4)
                return [*said, manager._run().comm is used, type(older.error).__name__]

    found = run_ranks(2, body)
    assert found[at] == [given_up(2, tmp_path), False, "RanksLost"]
    assert found[1 - at] == [f"rank {at}: {given_up(2, tmp_path)}", True, "RanksLost"]
    assert steps(tmp_path) == [4, 3]


def test_a_step_whose_files_a_hanging_save_may_still_write_is_not_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path, memory=False) as manager:
        hanging, older = hanging_save(manager, trainer, 2, monkeypatch)
        with impatience(hanging):
            assert not manager.is_saving(0.1)
            assert str(older.failure) == given_up(2, tmp_path)
        with pytest.raises(CheckpointError) as raised:
            trainer.save(manager, 2)
        assert str(raised.value) == (
            f"cannot write the checkpoint of step 2 in {tmp_path}: storage has still not answered an earlier save of this step; "
            "save a later step, or start again when storage answers"
        )
        trainer.save(manager, 3)
        hanging.release.set()
        older.thread.join(PATIENCE_S)
        trainer.save(manager, 2)
    assert steps(tmp_path) == [3, 2]


def test_a_load_and_an_end_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    manager = CheckpointManager(tmp_path, memory=False)
    trainer.save(manager, 1)
    hanging, older = hanging_save(manager, trainer, 2, monkeypatch)
    with impatience(hanging):
        assert Trainer(seed=2).load(manager) == 1
        with pytest.raises(CheckpointError, match="storage has not answered"):
            manager.wait()
        manager.close()
        older.await_end()
    hanging.release.set()
    older.thread.join(PATIENCE_S)
    assert steps(tmp_path) == [1]


def test_memory_that_a_hanging_save_reads_stays_when_the_state_has_another_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    with CheckpointManager(tmp_path, memory=False) as manager:
        hanging, older = hanging_save(manager, trainer, 1, monkeypatch)
        before = [box.clone() for box in staged(older).boxes.values()]
        trainer.step(1)  # the optimizer has moments now
        with impatience(hanging):
            save_async(manager, trainer, 2)
        manager.wait()
        assert all(map(torch.equal, staged(older).boxes.values(), before)), "it is mapped still"
        hanging.release.set()
        older.thread.join(PATIENCE_S)
    assert steps(tmp_path) == [2]


def test_who_uses_connections_that_were_retired_is_told_why_and_their_replacement_works() -> None:
    comm = Communicator()
    other = comm.replacement()
    comm.retire("storage hangs")
    for use in (lambda: comm.broadcast(lambda: 1), lambda: comm.transfer({}, {})):
        with pytest.raises(RanksLost, match="storage hangs"):
            use()
    assert (comm.is_retired, other.is_retired, other.broadcast(lambda: 1)) == (True, False, 1)


def test_the_end_of_a_drain_is_told_once_while_storage_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left_s = iter([11.0, 10.0, 9.0])
    ends = iter([True] * 7 + [False] * 9)
    monkeypatch.setattr("elastipod.checkpoint.drain.current_drain", lambda: DrainNotice(next(left_s), leaves=None))
    save: Any = Save(SimpleNamespace(id=CheckpointId(7, 1)), Communicator(), is_durable=True, sample_log=None)  # type: ignore[arg-type]
    save.place = "/disk"
    save.thread = SimpleNamespace(is_alive=lambda: next(ends), join=lambda _: None)
    save.await_end()
    assert caplog.messages == [
        "the time of the drain is nearly over, and /disk has not taken the checkpoint of step 7 yet; if it does not by then, the "
        "job resumes from the newest complete checkpoint"
    ]


def test_a_rank_whose_storage_hangs_gives_up_soon_when_the_others_have_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr("elastipod.checkpoint.heartbeat.HEARTBEAT_S", 0.05)
    monkeypatch.setattr(saver, "_LOST_SILENCE_S", SILENCE_S)

    def body(rank: int) -> Any:
        with world(rank, 2, port), pytest.MonkeyPatch.context() as patch:
            trainer = Trainer()
            with CheckpointManager(tmp_path, memory=False) as manager:
                hanging = Hanging(patch, "create_file", lambda draft, name, *_: name == f"__{rank}_0.distcp")
                save_async(manager, trainer, 2)
                older = manager._save
                assert older is not None
                assert hanging.began.wait(PATIENCE_S)
                if rank == 0:
                    older.comm.retire("its storage hangs")
                    hanging.release.set()
                older.await_end()
                hanging.release.set()
                older.thread.join(PATIENCE_S)
                trainer.save(manager, 3)
                return str(older.failure)

    assert run_ranks(2, body)[1] == given_up(2, tmp_path)
    assert steps(tmp_path) == [3]


def test_storage_that_is_slow_is_not_given_up_while_it_takes_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    save: Any = Save(SimpleNamespace(id=CheckpointId(7, 1)), Communicator(), is_durable=True, sample_log=None)  # type: ignore[arg-type]
    save.thread = SimpleNamespace(is_alive=lambda: True)
    now = [0.0]
    monkeypatch.setattr("elastipod.checkpoint.communicator.time", SimpleNamespace(monotonic=lambda: now[0]))

    def write() -> None:
        for _ in range(3):
            now[0] += saver.STORAGE_SILENCE_S - 1
            save.give_up_if_silent()
            save.begin_part()
        now[0] += saver.STORAGE_SILENCE_S
        save.give_up_if_silent()

    with pytest.raises(RanksLost, match="storage has not answered for 1800 s"):
        save.comm.broadcast(write)
    assert now == [4 * saver.STORAGE_SILENCE_S - 3]


def test_a_rank_writes_no_further_part_of_a_save_that_the_others_have_given_up(tmp_path: Path) -> None:
    save: Any = Save(SimpleNamespace(id=CheckpointId(7, 1)), Communicator(), is_durable=True, sample_log=None)  # type: ignore[arg-type]
    save.begin_part()
    save.comm._heartbeat = SimpleNamespace(failure=OSError("the connection broke"))
    with pytest.raises(CheckpointError, match="other ranks have given it up"):
        save.begin_part()


def test_a_manager_that_is_closed_while_storage_hangs_keeps_only_what_the_hanging_save_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    manager = CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory")
    trainer.save(manager, 1)
    hanging, older = hanging_save(manager, trainer, 2, monkeypatch)
    with impatience(hanging):
        assert not manager.is_saving(0.1)
    other = next(each for each in manager._run().staging._slots.images.values() if each is not staged(older).image)
    held = weakref.ref(other)
    del other
    manager.close()
    gc.collect()
    assert held() is None
    assert all(map(torch.isfinite, (box.sum() for box in staged(older).boxes.values()))), "it is mapped still"
    hanging.release.set()
    older.thread.join(PATIENCE_S)
