"""The cache of batches: ready before they are needed, there after a restart, bounded, and never wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE_S

from elastipod.data import Batch, ElasticBatches
from elastipod.data import batch_cache as module
from elastipod.data.batch_cache import BatchCache
from elastipod.data.tensor_file import Tensors, read_tensors, write_tensors
from elastipod.errors import DataError

PLAN = ElasticBatches(dataset_size=120, global_batch=6, seed=2)
WITHIN_S = PATIENCE_S


class Loading:
    """Loads batches of indices and notes which; may be held back, and may fail."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.changed = threading.Condition()
        self.fails_at = 0

    def __call__(self, batch: Batch) -> Tensors:
        if batch.step == self.fails_at:
            raise OSError(errno.EIO, "the dataset's disk is broken")
        with self.changed:
            self.steps.append(batch.step)
            self.changed.notify_all()
        return {"ids": torch.tensor(batch.indices), "step": torch.tensor(batch.step)}

    def wait_for(self, step: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: step in self.steps, WITHIN_S), f"step {step} is not loaded"


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("batch-*.tensors"))


def wait_for_file(folder: Path, step: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while step not in steps_in(folder):
        assert time.monotonic() < deadline, f"step {step} is not in the cache"
        time.sleep(0.002)


def run(
    cache: BatchCache,
    load: Loading,
    start: int,
    steps: int,
    rank: int = 0,
    world_size: int = 1,
    plan: ElasticBatches = PLAN,
) -> list[int]:
    """Train some steps; every batch must be the plan's. Gives them."""
    trained = []
    batches = cache.iterate(plan, load, rank=rank, world_size=world_size, start_step=start)
    for batch, tensors in batches:
        assert isinstance(tensors, dict)
        assert tensors["ids"].tolist() == list(batch.indices)
        assert tensors["step"].item() == batch.step
        trained.append(batch.step)
        if len(trained) == steps:
            break
    batches.close()  # type: ignore[attr-defined]
    return trained


def test_batches_are_loaded_ahead_and_kept_behind_within_bounds(tmp_path: Path) -> None:
    load = Loading()
    batches = BatchCache(tmp_path, prefetch=3, lookback=2).iterate(PLAN, load, rank=0, world_size=1)
    for batch, _ in batches:
        assert len(steps_in(tmp_path)) <= 6
        if batch.step == 10:
            break
    wait_for_file(tmp_path, 13)
    assert load.steps == list(range(1, 14)), "three ahead and no more"
    batches.close()  # type: ignore[attr-defined]
    assert steps_in(tmp_path) == list(range(8, 14))


def test_a_restart_finds_what_was_prefetched_and_what_was_trained_last(tmp_path: Path) -> None:
    load = Loading()
    cache = BatchCache(tmp_path, prefetch=4, lookback=3)
    assert run(cache, load, start=0, steps=6) == [1, 2, 3, 4, 5, 6]
    load.wait_for(6)
    kept = set(steps_in(tmp_path)) & set(range(2, 10))  # what may be there while step 5 is trained
    again = Loading()
    assert run(BatchCache(tmp_path, prefetch=4, lookback=3), again, start=4, steps=4) == [5, 6, 7, 8]
    assert not kept & set(again.steps), "what was kept is not loaded again"
    assert {5, 6} <= kept


def test_a_resize_leaves_no_stale_batch(tmp_path: Path) -> None:
    run(BatchCache(tmp_path), Loading(), start=0, steps=3)
    load = Loading()
    assert run(BatchCache(tmp_path), load, start=3, steps=3, rank=1, world_size=2) == [4, 5, 6]
    assert load.steps[:3] == [4, 5, 6]


def test_a_changed_global_batch_leaves_no_stale_batch(tmp_path: Path) -> None:
    """Twice the batch on twice the ranks: the first rank's part has the same place and length in it, but other samples."""
    batches = BatchCache(tmp_path).iterate(PLAN, Loading(), rank=0, world_size=2)
    for batch, _ in batches:
        if batch.step == 3:
            break
    wait_for_file(tmp_path, 6)
    batches.close()  # type: ignore[attr-defined]
    load = Loading()
    plan = PLAN.with_batch(12, after_step=3)
    assert run(BatchCache(tmp_path), load, start=3, steps=3, world_size=4, plan=plan) == [4, 5, 6]
    assert set(load.steps) & {4, 5, 6} == {5, 6}, "the first one has the samples that it had"


def test_a_plan_that_takes_over_begins_at_its_own_step(tmp_path: Path) -> None:
    plan = PLAN.with_batch(6, after_step=12)
    batches = BatchCache(tmp_path, prefetch=3).iterate(plan, Loading(), rank=0, world_size=1)
    assert next(batches)[0].step == 13
    wait_for_file(tmp_path, 16)
    batches.close()  # type: ignore[attr-defined]
    load = Loading()
    assert run(BatchCache(tmp_path, prefetch=3), load, start=0, steps=1, plan=plan) == [13]
    assert not set(load.steps) & {13, 14, 15, 16}


@pytest.mark.parametrize("change", ["other data", "other version"])
def test_batches_of_other_data_are_not_taken(tmp_path: Path, change: str) -> None:
    run(BatchCache(tmp_path, version="seq 8"), Loading(), start=0, steps=2)
    load = Loading()
    plan = ElasticBatches(dataset_size=120, global_batch=6, seed=3) if change == "other data" else PLAN
    version = "seq 8" if change == "other data" else "seq 9"
    run(BatchCache(tmp_path, version=version), load, start=1, steps=2, plan=plan)
    assert load.steps[:2] == [2, 3]


@pytest.mark.parametrize("damage", ["flipped", "cut off", "empty", "foreign"])
def test_a_damaged_file_is_loaded_again(tmp_path: Path, damage: str) -> None:
    cache = BatchCache(tmp_path, prefetch=2, lookback=2)
    run(cache, Loading(), start=0, steps=3)
    path = cache.path(PLAN.batch(3, 0, 1))
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-70] ^= 1
    elif damage == "foreign":
        data[:8] = b"\0" * 8
    else:
        del data[len(data) // 2 if damage == "cut off" else 0 :]
    path.write_bytes(data)
    load = Loading()
    assert run(cache, load, start=2, steps=2) == [3, 4]
    assert 3 in load.steps


def test_a_file_that_is_damaged_before_it_is_trained_is_written_again(tmp_path: Path) -> None:
    cache = BatchCache(tmp_path, prefetch=1)
    batches = cache.iterate(PLAN, Loading(), rank=0, world_size=1)
    next(batches)
    wait_for_file(tmp_path, 2)
    cache.path(PLAN.batch(2, 0, 1)).write_bytes(b"")
    assert next(batches)[0].step == 2
    others = Loading()
    assert run(BatchCache(tmp_path, is_loader=False, wait_s=0.05), others, start=1, steps=1) == [2]
    batches.close()  # type: ignore[attr-defined]


def test_leaving_drops_what_is_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_leaving, leave = threading.Event(), module._Prefetcher.__exit__

    def noted(filler: Any, *error: object) -> None:
        filler._is_over = True
        is_leaving.set()
        leave(filler, *error)

    def load(batch: Batch) -> Tensors:
        assert batch.step == 1 or is_leaving.wait(WITHIN_S)
        return torch.tensor(batch.indices)

    monkeypatch.setattr(module._Prefetcher, "__exit__", noted)
    batches = BatchCache(tmp_path).iterate(PLAN, load, rank=0, world_size=1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert steps_in(tmp_path) == [1]


def test_ranks_of_a_group_map_what_one_of_them_has_loaded(tmp_path: Path) -> None:
    load, others = Loading(), Loading()
    plan = ElasticBatches(dataset_size=36, global_batch=6, seed=2)
    trained: list[list[int]] = []

    def follow() -> None:
        cache = BatchCache(tmp_path, is_loader=False, wait_s=WITHIN_S)
        trained.append(run(cache, others, start=0, steps=6, plan=plan))

    followers = [threading.Thread(target=follow) for _ in range(2)]
    for thread in followers:
        thread.start()
    assert run(BatchCache(tmp_path, lookback=6), load, start=0, steps=6, plan=plan) == list(range(1, 7))
    for thread in followers:
        thread.join(WITHIN_S)
    assert trained == [list(range(1, 7))] * 2
    assert others.steps == []


def test_a_rank_whose_loader_does_not_come_gives_up_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no .*batch-000000001-0-6\.tensors within 0\.05 s: the loading rank"):
        run(BatchCache(tmp_path, is_loader=False, wait_s=0.05), Loading(), start=0, steps=1)


def test_two_loading_processes_on_one_folder_are_refused(tmp_path: Path) -> None:
    with open(tmp_path / "loader.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process loads into"):
            run(BatchCache(tmp_path, wait_s=0.05), Loading(), start=0, steps=1)
    assert run(BatchCache(tmp_path, wait_s=0.05), Loading(), start=0, steps=1) == [1]


def test_a_folder_is_let_go_although_a_forked_process_holds_its_lock_open(tmp_path: Path) -> None:
    batches = BatchCache(tmp_path).iterate(PLAN, Loading(), rank=0, world_size=1)
    next(batches)
    lock = os.fspath(tmp_path / "loader.lock")
    (held,) = [int(name) for name in os.listdir("/proc/self/fd") if linked_to(name) == lock]
    copy = os.dup(held)  # as a fork has
    try:
        batches.close()  # type: ignore[attr-defined]
        assert run(BatchCache(tmp_path, wait_s=0.05), Loading(), start=1, steps=1) == [2]
    finally:
        os.close(copy)


def linked_to(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""  # that of the listing itself


def test_what_loading_fails_with_is_raised_where_the_batch_is_wanted(tmp_path: Path) -> None:
    load = Loading()
    load.fails_at = 4
    batches = BatchCache(tmp_path, prefetch=5).iterate(PLAN, load, rank=0, world_size=1)
    assert [next(batches)[0].step for _ in range(3)] == [1, 2, 3]
    with pytest.raises(OSError, match="the dataset's disk is broken"):
        next(batches)


class Room:
    """A cache folder with room for some batches only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, files: int) -> None:
        def write(path: Path, tensors: Tensors, key: str) -> None:
            if len(steps_in(folder)) >= files:
                path.write_bytes(b"a part")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_tensors(path, tensors, key)

        monkeypatch.setattr(module, "write_tensors", write)


@pytest.mark.parametrize("files", [1, 2, 4])
def test_a_full_folder_makes_the_cache_shorter_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    Room(monkeypatch, tmp_path, files)
    assert run(BatchCache(tmp_path, prefetch=5, lookback=2), Loading(), start=0, steps=20) == list(range(1, 21))
    assert len(steps_in(tmp_path)) <= files
    assert not list(tmp_path.glob("*.tmp"))


def test_no_room_for_a_single_batch_is_an_error_of_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Room(monkeypatch, tmp_path, 0)
    with pytest.raises(DataError, match=r"cannot put the batch of step 1 into .*: No space left on device; give the"):
        run(BatchCache(tmp_path), Loading(), start=0, steps=1)


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "batch-000000002-0-6.tmp").write_bytes(b"half")
    run(BatchCache(tmp_path), Loading(), start=0, steps=1)
    assert not list(tmp_path.glob("*.tmp"))


SHAPES: list[Any] = [
    torch.arange(6, dtype=torch.int64).reshape(2, 3),
    {"a": torch.randn(2, 2, dtype=torch.bfloat16), "b": torch.tensor([True, False])},
    (torch.tensor(1.5, dtype=torch.float64), torch.empty(0, 3)),
    [torch.randn(4, 4).t()],
]


@pytest.mark.parametrize("tensors", SHAPES, ids=["tensor", "dict", "tuple, scalar and empty", "list, not contiguous"])
def test_tensors_come_back_as_they_were(tmp_path: Path, tensors: Any) -> None:
    write_tensors(tmp_path / "t", tensors, "key")
    found = read_tensors(tmp_path / "t", "key")
    assert type(found) is type(tensors)
    flat = zip(*((each.values() if isinstance(each, dict) else each) for each in (found, tensors)), strict=True)
    for one, other in flat:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert read_tensors(tmp_path / "t", "another key") is None


def test_writing_into_a_mapped_batch_changes_no_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t", torch.ones(4), "")
    found = read_tensors(tmp_path / "t", "")
    assert isinstance(found, torch.Tensor)
    found.zero_()
    again = read_tensors(tmp_path / "t", "")
    assert isinstance(again, torch.Tensor)
    assert again.sum() == 4


@pytest.mark.parametrize("value", [3, {"a": "text"}, iter(())])
def test_anything_but_tensors_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="a cached batch holds tensors"):
        write_tensors(tmp_path / "t", value, "")


def test_lengths_below_zero_and_folders_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prefetch is -1 and lookback 2"):
        BatchCache(tmp_path, prefetch=-1)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot use the batch cache"):
        run(BatchCache(tmp_path / "file"), Loading(), start=0, steps=1)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name == "batch cache"]


def test_a_world_of_another_size_leaves_no_batches_of_the_former_ones(tmp_path: Path) -> None:
    """They have the same steps and other samples, and would fill memory in a series of resizes."""
    cache, plan, state = BatchCache(tmp_path, prefetch=4, lookback=1), PLAN, None
    for world_size in (2, 3, 1, 6):
        plan = plan.resumed(state) if state else plan
        load = Loading()
        batches = cache.iterate(plan, load, rank=0, world_size=world_size)
        batch, _ = next(batches)
        for step in range(batch.step, batch.step + 5):
            wait_for_file(tmp_path, step)
            load.wait_for(step)
        batches.close()  # type: ignore[attr-defined]
        steps = steps_in(tmp_path)
        assert len(steps) == len(set(steps)) <= 6
        state = plan.state_dict(batch.step)
