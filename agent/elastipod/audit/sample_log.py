"""The sample log: which samples each rank trained on, written by the training loop and read by `elastipod audit`.

One append-only file per generation and rank, one JSON line per step (docs/design/contracts.md, 7). Each line is one write
system call, so a killed process loses at most the line that it was writing. `sync` makes the lines durable;
`CheckpointManager.save` calls it before it commits a checkpoint.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from elastipod.data.mixture import Mixture
from elastipod.errors import SampleLogError
from elastipod.mesh import logs_samples, place_of
from elastipod.synced_files import sync_directory
from elastipod.value_words import value_or_kind

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elastipod.data import Batch, ElasticBatches


class ResumePoint(Protocol):
    """The checkpoint that a generation resumes from, such as `elastipod.Resume`."""

    @property
    def step(self) -> int: ...

    @property
    def generation(self) -> int: ...


class SampleLog:
    """One rank's log of one generation. Close it with `close`, or use it in a ``with`` block.

    Every rank writes a log of its own; no method is a collective. Methods raise SampleLogError when the file cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        plan: ElasticBatches,
        *,
        generation: int,
        rank: int | None = None,
        world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        resume: ResumePoint | None = None,
        writes: bool | None = None,
        after: SampleLog | None = None,
    ) -> None:
        """Create the file, and the directory where it is missing, and write the first line.

        generation: of this run of the workers, from the CheckpointManager. rank, world_size: of `torch.distributed`; with model
        parallelism, those among the data-parallel ranks. dp_mesh: instead of them, the mesh, as for `ElasticBatches.iterate`. resume:
        what `CheckpointManager.load_latest` gave. writes: False on a rank whose samples another one logs; the log then has no
        file, and its methods do nothing, so that every rank can pass one to `CheckpointManager.save`. None: what
        `elastipod.reads_data` says of a whole mesh, else True. after: this process's log of an earlier generation, which `sync` of
        this one makes durable too. Raises SampleLogError when this generation and rank already have a log in the directory, or when
        it cannot be created.
        """
        place = place_of(rank, world_size, dp_mesh)
        # The script may change its working directory.
        self.path = Path(directory).absolute() / f"gen-{generation:06d}-rank-{place.rank:05d}.jsonl"
        self._writes = writes = logs_samples(dp_mesh) if writes is None else writes
        self._descriptor: int | None = None
        self._lock = threading.Lock()  # a save writes and syncs in its own thread while training may close the log
        self._earlier = after._not_durable() if after is not None else ()
        if not writes:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise SampleLogError(f"cannot create the sample log's folder {directory}: {error.strerror}") from error
        try:
            self._descriptor = os.open(self.path, flags, 0o644)
        except FileExistsError:
            raise SampleLogError(
                f"{self.path} exists: another run logged there; give each run a directory of its own"
            ) from None
        except OSError as error:
            raise SampleLogError(f"cannot write the sample log {self.path}: {error.strerror}") from error
        self._write(
            kind="start",
            generation=generation,
            rank=place.rank,
            world_size=place.world_size,
            resumed_step=resume.step if resume else 0,
            resumed_generation=resume.generation if resume else 0,
            dataset_size=plan.dataset_size,
            epochs=plan.epochs,
            global_batch=plan.global_batch,
            t=time.time(),
            **({"sources": plan.source.draws_by_source(plan.epochs)} if isinstance(plan.source, Mixture) else {}),
        )

    def step(self, batch: Batch, loss: float | None = None) -> None:
        """Log that this rank's samples of ``batch`` were trained. Call it after the optimizer step, before a checkpoint.

        loss: of the global batch, where known: a number, or a tensor of one. `elastipod.State` calls it when a step begins, and `done`
        at its end. Raises TypeError for another loss.
        """
        self._write(
            kind="step",
            step=batch.step,
            epoch=batch.epoch,
            **_samples(batch.indices),
            t=time.time(),
            loss=_number(loss),
        )

    def done(self, step: int, loss: float | None = None) -> None:
        """Log that a step whose samples were logged when it began has changed the weights. loss: as of `step`."""
        self._write(kind="done", step=step, t=time.time(), loss=_number(loss))

    def saved(self, step: int, optimizer_norm: float | None = None) -> None:
        """Log that the checkpoint of ``step`` is complete. `CheckpointManager.save` calls it."""
        self._write(kind="saved", step=step, t=time.time(), optimizer_norm=optimizer_norm)

    def loaded(self, step: int, optimizer_norm: float | None = None) -> None:
        """Log the checkpoint that this generation resumed from."""
        self._write(kind="loaded", step=step, optimizer_norm=optimizer_norm)

    def end(self, step: int, why: Literal["drained", "completed"]) -> None:
        """Log that this rank ends regularly after ``step`` completed steps, and make the log durable."""
        self._write(kind="end", step=step, why=why, t=time.time())
        self.sync()

    def sync(self) -> None:
        """Make everything written so far durable (fsync), and the file's name with it: its creation waits for no disk."""
        for path in filter(Path.exists, self._earlier):  # a user may have deleted or moved one
            self._fsync(path, partial(os.open, path, os.O_RDONLY | os.O_CLOEXEC))
        self._earlier = ()
        if self._writes:
            self._fsync(self.path, self._duplicate)

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, **record: object) -> None:
        if not self._writes:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            descriptor = self._open_descriptor()
            try:
                written = os.write(descriptor, line)
            except OSError as error:
                raise SampleLogError(f"cannot write the sample log {self.path}: {error.strerror}") from error
        if written != len(line):
            raise SampleLogError(f"only {written} of {len(line)} bytes went into {self.path}; is its disk full?")

    def _fsync(self, path: Path, opened: Callable[[], int]) -> None:
        """Make a log and its name durable. opened: gives a descriptor of its own, which stays open however long a disk takes."""
        try:
            descriptor = opened()
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_directory(path.parent)
        except OSError as error:
            raise SampleLogError(f"cannot put the sample log {path} on disk: {error.strerror}") from error

    def _duplicate(self) -> int:
        with self._lock:
            return os.dup(self._open_descriptor())

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise SampleLogError(f"the sample log {self.path} is closed")
        return self._descriptor

    def _not_durable(self) -> tuple[Path, ...]:
        """Give the logs that a later one has to sync."""
        return (*self._earlier, self.path) if self._writes else self._earlier


def _number(loss: object) -> float | None:
    if loss is None:
        return None
    try:
        return float(loss)  # type: ignore[arg-type]  # what has no float is refused below
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"loss is {value_or_kind(loss)}; give a number, such as loss.mean().item()") from None


def _samples(indices: Sequence[int]) -> dict[str, object]:
    """Give consecutive indices as one range, which stays short for any batch size, and others as a list."""
    if indices and list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return {"ids": [[indices[0], indices[0] + len(indices)]]}
    return {"samples": list(indices)}
