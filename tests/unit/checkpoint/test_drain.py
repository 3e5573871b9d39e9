"""Ends of a process in the middle of a save: a failure is told at once, a good end waits, a drain has a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.memory_places import agent_page
from tests.unit.checkpoint.save_plans import make_save_plan
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.torch_processes import TorchProcesses

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.drain import EXIT_MARGIN_S, SHORT_DRAIN_S, storage_wait_s
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.save_plan import Chunk, LocalState
from elastipod.worker_file import WORKER_FILE_ENV, EventLevel

# A process whose storage takes as long as argv[2] says for every file; argv[1] says how it ends while its save is under way.
SCRIPT = """
import atexit, sys, time
from pathlib import Path
import torch
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore

how, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
create_file = DirectoryStore.create_file
def slow(self, *arguments):
    (folder / "writing").touch()
    time.sleep(seconds)
    return create_file(self, *arguments)
DirectoryStore.create_file = slow
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
notes = open(folder / "notes", "w")
notes.write("buffered")
atexit.register(lambda: (folder / "handler").touch())
def begin(manager):
    manager.save_async(1, model=model, optimizer=optimizer)
    while not (folder / "writing").exists():
        time.sleep(0.01)
    print("saving", flush=True)
if how == "raises in with":
    with CheckpointManager(folder / "disk", memory=folder / "memory") as manager:
        begin(manager)
        raise RuntimeError("training failed")
manager = CheckpointManager(folder / "disk", memory=folder / "memory")
begin(manager)
if how == "raises":
    raise RuntimeError("training failed")
"""


def ended(processes: TorchProcesses, folder: Path, how: str, seconds: float) -> tuple[int, str]:
    """Run it; gives exit code and what it said on stderr. Raises TimeoutError when it does not end."""
    environ = dict(os.environ)
    for name in ("ELASTIPOD_GENERATION", "JOB_RESTART_COUNT", "ELASTIPOD_RUN_ID", "ELASTIPOD_JOB", WORKER_FILE_ENV):
        environ.pop(name, None)
    with processes.start(SCRIPT, how, str(seconds), str(folder), environ=environ) as process:
        assert process.stdout.readline() == "saving\n"
        code = process.wait()
        return code, process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "raises in with"])
def test_a_failure_does_not_wait_for_a_save(torch_processes: TorchProcesses, tmp_path: Path, how: str) -> None:
    code, said = ended(torch_processes, tmp_path, how, 4 * PATIENCE_S)
    assert code == 1
    assert "RuntimeError: training failed" in said
    assert (tmp_path / "notes").read_text() == "buffered", "files that were open are written out"
    assert (tmp_path / "handler").exists(), "exit handlers have run"
    assert DirectoryStore(tmp_path / "disk").list_complete() == []
    trainer = Trainer()
    with CheckpointManager(tmp_path / "disk", memory=False) as manager:
        trainer.save(manager, 2)
    assert [name for name in os.listdir(tmp_path / "disk") if name.startswith((".tmp", ".dead"))] == []


@pytest.mark.slow
def test_a_good_end_waits_for_a_save(torch_processes: TorchProcesses, tmp_path: Path) -> None:
    code, said = ended(torch_processes, tmp_path, "ends", 1.0)
    assert code == 0, said
    assert DirectoryStore(tmp_path / "disk").list_complete() == [CheckpointId(1, 1)]


# -- drains ----------------------------------------------------------------------------------------------------------


@given(
    left_s=st.lists(st.floats(-1e4, 1e6), min_size=1, max_size=5),
    survives_drain=st.booleans(),
)
@example(left_s=[120.0], survives_drain=True)  # a notice of Spot, which random times hardly ever are
@example(left_s=[120.0], survives_drain=False)
@example(left_s=[900.0, SHORT_DRAIN_S], survives_drain=True)
def test_how_long_a_drain_waits_for_storage(left_s: list[float], survives_drain: bool) -> None:
    waits_s = storage_wait_s(left_s, survives_drain=survives_drain)
    assert 0 <= waits_s <= max(0.0, min(left_s) - EXIT_MARGIN_S)
    if not survives_drain or min(left_s) >= SHORT_DRAIN_S:
        assert waits_s == max(0.0, min(left_s) - EXIT_MARGIN_S), "nobody who stays holds it, or there is time"
    else:
        assert waits_s == 0


def held_back(monkeypatch: pytest.MonkeyPatch, release: threading.Event) -> None:
    create_file = DirectoryStore.create_file

    def slow(self: DirectoryStore, *arguments: Any) -> Any:
        assert release.wait(PATIENCE_S)
        return create_file(self, *arguments)

    monkeypatch.setattr(DirectoryStore, "create_file", slow)


@pytest.mark.parametrize(
    ("left_s", "leaves", "is_early"),
    [
        pytest.param(100, False, True, id="this pod stays, and its memory with it"),
        pytest.param(100, True, False, id="nobody stays: storage is waited for"),
        pytest.param(EXIT_MARGIN_S, None, True, id="the time is over, and memory may outlive it"),
        pytest.param(1000, False, False, id="there is time"),
    ],
)
def test_a_short_drain_leaves_with_the_step_in_memory_and_who_comes_next_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, leaves: bool | None, is_early: bool
) -> None:
    trainer, release = Trainer(), threading.Event()
    trainer.step(1)
    durable = tmp_path / "disk" / CheckpointId(1, 1).name
    with agent_page(tmp_path, monkeypatch) as file, monkeypatch.context() as patched:
        held_back(patched, release)
        manager = CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory")
        assert manager.claim() == 1
        file.set_event(EventLevel.DRAIN, time.time() + left_s, leaves=leaves)
        if not is_early:
            threading.Timer(0.5, release.set).start()
        path = trainer.save(manager, 1)
        assert (path == durable) is not is_early
        assert not file.is_in_checkpoint(0)
        if is_early:
            assert str(path).startswith(str(tmp_path / "memory"))
            assert not list((tmp_path / "disk").glob("*step-*")), "storage is not even begun"
    if is_early:
        again = Trainer(seed=2)
        with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as successor:
            assert again.load(successor) == 1
            assert successor.wait() == tmp_path / "disk" / CheckpointId(1, 2).name
        release.set()
        manager._save.thread.join(PATIENCE_S)  # type: ignore[union-attr]
        assert not durable.exists(), "what was given up does not appear"
    with CheckpointManager(tmp_path / "disk", memory=False) as last:
        assert Trainer(seed=3).load(last) == 1


@pytest.mark.parametrize(
    ("leaves", "left_s", "closed"),
    [
        pytest.param(False, 100, [], id="storage was not begun"),
        pytest.param(True, EXIT_MARGIN_S + 1, ["the job leaves"], id="storage did not end in time"),
    ],
)
def test_connections_are_closed_at_once_only_where_a_save_may_wait_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool, left_s: float, closed: list[str]
) -> None:
    """It takes a call of the job's store, while the others wait for this process to end."""
    trainer, release = Trainer(), threading.Event()
    told: list[str] = []
    with agent_page(tmp_path, monkeypatch) as file:
        held_back(monkeypatch, release)
        manager = CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory")
        assert manager.claim() == 1
        monkeypatch.setattr(manager._run().comm, "abort", told.append)
        file.set_event(EventLevel.DRAIN, time.time() + left_s, leaves=leaves)
        assert trainer.save(manager, 1) == manager._run().memory_path()
        save = manager._save
        assert save is not None
        assert (told, save.is_abandoned) == (closed, True)
        release.set()
        save.thread.join(PATIENCE_S)
        assert not save.thread.is_alive()


def test_what_a_drain_left_in_memory_is_not_written_where_newer_steps_soon_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    trainer.step(1)
    with agent_page(tmp_path, monkeypatch) as file:
        manager = CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory")
        assert manager.claim() == 1
        file.set_event(EventLevel.DRAIN, time.time() + 100, leaves=False)
        trainer.save(manager, 1)
        file.set_event(EventLevel.NONE, 0.0)
    with CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory") as successor:
        successor.writes_resumed = False
        assert trainer.load(successor) == 1
        assert successor.wait() is None, "no save has begun"
        trainer.save(successor, 2)
    assert DirectoryStore(tmp_path / "disk").list_complete() == [CheckpointId(2, 2)]


@pytest.mark.parametrize(
    ("leaves", "durable"),
    [
        pytest.param(False, [], id="given up, because memory holds the newest"),
        pytest.param(True, [2, 1], id="finished first, because the memory leaves too"),
        pytest.param(None, [2, 1], id="finished first, because nobody knows who stays"),
    ],
)
def test_what_is_being_written_when_time_is_short_is_given_up_only_for_a_step_that_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool | None, durable: list[int]
) -> None:
    trainer, release = Trainer(), threading.Event()
    trainer.step(1)
    with agent_page(tmp_path, monkeypatch) as file:
        held_back(monkeypatch, release)
        manager = CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory")
        manager.save_async(1, model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler)
        trainer.step(2)
        file.set_event(EventLevel.DRAIN, time.time() + 100, leaves=leaves)
        timer = threading.Timer(0.5, release.set)
        timer.start()
        path = trainer.save(manager, 2)
        timer.join(PATIENCE_S)
        in_memory = manager._run().memory_path()
    assert path == (tmp_path / "disk" / CheckpointId(2, 1).name if durable else in_memory)
    assert [each.step for each in DirectoryStore(tmp_path / "disk").list_complete()] == durable


def test_what_cannot_be_finished_before_the_deadline_is_given_up_for_what_memory_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, release = Trainer(), threading.Event()
    with agent_page(tmp_path, monkeypatch) as file:
        held_back(monkeypatch, release)
        manager = CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory")
        manager.save_async(1, model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler)
        file.set_event(EventLevel.DRAIN, time.time() + EXIT_MARGIN_S + 0.2, leaves=None)
        timer = threading.Timer(0.5, release.set)
        timer.start()
        assert trainer.save(manager, 2) == manager._run().memory_path()
        timer.join(PATIENCE_S)
    assert DirectoryStore(tmp_path / "disk").list_complete() == []


def test_slow_storage_does_not_keep_a_long_drain_from_having_the_newest_step_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastipod.checkpoint.drain.SHORT_DRAIN_S", EXIT_MARGIN_S / 2)
    trainer, release = Trainer(), threading.Event()
    with agent_page(tmp_path, monkeypatch) as file:
        held_back(monkeypatch, release)
        manager = CheckpointManager(tmp_path / "disk", memory=tmp_path / "memory")
        manager.save_async(1, model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler)
        file.set_event(EventLevel.DRAIN, time.time() + EXIT_MARGIN_S + 0.2, leaves=False)
        older = manager._save
        assert older is not None
        assert trainer.save(manager, 2) == manager._run().memory_path(), "storage need not even answer"
        release.set()
        older.thread.join(PATIENCE_S)
    assert DirectoryStore(tmp_path / "disk").list_complete() == []


def test_calls_of_a_manager_are_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, seen = Trainer(), []
    create_file, open_file = DirectoryStore.create_file, DirectoryStore.open_file

    def looks(method: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any) -> Any:
            seen.append(file.is_in_checkpoint(0))
            return method(*arguments)

        return instead

    with agent_page(tmp_path, monkeypatch) as file:
        monkeypatch.setattr(DirectoryStore, "create_file", looks(create_file))
        monkeypatch.setattr(DirectoryStore, "open_file", looks(open_file))
        with CheckpointManager(tmp_path / "disk", memory=False) as manager:
            trainer.save(manager, 1)
        with CheckpointManager(tmp_path / "disk", memory=False) as manager:
            trainer.load(manager)
        assert not file.is_in_checkpoint(0)
    assert seen
    assert all(seen)


def test_memory_outlives_a_drain_where_those_who_stay_hold_all() -> None:
    from elastipod.checkpoint.image_copies import ImageCopies
    from elastipod.checkpoint.staging import Staging

    def shard(rank: int) -> LocalState:
        return LocalState(f"node-{rank}", (Chunk("w", ("w",), "float32", (4, 2), (rank, 0), (1, 2), 8),), ())

    plan = make_save_plan([shard(rank) for rank in range(4)], is_in_memory=True)
    staging: Any = Staging.__new__(Staging)
    staging._copies = ImageCopies.__new__(ImageCopies)
    staging._copies.held_by = {0: 2, 1: 3, 2: 0, 3: 1}
    assert staging.survives_drain(plan, [False] * 4)
    assert staging.survives_drain(plan, [True, False, False, False])
    assert staging.survives_drain(plan, [True, True, False, False])
    assert not staging.survives_drain(plan, [True, False, True, False]), "a node and its partner"
    assert not staging.survives_drain(plan, [True, False, None, False]), "nobody knows about the partner"
    staging._copies = None
    assert not staging.survives_drain(plan, [True, False, False, False])
