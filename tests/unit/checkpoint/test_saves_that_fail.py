"""What a save says when storage fails, what it leaves behind, and how a drain and a process end with it."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.trainer import Trainer

from elastipod.checkpoint import CheckpointManager, process_exit, saver
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.drain import DrainNotice, current_drain, storage_wait_s
from elastipod.checkpoint.drain_exit import exits_with_memory, is_given_up_for_newer
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.saver import Save, await_previous
from elastipod.errors import CheckpointError, FencedError
from elastipod.worker_file import WORKER_FILE_ENV, EventLevel, WorkerFile

NO_ROOM = "; make room there or keep fewer, the earlier checkpoints are untouched and the next save tries again"


def failing(number: int, text: str, *, at: str = "") -> Callable[..., Any]:
    """A method of a store that fails for a file whose name contains ``at``, and else does what it did."""
    create_file = DirectoryStore.create_file

    def method(self: DirectoryStore, *arguments: Any, **options: Any) -> Any:
        if at and at not in arguments[1]:
            return create_file(self, *arguments)
        raise OSError(number, text)

    return method


def test_a_save_in_progress_can_be_asked_for_and_waited_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_quick = threading.Event()
    begin = DirectoryStore.begin

    def hanging(self: DirectoryStore, target: CheckpointId) -> Path:
        assert is_quick.wait(PATIENCE_S)
        return begin(self, target)

    monkeypatch.setattr(DirectoryStore, "begin", hanging)
    trainer = Trainer()
    with CheckpointManager(tmp_path, memory=False) as manager:
        assert manager.is_saving(PATIENCE_S) is False, "there is none"
        manager.save_async(1, model=trainer.model, optimizer=trainer.optimizer)
        assert manager.is_saving(0.01) is True
        save = manager._save
        assert save is not None
        save.is_abandoned = True
        assert manager.is_saving(threading.TIMEOUT_MAX) is False, "nobody waits for it any more"
        save.is_abandoned = False
        is_quick.set()
        assert manager.is_saving(PATIENCE_S) is False


@pytest.mark.parametrize(
    ("method", "at"),
    [("begin", ""), ("create_file", "__0_0.distcp"), ("create_file", ".metadata"), ("list_complete", "")],
)
@pytest.mark.parametrize(("number", "more"), [(errno.ENOSPC, NO_ROOM), (errno.EDQUOT, NO_ROOM), (errno.EIO, "")])
def test_storage_that_fails_is_named_once_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, at: str, number: int, more: str
) -> None:  # fmt: skip
    trainer = Trainer()
    with CheckpointManager(tmp_path, memory=False) as manager:
        trainer.save(manager, 1)
        with monkeypatch.context() as patched:
            patched.setattr(DirectoryStore, method, failing(number, "it is broken", at=at))
            with pytest.raises(CheckpointError) as raised:
                trainer.save(manager, 2)
        told = f"cannot write the checkpoint of step 2 in {tmp_path}: it is broken{more}"
        where = "" if method != "create_file" or at == ".metadata" else "rank 0: "
        assert str(raised.value) == f"{where}{told}"
        assert caplog.messages == [f"step 2 is not saved: {where}{told}"]
        assert sorted(each.name for each in tmp_path.iterdir()) == [".claims", CheckpointId(1, 1).name]
        assert trainer.save(manager, 2).name == CheckpointId(2, 1).name


def test_any_other_failure_ends_the_save_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    with CheckpointManager(tmp_path, memory=False) as manager:
        assert manager.claim() == 1
        monkeypatch.setattr(CheckpointManager, "_is_last_save", lambda *_: False)
        monkeypatch.setattr("elastipod.checkpoint.saver.Saver._carry_out", broken)
        with pytest.raises(CheckpointError) as raised:
            trainer.save(manager, 3)
        assert str(raised.value) == "the checkpoint of step 3 could not be finished: by zero"
        assert manager._save is not None
        assert manager._save.memory_settled.is_set()
        assert manager._save.thread.name == "elastipod-save-3"
        assert manager._save.thread.daemon
    assert caplog.messages == [f"step 3 is not saved: {raised.value}"]


def test_old_checkpoints_that_stay_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pruned: list[tuple[Any, ...]] = []

    def broken(self: DirectoryStore, *given: Any, **named: Any) -> None:
        pruned.append((*given, named))
        raise OSError(errno.EIO, "it is broken")

    monkeypatch.setattr(DirectoryStore, "prune", broken)
    with CheckpointManager(tmp_path, memory=False, keep=3, keep_every=5) as manager:
        Trainer().save(manager, 1)
        manager._run().saver.damaged = {CheckpointId(9, 9)}
        Trainer().save(manager, 2)
        assert manager._run().saver.damaged == set()
    assert caplog.messages == [f"old checkpoints in {tmp_path} could not be deleted: [Errno 5] it is broken"] * 2
    assert [each[:2] for each in pruned] == [(1, 3)] * 2
    assert [(each[3]["keep_every"], each[3]["committed"]) for each in pruned] == [
        (5, CheckpointId(1, 1)),
        (5, CheckpointId(2, 1)),
    ]


def test_a_save_that_nobody_awaits_any_more_just_after_its_commit_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an object store, its draft and the checkpoint have one name."""
    real, discarded = DirectoryStore.commit, mock.Mock()
    with CheckpointManager(tmp_path, keep=1, memory=False) as manager:
        Trainer().save(manager, 1)

        def commit(*given: Any) -> Any:
            path = real(*given)
            assert manager._save is not None
            manager._save.is_abandoned = True
            return path

        monkeypatch.setattr(DirectoryStore, "commit", commit)
        monkeypatch.setattr(DirectoryStore, "discard", discarded)
        assert Trainer().save(manager, 2) == tmp_path / CheckpointId(2, 1).name
    assert discarded.mock_calls == []
    assert len(DirectoryStore(tmp_path).list_complete()) == 2, "nor does it still delete others"


def save_of(step: int = 7, *, is_kept: bool = False, thread: Any = None) -> Any:
    staged: Any = SimpleNamespace(id=CheckpointId(step, 1), plan="the plan")
    save: Any = Save(staged, Communicator(), is_durable=True, sample_log=None)
    save.is_kept_in_memory = is_kept
    save.settle_memory()
    save.memory_s = 5.0
    save.thread = thread or SimpleNamespace(is_alive=lambda: True, join=lambda *_: None)
    return save


def test_a_new_save_is_not_given_up_and_has_no_result() -> None:
    save = Save(None, None, is_durable=False, sample_log=None)  # type: ignore[arg-type]
    assert (save.is_durable, save.norm, save.path, save.error, save.is_kept_in_memory, save.is_abandoned) == (
        False, None, None, None, False, False,
    )  # fmt: skip
    assert not save.memory_settled.is_set()
    save.norm_of_moments = iter([2.5]).__next__
    save.go_on()
    save.go_on()
    save.go_on(to_storage=False)
    assert (save.norm, save.goes_on.result()) == (2.5, True), "it is known once"
    left = Save(None, None, is_durable=True, sample_log=None)  # type: ignore[arg-type]
    left.go_on(to_storage=False)
    left.go_on()
    assert not left.goes_on.result()
    save.check_abandoned()
    save.is_abandoned = True
    with pytest.raises(CheckpointError) as raised:
        save.check_abandoned()
    assert str(raised.value) == "the process exits and does not wait for it"


def test_training_that_waits_for_a_save_is_told_to_save_less_often(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, is_alive = [10.0], [True]

    def join(_: float) -> None:
        now[0], is_alive[0] = 12.5, False

    late, done = (
        save_of(9, thread=SimpleNamespace(is_alive=lambda: is_alive[0], join=join)),
        save_of(thread=threading.Thread()),
    )
    monkeypatch.setattr("elastipod.checkpoint.saver.time.monotonic", lambda: now[0])
    with caplog.at_level(logging.WARNING):
        await_previous(late)
    assert caplog.messages == ["training waited 2.5 s for the checkpoint of step 9; save less often"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        await_previous(done)
        done.error = CheckpointError("storage")
        await_previous(done)
    assert not caplog.messages
    done.error = FencedError("replaced")
    with pytest.raises(FencedError, match="replaced"):
        await_previous(done)


# -- drains ------------------------------------------------------------------------------------------------------------


def test_a_drain_is_known_by_its_deadline(page: WorkerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod.checkpoint.drain.time.time", lambda: 1000.0)
    assert current_drain() is None
    page.set_event(EventLevel.DRAIN, 0.0, leaves=True)
    assert current_drain() is None, "nobody knows when it ends"
    for leaves in (True, False, None):
        page.set_event(EventLevel.DRAIN, 1180.0, leaves=leaves)
        assert current_drain() == DrainNotice(180.0, leaves)
    page.set_event(EventLevel.NONE, 1010.0, leaves=None)
    assert current_drain() is None


def test_outside_a_pod_there_is_no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKER_FILE_ENV, raising=False)
    assert current_drain() is None
    assert not exits_with_memory(Communicator(), None, save_of())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left_s", "survives", "waits_s"),
    [([179.9, 500], True, 0), ([180], True, 170), ([179], False, 169), ([5], False, 0), ([10.5], False, 0.5)],
)
def test_storage_is_waited_for_as_long_as_a_drain_allows(left_s: list[float], survives: bool, waits_s: float) -> None:
    assert storage_wait_s(left_s, survives_drain=survives) == waits_s


@pytest.mark.parametrize(
    ("left_s", "is_kept", "survives", "is_written", "waited", "is_given_up"),
    [
        pytest.param(179.5, True, True, False, [], True, id="memory will hold the newer step"),
        pytest.param(179.5, True, False, False, [164.5], True, id="the deadline comes first"),
        pytest.param(179.5, True, False, True, [164.5], False, id="it is finished in time"),
        pytest.param(179.5, False, True, True, [164.5], False, id="memory did not even hold the last step"),
        pytest.param(180.0, True, True, True, [165.0], False, id="there is time"),
        pytest.param(180.0, True, True, False, [165.0], True, id="its storage is slow"),
        pytest.param(None, True, True, False, [], False, id="there is no drain"),
    ],
)
def test_an_earlier_save_is_given_up_for_a_newer_one(
    page: WorkerFile, monkeypatch: pytest.MonkeyPatch, left_s: float | None, is_kept: bool, survives: bool, is_written: bool,
    waited: list[float], is_given_up: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("elastipod.checkpoint.drain.time.time", lambda: 1000.0)
    if left_s is not None:
        page.set_event(EventLevel.DRAIN, 1000.0 + left_s, leaves=False)
    joined: list[float] = []
    thread = SimpleNamespace(is_alive=lambda: not is_written, join=joined.append)
    staging: Any = mock.Mock(**{"survives_drain.return_value": survives})
    save = save_of(is_kept=is_kept, thread=thread)
    assert is_given_up_for_newer(Communicator(), staging, save) is is_given_up
    assert joined == waited


@pytest.mark.parametrize(
    ("is_kept", "survives", "is_written", "leaves"),
    [(True, True, False, True), (True, False, False, True), (False, True, False, False), (True, True, True, False)],
)
def test_a_drain_leaves_without_storage_when_memory_has_the_step(
    page: WorkerFile, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    is_kept: bool, survives: bool, is_written: bool, leaves: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("elastipod.checkpoint.drain.time.time", lambda: 1000.0)
    page.set_event(EventLevel.DRAIN, 1100.0, leaves=False)
    waited: list[float] = []
    thread = SimpleNamespace(is_alive=lambda: not is_written, join=waited.append)
    staging = mock.Mock(**{"survives_drain.return_value": survives})
    save = save_of(is_kept=is_kept, thread=thread)
    with caplog.at_level(logging.INFO):
        assert exits_with_memory(Communicator(), staging, save) is leaves
    waits = not (is_kept and survives)
    assert (waited, save.goes_on.done()) == ([90.0] * waits, waits), "storage is not begun where nobody waits for it"
    assert staging.mock_calls == ([mock.call.survives_drain("the plan", [False])] if is_kept else [])
    assert (
        caplog.messages
        == [
            "exiting with step 7 in memory: there is no time to wait for durable storage; the next generation writes it"
        ]
        * leaves
    )


def test_a_drain_does_not_wait_for_memory_that_storage_keeps_from_being_checked(
    page: WorkerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [500.0]
    limits: list[float] = []
    joined: list[float] = []

    def wait(limit_s: float) -> None:
        limits.append(limit_s)
        now[0] += 3.0

    monkeypatch.setattr(
        "elastipod.checkpoint.drain.time", SimpleNamespace(time=lambda: 1000.0, monotonic=time.monotonic)
    )
    monkeypatch.setattr("elastipod.checkpoint.drain_exit.time", SimpleNamespace(monotonic=lambda: now[0]))
    page.set_event(EventLevel.DRAIN, 1030.0, leaves=False)
    save = save_of(thread=SimpleNamespace(is_alive=lambda: True, join=joined.append))
    save.memory_settled = SimpleNamespace(is_set=lambda: False, wait=wait)
    assert not exits_with_memory(Communicator(), mock.Mock(), save)
    assert is_given_up_for_newer(Communicator(), mock.Mock(), save)
    page.set_event(EventLevel.DRAIN, 1011.0, leaves=False)
    assert is_given_up_for_newer(Communicator(), mock.Mock(), save)
    assert limits == [30.0, 20.0, 2.0]
    assert joined == [17.0, 12.0], (
        "what memory has taken is not there for storage, nor what it needs for the newer step"
    )


def test_memory_of_a_save_that_was_given_up_is_not_awaited(page: WorkerFile) -> None:
    save = save_of()
    save.memory_settled.clear()
    save.is_abandoned = True
    save._give_up()
    assert save.memory_settled.is_set()


# -- the end of a process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_failed", "is_abandoned", "ends", "joined", "status"),
    [
        pytest.param(False, False, True, [saver._POLL_S], None, id="a good end waits"),
        pytest.param(True, False, False, [1.0], 1, id="a failure does not"),
        pytest.param(False, True, False, [1.0], 0, id="nor does what was given up"),
        pytest.param(True, False, True, [], None, id="nothing is left to wait for"),
    ],
)
def test_how_a_process_ends_with_a_save(
    monkeypatch: pytest.MonkeyPatch,
    is_failed: bool,
    is_abandoned: bool,
    ends: bool,
    joined: list[Any],
    status: int | None,
) -> None:
    waited: list[Any] = []
    exits: list[int] = []

    class Thread:
        alive = not ends or bool(joined)

        def is_alive(self) -> bool:
            return self.alive

        def join(self, timeout: float) -> None:
            waited.append(timeout)
            self.alive = not ends

    save = save_of(thread=Thread())
    save.is_abandoned = is_abandoned
    monkeypatch.setattr(process_exit, "_pending_saves", {save})
    monkeypatch.setattr("elastipod.checkpoint.process_exit.time.monotonic", lambda: 50.0)
    monkeypatch.setattr("elastipod.checkpoint.process_exit.os._exit", exits.append)
    monkeypatch.setattr("elastipod.checkpoint.process_exit.logging.shutdown", lambda: exits.append(-1))
    monkeypatch.setattr(sys, "last_value", ValueError() if is_failed else None, raising=False)
    process_exit._at_exit()
    assert waited == joined
    assert exits == ([] if status is None else [-1, status])
    assert save.is_abandoned == (is_abandoned or status is not None)


SCRIPT = """
import sys, time, logging, contextlib
from pathlib import Path
from tests.unit.checkpoint.trainer import Trainer
from elastipod.checkpoint import CheckpointManager, saver
from elastipod.checkpoint.directory_store import DirectoryStore
folder, code, storage, how = sys.argv[1:]
begin, saver.STORAGE_SILENCE_S = DirectoryStore.begin, 0.5
def slow(self, target):
    time.sleep(0.3 if storage == "slow" else 1000)
    return begin(self, target)
DirectoryStore.begin = slow
manager, trainer = CheckpointManager(Path(folder), memory=False), Trainer()
with manager if how == "with" else contextlib.nullcontext():
    manager.save_async(1, model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler)
    sys.exit({"none": None, "zero": 0, "two": 2, "text": "the loss is not finite"}[code])
"""


@pytest.mark.parametrize(
    ("code", "storage", "how", "status"),
    [
        ("zero", "slow", "with", 0),
        ("none", "slow", "with", 0),
        ("two", "slow", "with", 2),
        ("two", "slow", "plain", 2),
        ("text", "slow", "with", 1),
        ("two", "hangs", "with", 2),
        ("text", "hangs", "with", 1),
        ("zero", "hangs", "with", 0),
    ],
)
def test_a_script_that_exits_ends_with_its_own_status_and_with_its_save(
    tmp_path: Path, code: str, storage: str, how: str, status: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), code, storage, how], check=False, timeout=PATIENCE_S
    )
    assert ended.returncode == status
    steps = [each.step for each in DirectoryStore(tmp_path).list_complete()]
    assert steps == ([1] if storage == "slow" else [])
