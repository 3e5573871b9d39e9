"""A cache of batches on a node that outlives the training processes.

It prefetches the next batches, and keeps the last ones for a restart that goes some steps back. One rank of each model-parallel
group loads; the other ranks of the group, on the same node, map the files that it writes. Each batch is one file with a
checksum, written under a temporary name and renamed. Its name holds the step and the position among the job's samples, so after a
resize or a change of the global batch old files no longer match and are removed. The cache stores no position; the training loop
counts what is trained.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from elastipod.data.elastic_batches import Batch, ElasticBatches
from elastipod.data.tensor_file import Tensors, read_tensors, write_tensors
from elastipod.errors import DataError
from elastipod.mesh import place_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Load = Callable[[Batch], Tensors]

_NAME = re.compile(r"batch-(\d+)-\d+-\d+\.tensors")
_TEMPORARY = ".tmp"
_LOCK = "loader.lock"
_POLL_S = (0.0005, 0.02)  # first and longest pause of a rank that waits for the file of another rank


class BatchCache:
    """The cached batches of one data-parallel rank, in a folder of its own in memory (such as /dev/shm) or on a local disk.

    The folder holds at most ``lookback`` + ``prefetch`` + 1 batches at any time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        prefetch: int = 10,
        lookback: int = 2,
        is_loader: bool = True,
        version: str = "",
        wait_s: float = 300.0,
    ) -> None:
        """prefetch: batches to load ahead of the one that is trained. lookback: trained batches to keep.

        is_loader: True on the one rank of a model-parallel group that loads. version: anything besides the plan that the data
        depends on, such as the length of windows; batches of another version are not used. wait_s: how long to wait for the
        loading rank, and how long the loading rank waits for the folder. Raises ValueError for negative values.
        """
        if prefetch < 0 or lookback < 0:
            raise ValueError(f"prefetch is {prefetch} and lookback {lookback}; both must be at least 0")
        self._directory = Path(directory)
        self._prefetch, self._lookback = prefetch, lookback
        self._is_loader, self._version, self._wait_s = is_loader, version, wait_s

    def iterate(
        self,
        plan: ElasticBatches,
        load: Load,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        start_step: int = 0,
        local_sizes: Sequence[int] = (),
    ) -> Iterator[tuple[Batch, Tensors]]:
        """Give a data-parallel rank's batches with their tensors, in the order of `ElasticBatches.iterate`.

        load: gives the tensors for a batch's ``indices_or_spare``: one tensor, or a dictionary, list or tuple of tensors, whose
        ``rows`` belong to a micro-batch. It is called for batches that are not in the cache, in the order of steps, only on the
        loading rank and in a separate thread. Leaving the iteration waits for the call in progress and drops its result. The
        other arguments are those of `ElasticBatches.iterate`, the same on all ranks of a group.
        Raises what ``load`` raises, and DataError when there is no space for a single batch, when another process loads into this
        folder, or when no batch comes from the loading rank within ``wait_s``.
        """
        start_step = start_step or plan.first_step
        key = hashlib.sha256(
            json.dumps([plan.state_dict(plan.first_step)["source"], self._version]).encode()
        ).hexdigest()
        place = place_of(rank, world_size, dp_mesh, local_sizes)
        batches = plan.iterate_at(place, start_step)
        if not self._is_loader:
            for batch in batches:
                yield batch, self._wait_for(batch, key)
            return
        ahead = plan.iterate_at(place, start_step)
        with self._exclusive(), _Prefetcher(self, ahead, load, key, start_step) as prefetcher:
            for batch in batches:
                prefetcher.want(batch.step)
                tensors = read_tensors(self.path(batch), key)
                if tensors is None:  # damaged after it was written, which is rare: load it here
                    tensors = load(batch)
                    with suppress(OSError):  # the other ranks of the group wait for the file
                        self.put(batch, tensors, key)
                yield batch, tensors

    def path(self, batch: Batch) -> Path:
        """Give the path of a batch's file."""
        position = batch.samples_seen - batch.global_size + batch.first
        return self._directory / f"batch-{batch.step:09d}-{position}-{len(batch.indices)}.tensors"

    def put(self, batch: Batch, tensors: Tensors, key: str) -> None:
        """Put a batch into the cache. Raises OSError when there is no space."""
        path = self.path(batch)
        temporary = path.with_suffix(_TEMPORARY)
        try:
            write_tensors(temporary, tensors, key)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove_outside(self, first: int, last: int) -> None:
        """Remove the files of all steps outside ``first`` to ``last`` (inclusive)."""
        for name in os.listdir(self._directory):
            match = _NAME.fullmatch(name)
            if match and not first <= int(match[1]) <= last:
                (self._directory / name).unlink(missing_ok=True)

    def remove_others(self, batch: Batch) -> None:
        """Remove files of the same step whose batch is another one: those of a world of another size, or of another rank."""
        for path in self._directory.glob(f"batch-{batch.step:09d}-*.tensors"):
            if path != self.path(batch):
                path.unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove temporary files of killed processes."""
        for path in self._directory.glob(f"*{_TEMPORARY}"):
            path.unlink(missing_ok=True)

    def window(self, step: int) -> tuple[int, int]:
        """Give the first and last step that may be in the cache while ``step`` is trained."""
        return step - self._lookback, step + self._prefetch

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the folder for this loading process. The kernel releases the lock of a killed process."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DataError(f"cannot use the batch cache {self._directory}: {error.strerror}") from error
        try:
            for _ in _pauses(self._wait_s):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    continue  # another rank is writing; try again after a pause
            else:
                raise DataError(
                    f"another process loads into {self._directory}; give every data-parallel rank a folder of its own"
                )
            yield
        finally:
            fcntl.flock(
                descriptor, fcntl.LOCK_UN
            )  # closing would not: processes forked since then hold a copy of the descriptor
            os.close(descriptor)

    def _wait_for(self, batch: Batch, key: str) -> Tensors:
        path = self.path(batch)
        for _ in _pauses(self._wait_s):
            tensors = read_tensors(path, key)
            if tensors is not None:
                return tensors
        raise DataError(
            f"no {path} within {self._wait_s:g} s: the loading rank of this group is not running, is on another node, or has "
            "another plan"
        )


class _Prefetcher:
    """The thread that loads ahead, as a context manager. `want` raises the error that ended it."""

    def __init__(self, cache: BatchCache, batches: Iterator[Batch], load: Load, key: str, start_step: int) -> None:
        self._cache, self._batches, self._load, self._key = cache, batches, load, key
        self._changed = threading.Condition()
        self._wanted = self._ready = start_step
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="batch cache", daemon=True)

    def __enter__(self) -> _Prefetcher:
        self._cache.remove_unfinished()
        self._cache.remove_outside(*self._cache.window(self._wanted + 1))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()

    def want(self, step: int) -> None:
        """Set the step that is trained next, and wait until its batch is in the cache."""
        self._cache.remove_outside(*self._cache.window(step))
        with self._changed:
            self._wanted = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready >= step or self._error)
            if self._ready < step and self._error:
                raise self._error

    def _run(self) -> None:
        try:
            for batch in self._batches:
                if not self._wait_until_wanted(batch.step):
                    return
                self._load_into_cache(batch)
                with self._changed:
                    self._ready = batch.step
                    self._changed.notify_all()
        except BaseException as error:  # raised again by `want`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_until_wanted(self, step: int) -> bool:
        """Wait until a step is within the prefetch window; False when the iteration has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._cache.window(self._wanted)[1] >= step)
            return not self._is_over

    def _load_into_cache(self, batch: Batch) -> None:
        """Load one batch. Without space for it, wait until it is needed and then remove the trained ones."""
        self._cache.remove_others(batch)
        if read_tensors(self._cache.path(batch), self._key) is not None:
            return  # from before a restart
        tensors = self._load(batch)
        if self._is_over:
            return  # the iteration waits for this thread only
        try:
            self._cache.put(batch, tensors, self._key)
            return
        except OSError:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._wanted >= batch.step)
                if self._is_over:
                    return
        self._cache.remove_outside(batch.step, batch.step)
        try:
            self._cache.put(batch, tensors, self._key)
        except OSError as error:
            raise DataError(
                f"cannot put the batch of step {batch.step} into {self._cache.path(batch).parent}: {error.strerror}; give the "
                "batch cache more space"
            ) from error


def _pauses(seconds: float) -> Iterator[None]:
    """Yield at once, then after growing pauses, until ``seconds`` have passed."""
    deadline = time.monotonic() + seconds
    pause, longest = _POLL_S
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, longest)
        yield
