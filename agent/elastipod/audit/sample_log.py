"""The sample log: what each rank really trained on, written by the training loop and read by `elastipod audit`.

One append-only file per generation and rank, one JSON line per step (docs/design/contracts.md, 7). Lines go to the
kernel one by one, so a killed process loses at most the line that it was writing; `sync` puts them on disk, which a
checkpoint waits for before it appears.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from elastipod.data.mixture import Mixture
from elastipod.errors import SampleLogError

if TYPE_CHECKING:
    from elastipod.checkpoint.resume import Resume
    from elastipod.data import Batch, ElasticBatches


class SampleLog:
    """One rank's log of one generation; closed by `close` or a ``with`` block."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        plan: ElasticBatches,
        *,
        generation: int,
        rank: int,
        world_size: int,
        resume: Resume | None = None,
    ) -> None:
        """Make the file (and the directory) and write its first line.

        generation: `CheckpointManager.generation`; resume: what `load_latest` gave. Raises SampleLogError when this
        generation and rank have a log there already, or when it cannot be made.
        """
        self.path = Path(directory) / f"gen-{generation:06d}-rank-{rank:05d}.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise SampleLogError(f"cannot make the sample log's folder {directory}: {error.strerror}") from error
        try:
            self._descriptor: int | None = os.open(self.path, flags, 0o644)
        except FileExistsError:
            raise SampleLogError(
                f"{self.path} exists: another run logged there; give each run a directory of its own"
            ) from None
        except OSError as error:
            raise SampleLogError(f"cannot write the sample log {self.path}: {error.strerror}") from error
        self._write(
            kind="start",
            generation=generation,
            rank=rank,
            world_size=world_size,
            resumed_step=resume.step if resume else 0,
            resumed_generation=resume.generation if resume else 0,
            dataset_size=plan.dataset_size,
            epochs=plan.epochs,
            global_batch=plan.global_batch,
            t=time.time(),
            **({"sources": plan.source.draws_by_source(plan.epochs)} if isinstance(plan.source, Mixture) else {}),
        )

    def step(self, batch: Batch, loss: float | None = None) -> None:
        """Note that this rank's samples of ``batch`` went into an optimizer step. Call after it, before a checkpoint.

        loss: of the global batch, where known.
        """
        self._write(
            kind="step", step=batch.step, epoch=batch.epoch, **_samples(batch.indices), t=time.time(), loss=loss
        )

    def saved(self, step: int, optimizer_norm: float | None = None) -> None:
        """Note a checkpoint that is complete. `CheckpointManager.save` does it."""
        self._write(kind="saved", step=step, t=time.time(), optimizer_norm=optimizer_norm)

    def loaded(self, step: int, optimizer_norm: float | None = None) -> None:
        """Note the checkpoint that this generation began from."""
        self._write(kind="loaded", step=step, optimizer_norm=optimizer_norm)

    def end(self, step: int, why: Literal["drained", "completed"]) -> None:
        """Note that this rank leaves in good order after ``step`` completed steps, and make the log durable."""
        self._write(kind="end", step=step, why=why, t=time.time())
        self.sync()

    def sync(self) -> None:
        """Put what was written on disk. `CheckpointManager.save` does it before a checkpoint appears."""
        descriptor = self._open_descriptor()
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise SampleLogError(f"cannot put the sample log {self.path} on disk: {error.strerror}") from error

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
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
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        descriptor = self._open_descriptor()
        try:
            written = os.write(descriptor, line)
        except OSError as error:
            raise SampleLogError(f"cannot write the sample log {self.path}: {error.strerror}") from error
        if written != len(line):
            raise SampleLogError(f"only {written} of {len(line)} bytes went into {self.path}; is its disk full?")

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise SampleLogError(f"the sample log {self.path} is closed")
        return self._descriptor


def _samples(indices: Sequence[int]) -> dict[str, object]:
    """Give a run of neighbours as a range, which stays small however large the batch, and anything else as a list."""
    if indices and list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return {"ids": [[indices[0], indices[0] + len(indices)]]}
    return {"samples": list(indices)}
