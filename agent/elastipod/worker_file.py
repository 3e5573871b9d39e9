"""The worker file: a page of memory that the agent of a pod and its workers share.

The agent creates one file per generation and gives workers its path in ``ELASTIPOD_WORKER_FILE``. The agent writes the event,
whose level is authoritative (SIGUSR1 only wakes a worker). Each worker writes only its own slot, so every word has one writer.
Layout, all little-endian (docs/design/contracts.md, 5)::

    header, 64 bytes    magic "ELPW" | u32 layout | u32 local ranks | u32 event level | f64 event deadline | u32 leaves
                        | u32 kept | u64 steps of the whole job, 0 where they are not known | f64 steady deadline
    slot, 64 bytes each u32 acknowledged | u32 sequence | u64 step | u64 samples | f64 loss | f64 samples/s
                        | u32 world size | u32 signal for stacks | f64 time | u32 in a checkpoint call | u32 asks

A slot's sequence guards its numbers: it is odd during a write and changes with every write, so a reader never mixes two
reports. Values are stored through views of their own width, which makes each store atomic. Standard library only.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import time as _time
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

WORKER_FILE_ENV: Final = "ELASTIPOD_WORKER_FILE"
LAYOUT: Final = 1
MAX_LOCAL_RANKS: Final = 4096

_MAGIC: Final = b"ELPW"
_RECORD: Final = 64  # bytes of the header and of each slot

# Indices into the file seen as 32-bit words (header, then within a slot) and as 64-bit words.
_WORD_LAYOUT, _WORD_RANKS, _WORD_LEVEL = 1, 2, 3
_DOUBLE_DEADLINE: Final = 2
_WORD_LEAVES, _WORD_KEPT = 6, 7
_LONG_TOTAL: Final = 4
_DOUBLE_STEADY_DEADLINE: Final = 5
_SLOT_ACKNOWLEDGED, _SLOT_SEQUENCE = 0, 1
_SLOT_STEP, _SLOT_SAMPLES, _SLOT_LOSS, _SLOT_RATE = 1, 2, 3, 4
_SLOT_WORLD_SIZE: Final = 10
_SLOT_STACKS: Final = 11
_SLOT_TIME: Final = 6
_SLOT_CHECKPOINT: Final = 14
_ANSWERS: Final = {0: None, 1: False, 2: True}  # by the word's value; 0 also where an older agent wrote the file
_SLOT_ASKS: Final = 15
_READ_ATTEMPTS: Final = 64


class WorkerFileError(ValueError):
    """The file is missing, is not a worker file, or has no slot for the requested local rank."""


class EventLevel(IntEnum):
    """What the agent requests of its workers. It is a level, so raising it twice has no further effect."""

    NONE = 0
    DRAIN = 1


class Event(NamedTuple):
    """The current event: its level, and the Unix time by which the workers should have exited (0: no limit)."""

    level: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Progress:
    """The last report of one worker. ``loss`` and ``samples_per_s`` are None if the worker did not report them.

    step: completed optimizer steps of the job. samples: consumed by the job so far. time: Unix time of the report. total_steps: of
    the whole job, None if no worker here said so.
    """

    step: int
    samples: int
    loss: float | None
    samples_per_s: float | None
    world_size: int
    time: float
    total_steps: int | None = None


class WorkerFile:
    """An open worker file. The agent uses `create`, workers use `open`; close it with `close` or a ``with`` block.

    Reads and writes are plain memory accesses: no system call, no lock, safe from any thread and, for `event` and
    `acknowledge`, from a signal handler. Methods that take a local rank raise WorkerFileError when there is no such slot.
    """

    def __init__(self, path: str, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("I")
        self._longs = self._bytes.cast("Q")
        self._doubles = self._bytes.cast("d")
        self.local_ranks: int = self._words[_WORD_RANKS]

    @classmethod
    def create(cls, path: str | os.PathLike[str], local_ranks: int) -> WorkerFile:
        """Create a file for ``local_ranks`` workers, with mode 0600. Called by the agent.

        Raises FileExistsError when the path exists, OSError when it cannot be written, WorkerFileError for a wrong count.
        """
        _require_little_endian()
        if not 1 <= local_ranks <= MAX_LOCAL_RANKS:
            raise WorkerFileError(f"local_ranks is {local_ranks}; a worker file holds 1 to {MAX_LOCAL_RANKS}")
        size = _RECORD * (1 + local_ranks)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # fail now on a full disk, not with SIGBUS at the first write
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        words = memoryview(memory).cast("I")
        words[_WORD_LAYOUT] = LAYOUT
        words[_WORD_RANKS] = local_ranks
        words.release()
        memory[: len(_MAGIC)] = _MAGIC  # last: a file with the magic is complete
        return cls(os.fspath(path), memory)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> WorkerFile:
        """Open the file that the agent created. Raises WorkerFileError when it cannot be used."""
        _require_little_endian()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WorkerFileError(f"cannot open worker file {os.fspath(path)}: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if size < 2 * _RECORD or size % _RECORD:
                raise WorkerFileError(f"{os.fspath(path)} is not a worker file: {size} bytes")
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        try:
            _check_header(os.fspath(path), memory)
        except WorkerFileError:
            memory.close()
            raise
        return cls(os.fspath(path), memory)

    def set_event(
        self,
        level: EventLevel | int,
        deadline: float = 0.0,
        *,
        leaves: bool | None = None,
        kept: bool | None = None,
        steady_deadline: float = 0.0,
    ) -> None:
        """Raise or clear the event. The level is stored last, so a reader that sees it also sees the other fields.

        deadline: Unix time; steady_deadline: the same moment on the clock of `time.monotonic`; 0: no limit. leaves: True when this
        pod ends after the drain, False when it stays, None when that is not known. kept: True when workers that return to the
        barrier keep their process, False when the processes end, None when that is not known.
        """
        self.set_deadline(deadline, steady_deadline=steady_deadline)
        self._words[_WORD_LEAVES] = next(word for word, value in _ANSWERS.items() if value is leaves)
        self._words[_WORD_KEPT] = next(word for word, value in _ANSWERS.items() if value is kept)
        self._words[_WORD_LEVEL] = int(level)

    def set_deadline(self, deadline: float, *, steady_deadline: float = 0.0) -> None:
        """Change the deadline of the event, as in `set_event`."""
        self._doubles[_DOUBLE_DEADLINE] = deadline
        self._doubles[_DOUBLE_STEADY_DEADLINE] = steady_deadline

    def set_leaves(self) -> None:
        """Change the event: this pod ends after the drain, though it was to stay."""
        self._words[_WORD_LEAVES] = next(word for word, value in _ANSWERS.items() if value is True)

    def event(self) -> Event:
        """Give the current event."""
        level: int = self._words[_WORD_LEVEL]
        deadline: float = self._doubles[_DOUBLE_DEADLINE]
        return Event(level, deadline)

    def steady_deadline(self) -> float:
        """Give the deadline of the event on the clock of `time.monotonic`, which agent and workers share and nobody can set.

        0 where an older agent wrote the file: then there is only the Unix time in `event`.
        """
        deadline: float = self._doubles[_DOUBLE_STEADY_DEADLINE]
        return deadline

    def leaves(self) -> bool | None:
        """True when this pod ends after the drain, False when it stays, None when that is not known."""
        return _ANSWERS.get(self._words[_WORD_LEAVES])

    def kept(self) -> bool | None:
        """True when workers that return to the barrier keep their process, False when it ends, None when that is not known.

        Unless it is True, a worker must save a checkpoint before it returns or exits.
        """
        return _ANSWERS.get(self._words[_WORD_KEPT])

    def set_in_checkpoint(self, local_rank: int, is_in: bool) -> None:
        """Set whether this worker is inside a call that saves or loads a checkpoint. Called by the worker."""
        self._words[self._slot(local_rank) // 4 + _SLOT_CHECKPOINT] = int(is_in)

    def is_in_checkpoint(self, local_rank: int) -> bool:
        """True while the worker is inside a call that saves or loads a checkpoint."""
        return bool(self._words[self._slot(local_rank) // 4 + _SLOT_CHECKPOINT])

    def reset_run(self) -> None:
        """Clear the event and the acknowledgements before the next run of the same processes (in-process restart)."""
        self.set_event(EventLevel.NONE)
        for local_rank in range(self.local_ranks):
            self._words[self._slot(local_rank) // 4 + _SLOT_ACKNOWLEDGED] = 0
            self.set_in_checkpoint(local_rank, False)

    def acknowledge(self, local_rank: int) -> None:
        """Record that this worker has seen the event and will stop; an exit with 0 now counts as a drain, not as completion."""
        self._words[self._slot(local_rank) // 4 + _SLOT_ACKNOWLEDGED] = 1

    def set_checks_events(self, local_rank: int, *, checks: bool = True) -> None:
        """Record that this worker calls `elastic_event_detected`, so it can react to an event."""
        self._words[self._slot(local_rank) // 4 + _SLOT_ASKS] = int(checks)

    def checks_events(self, local_rank: int) -> bool:
        """True once the worker has called `elastic_event_detected` in its process."""
        return bool(self._words[self._slot(local_rank) // 4 + _SLOT_ASKS])

    def acknowledged(self, local_rank: int) -> bool:
        """True when the worker has acknowledged the event."""
        return bool(self._words[self._slot(local_rank) // 4 + _SLOT_ACKNOWLEDGED])

    def report(
        self,
        local_rank: int,
        *,
        step: int,
        samples: int = 0,
        loss: float | None = None,
        samples_per_s: float | None = None,
        world_size: int = 0,
        time: float | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Publish this worker's progress. Takes about a microsecond. Called by the worker."""
        offset = self._slot(local_rank)
        word, wide = offset // 4, offset // 8
        sequence: int = self._words[word + _SLOT_SEQUENCE]
        writing = (sequence | 1) & 0xFFFFFFFF  # odd also after a writer that died during a write
        if total_steps is not None:
            self._longs[_LONG_TOTAL] = total_steps
        self._words[word + _SLOT_SEQUENCE] = writing
        self._longs[wide + _SLOT_STEP] = step
        self._longs[wide + _SLOT_SAMPLES] = samples
        self._doubles[wide + _SLOT_LOSS] = math.nan if loss is None else loss
        self._doubles[wide + _SLOT_RATE] = math.nan if samples_per_s is None else samples_per_s
        self._words[word + _SLOT_WORLD_SIZE] = world_size
        self._doubles[wide + _SLOT_TIME] = _time.time() if time is None else time
        self._words[word + _SLOT_SEQUENCE] = (writing + 1) & 0xFFFFFFFF or 2  # 0 means that there is no report yet

    def progress(self, local_rank: int) -> Progress | None:
        """Give the worker's last report; None before the first one, or when a writer died during a write."""
        offset = self._slot(local_rank)
        word, wide = offset // 4, offset // 8
        for _ in range(_READ_ATTEMPTS):
            before: int = self._words[word + _SLOT_SEQUENCE]
            if before == 0:
                return None
            if before % 2:
                continue
            found = Progress(
                step=self._longs[wide + _SLOT_STEP],
                samples=self._longs[wide + _SLOT_SAMPLES],
                loss=_number(self._doubles[wide + _SLOT_LOSS]),
                samples_per_s=_number(self._doubles[wide + _SLOT_RATE]),
                world_size=self._words[word + _SLOT_WORLD_SIZE],
                time=self._doubles[wide + _SLOT_TIME],
                total_steps=self._longs[_LONG_TOTAL] or None,
            )
            if self._words[word + _SLOT_SEQUENCE] == before:
                return found
        return None

    def num_reports(self, local_rank: int) -> int:
        """Give the number of the worker's reports, including those of an unchanged step. It stands still for a silent worker."""
        sequence: int = self._words[self._slot(local_rank) // 4 + _SLOT_SEQUENCE]
        return sequence // 2

    def set_stacks_signal(self, local_rank: int, number: int) -> None:
        """Set the signal that makes this worker write its stacks to `stacks_path`; 0 for none. Called by the worker."""
        self._words[self._slot(local_rank) // 4 + _SLOT_STACKS] = number

    def stacks_signal(self, local_rank: int) -> int:
        """Give the signal that makes the worker write its stacks, 0 for none."""
        number: int = self._words[self._slot(local_rank) // 4 + _SLOT_STACKS]
        return number

    def stacks_path(self, local_rank: int) -> str:
        """Give the path of the file to which the worker writes its stacks, next to this file."""
        return f"{self.path}.stacks-{local_rank}"

    def close(self) -> None:
        """Unmap the memory; the file itself stays. May be called twice."""
        for view in (self._words, self._longs, self._doubles, self._bytes):
            view.release()
        self._memory.close()

    def __enter__(self) -> WorkerFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _slot(self, local_rank: int) -> int:
        if not 0 <= local_rank < self.local_ranks:
            raise WorkerFileError(f"local rank {local_rank} is outside the worker file's 0..{self.local_ranks - 1}")
        return _RECORD * (1 + local_rank)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise WorkerFileError("the worker file needs a little-endian machine")


def _check_header(path: str, memory: mmap.mmap) -> None:
    if memory[: len(_MAGIC)] != _MAGIC:
        raise WorkerFileError(f"{path} is not a worker file: it does not begin with {_MAGIC.decode()}")
    layout = int.from_bytes(memory[4:8], "little")
    if layout != LAYOUT:
        raise WorkerFileError(f"{path} has layout {layout}, this library reads layout {LAYOUT}")
    ranks = int.from_bytes(memory[8:12], "little")
    if len(memory) != _RECORD * (1 + ranks):
        raise WorkerFileError(f"{path} says {ranks} local ranks but holds {len(memory)} bytes")


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
