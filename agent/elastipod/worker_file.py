"""The worker file: a page of memory that the agent of a pod and its workers share.

The agent makes one file per generation and names it to its workers in ``ELASTIPOD_WORKER_FILE``. The agent writes the
event (its level is the truth, SIGUSR1 only wakes a sleeper); every worker writes one slot of its own, so nobody ever
writes where another one does. Layout, all little-endian (docs/design/contracts.md, 5)::

    header, 64 bytes    magic "ELPW" | u32 layout | u32 local ranks | u32 event level | f64 event deadline | u32 leaves
    slot, 64 bytes each u32 acknowledged | u32 sequence | u64 step | u64 samples | f64 loss | f64 samples/s
                        | u32 world size | u32 signal for stacks | f64 time | u32 in a checkpoint call | u32 asks

A slot's numbers are guarded by its sequence: odd while they are being written, and changed by every write, so a reader
never mixes two reports. Words are stored through views of their own width, which makes each store a single one.
Standard library only: a worker pays nothing for it, and the agent needs no torch.
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
_WORD_LEAVES: Final = 6
_SLOT_ACKNOWLEDGED, _SLOT_SEQUENCE = 0, 1
_SLOT_STEP, _SLOT_SAMPLES, _SLOT_LOSS, _SLOT_RATE = 1, 2, 3, 4
_SLOT_WORLD_SIZE: Final = 10
_SLOT_STACKS: Final = 11
_SLOT_TIME: Final = 6
_SLOT_CHECKPOINT: Final = 14
_LEAVES: Final = {0: None, 1: False, 2: True}  # by the word's value; 0 also where an older agent wrote the file
_SLOT_ASKS: Final = 15
_READ_ATTEMPTS: Final = 64


class WorkerFileError(ValueError):
    """The file is missing, is no worker file, or does not hold the local rank that was asked for."""


class EventLevel(IntEnum):
    """What the agent asks of its workers; a level, so that asking twice is asking once."""

    NONE = 0
    DRAIN = 1


class Event(NamedTuple):
    """The event as it stands: its level, and the Unix time by which the workers should be gone (0 = no limit)."""

    level: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Progress:
    """One worker's last report. ``loss`` and ``samples_per_s`` are None where the worker did not know them.

    step: completed optimizer steps of the job; samples: consumed by the job so far; time: Unix seconds of the report.
    """

    step: int
    samples: int
    loss: float | None
    samples_per_s: float | None
    world_size: int
    time: float


class WorkerFile:
    """One open worker file; made by `create` (agent) or `open` (workers), closed by `close` or a ``with`` block.

    Reads and writes are plain memory accesses: no system call, no lock, safe from any thread and, for `event` and
    `acknowledge`, from a signal handler. Each local rank's slot has one writer.
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
        """Make a new file for ``local_ranks`` workers, readable by this user only. Called by the agent.

        Raises FileExistsError when the path is taken, OSError when it cannot be written, WorkerFileError on a bad count.
        """
        _require_little_endian()
        if not 1 <= local_ranks <= MAX_LOCAL_RANKS:
            raise WorkerFileError(f"local_ranks is {local_ranks}; a worker file holds 1 to {MAX_LOCAL_RANKS}")
        size = _RECORD * (1 + local_ranks)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a full disk must say so now, not by SIGBUS at the first write
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        words = memoryview(memory).cast("I")
        words[_WORD_LAYOUT] = LAYOUT
        words[_WORD_RANKS] = local_ranks
        words.release()
        memory[: len(_MAGIC)] = _MAGIC  # last: a file with the magic is whole
        return cls(os.fspath(path), memory)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> WorkerFile:
        """Open the file that the agent made. Raises WorkerFileError, in one sentence, when it cannot be used."""
        _require_little_endian()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WorkerFileError(f"cannot open worker file {os.fspath(path)}: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if size < 2 * _RECORD or size % _RECORD:
                raise WorkerFileError(f"{os.fspath(path)} is no worker file: {size} bytes")
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        try:
            _check_header(os.fspath(path), memory)
        except WorkerFileError:
            memory.close()
            raise
        return cls(os.fspath(path), memory)

    def set_event(self, level: EventLevel | int, deadline: float = 0.0, *, leaves: bool | None = None) -> None:
        """Raise (or take back) the event. The level is stored last, so whoever sees it sees the rest.

        leaves: whether this pod goes after the drain (True) or stays (False); None when that is not known.
        """
        self._doubles[_DOUBLE_DEADLINE] = deadline
        self._words[_WORD_LEAVES] = next(word for word, value in _LEAVES.items() if value is leaves)
        self._words[_WORD_LEVEL] = int(level)

    def set_deadline(self, deadline: float) -> None:
        """Give the event another deadline."""
        self._doubles[_DOUBLE_DEADLINE] = deadline

    def event(self) -> Event:
        """Give the event as it stands now."""
        level: int = self._words[_WORD_LEVEL]
        deadline: float = self._doubles[_DOUBLE_DEADLINE]
        return Event(level, deadline)

    def leaves(self) -> bool | None:
        """Tell whether this pod goes after the drain that the event asks for; None when that is not known."""
        return _LEAVES.get(self._words[_WORD_LEAVES])

    def set_in_checkpoint(self, local_rank: int, is_in: bool) -> None:
        """Say that this worker is, or is no longer, inside a call that saves or loads a checkpoint. One writer per local rank."""
        self._words[self._slot(local_rank) // 4 + _SLOT_CHECKPOINT] = int(is_in)

    def is_in_checkpoint(self, local_rank: int) -> bool:
        """Tell whether the worker is inside a call that saves or loads a checkpoint."""
        return bool(self._words[self._slot(local_rank) // 4 + _SLOT_CHECKPOINT])

    def reset_run(self) -> None:
        """Take back the event and what workers said about it, for processes that live over several runs."""
        self.set_event(EventLevel.NONE)
        for local_rank in range(self.local_ranks):
            self._words[self._slot(local_rank) // 4 + _SLOT_ACKNOWLEDGED] = 0
            self.set_in_checkpoint(local_rank, False)

    def acknowledge(self, local_rank: int) -> None:
        """Say that this worker has seen the event and will stop: an exit 0 from now on is a drain, not a completion."""
        self._words[self._slot(local_rank) // 4 + _SLOT_ACKNOWLEDGED] = 1

    def set_checks_events(self, local_rank: int, *, checks: bool = True) -> None:
        """Say that this worker asks whether there is an event: it can answer one, from its first question on."""
        self._words[self._slot(local_rank) // 4 + _SLOT_ASKS] = int(checks)

    def checks_events(self, local_rank: int) -> bool:
        """Tell whether the worker has asked for an event since its process was started."""
        return bool(self._words[self._slot(local_rank) // 4 + _SLOT_ASKS])

    def acknowledged(self, local_rank: int) -> bool:
        """Tell whether the worker has acknowledged the event."""
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
    ) -> None:
        """Publish where this worker is; about a microsecond, so once per step is fine. One writer per local rank."""
        offset = self._slot(local_rank)
        word, wide = offset // 4, offset // 8
        sequence: int = self._words[word + _SLOT_SEQUENCE]
        writing = (sequence | 1) & 0xFFFFFFFF  # odd also after a writer that died half-way
        self._words[word + _SLOT_SEQUENCE] = writing
        self._longs[wide + _SLOT_STEP] = step
        self._longs[wide + _SLOT_SAMPLES] = samples
        self._doubles[wide + _SLOT_LOSS] = math.nan if loss is None else loss
        self._doubles[wide + _SLOT_RATE] = math.nan if samples_per_s is None else samples_per_s
        self._words[word + _SLOT_WORLD_SIZE] = world_size
        self._doubles[wide + _SLOT_TIME] = _time.time() if time is None else time
        self._words[word + _SLOT_SEQUENCE] = (writing + 1) & 0xFFFFFFFF or 2  # 0 means: never reported

    def progress(self, local_rank: int) -> Progress | None:
        """Give the worker's last report, None before the first and while one is stuck half-written."""
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
            )
            if self._words[word + _SLOT_SEQUENCE] == before:
                return found
        return None

    def num_reports(self, local_rank: int) -> int:
        """Count the worker's reports, those of an unchanged step too: a count that stands still is a silent worker."""
        sequence: int = self._words[self._slot(local_rank) // 4 + _SLOT_SEQUENCE]
        return sequence // 2

    def set_stacks_signal(self, local_rank: int, number: int) -> None:
        """Say which signal makes this worker write its stacks into `stacks_path`; 0 takes the offer back."""
        self._words[self._slot(local_rank) // 4 + _SLOT_STACKS] = number

    def stacks_signal(self, local_rank: int) -> int:
        """Give the signal that makes the worker write its stacks, 0 when it offers none."""
        number: int = self._words[self._slot(local_rank) // 4 + _SLOT_STACKS]
        return number

    def stacks_path(self, local_rank: int) -> str:
        """Name the file into which the worker writes its stacks; it lies beside this one."""
        return f"{self.path}.stacks-{local_rank}"

    def close(self) -> None:
        """Let the memory go; the file itself stays. Closing twice is harmless."""
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
        raise WorkerFileError(f"{path} is no worker file: it does not begin with {_MAGIC.decode()}")
    layout = int.from_bytes(memory[4:8], "little")
    if layout != LAYOUT:
        raise WorkerFileError(f"{path} has layout {layout}, this library reads layout {LAYOUT}")
    ranks = int.from_bytes(memory[8:12], "little")
    if len(memory) != _RECORD * (1 + ranks):
        raise WorkerFileError(f"{path} says {ranks} local ranks but holds {len(memory)} bytes")


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
