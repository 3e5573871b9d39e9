"""What the ranks of a checkpoint tell and send one another, over connections of their own; no wait is without an end.

A rank that is at work says so every BEAT_S. One that says nothing for SILENCE_S is given up by those who wait for it; who
gives up puts its reason into the store and closes its connections, so that the others' waits end too, within moments
and one after the other. Training goes on meanwhile, and `open` connects anew.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from elastipod.errors import CheckpointError
from elastipod.rank_names import name_ranks
from elastipod.ranks import from_every_rank, from_rank_zero, rank_and_world, tried, value_of

log = logging.getLogger(__name__)

T = TypeVar("T")
Arrived = Callable[[torch.Tensor], None]
Piece = tuple[torch.Tensor, Arrived | None]
_Stream = tuple[int, Iterator[Piece]]  # the other rank, and blocks to or from it

SILENCE_S = 60.0  # so long a rank waits for another one's next word, or next block
BEAT_S = 10.0  # so often a rank at work says that it is
PATIENCE_S = 7200.0  # for one rank's part of something, such as writing its file
BLOCK = 4 << 20  # bytes that travel at once; they are still in the processor's cache when they are added up
_AHEAD = 4  # blocks of each stream that are under way at once
_REASONS_S = 5.0  # for asking the store why
_LEAVING_S = 1.0  # within which the ranks that live have noticed that one has left
_NAMED = 64  # ranks; in larger worlds the silent ones are not looked for
_SLOT = 1024  # bytes of an answer that go at once; a longer one takes a second round


class RanksLost(CheckpointError):
    """The ranks lost touch in the middle of a checkpoint; the text says why. What was under way is given up by all."""


class _Broken(Exception):
    """A connection failed, or nothing came over it in time."""


@contextmanager
def _connected() -> Iterator[None]:
    """Tell what torch's connections raise from all else."""
    try:
        yield
    except RuntimeError as error:
        raise _Broken(str(error).splitlines()[0]) from error


class Exchange:
    """Connections between all ranks for one manager. Methods are collective and called by one thread at a time."""

    def __init__(self) -> None:
        """Make the group in which the training's thread meets, and connect."""
        self._rank, self._world_size = rank_and_world()
        several = self._world_size > 1
        self._meeting = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if several else None
        self._group: Any = None  # a ProcessGroupGloo of our own: of torch's groups none can be given up
        self._store: Any = None
        self.open()

    @property
    def is_open(self) -> bool:
        """Tell whether this rank has connections to use; a single process needs none."""
        return self._world_size == 1 or self._group is not None

    def meet(self, produce: Callable[[], T]) -> list[T]:
        """As `every_rank`, but quick, and from the training's thread: ranks may come to it as late as to a step."""
        return from_every_rank(produce, self._meeting)

    def meet_zero(self, decide: Callable[[], T]) -> T:
        """As `rank_zero`, in the way of `meet`."""
        return from_rank_zero(decide, self._meeting)

    def open(self) -> None:
        """Connect, anew where there were connections. From the training's thread. Raises CheckpointError on all ranks."""
        self._group = None
        if self._world_size == 1:
            return
        name = self.meet_zero(lambda: secrets.token_hex(8))
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"elastipod-checkpoints/{name}", store)

        def connect() -> None:
            try:
                self._group = dist.ProcessGroupGloo(
                    self._store, self._rank, self._world_size, timedelta(seconds=SILENCE_S)
                )
            except RuntimeError as error:
                raise CheckpointError(f"it cannot connect to the others for checkpoints: {error}") from error

        self.meet(connect)

    def close(self) -> None:
        """Let the connections go, when nothing is under way."""
        self._group = None

    def every_rank(self, produce: Callable[[], T]) -> list[T]:
        """Run ``produce`` on every rank and give all (JSON-able) values, by rank, on every rank; as `from_every_rank`.

        It may take long: this rank says meanwhile that it is at work, from a thread. ``produce`` itself must not use the
        exchange. Raises RanksLost, FencedError, CheckpointError.
        """
        return [value_of(answer, f"rank {rank}: ") for rank, answer in enumerate(self._answers(produce))]

    def rank_zero(self, decide: Callable[[], T]) -> T:
        """Run ``decide`` on rank 0 and give its value on every rank; as `every_rank`."""
        value: T = value_of(self._answers(lambda: decide() if self._rank == 0 else None)[0])
        return value

    def transfer(self, out: Mapping[int, Iterable[torch.Tensor]], into: Mapping[int, Iterable[Piece]]) -> None:
        """Send and receive raw bytes, all at once, block by block.

        out: by the rank that gets them, contiguous uint8 tensors. into: by the rank that sends them, such tensors of the same
        sizes in the same order, each with what is called for each of its blocks, in order, when it is there; both are
        asked for one after the other. All ranks call this, also those with nothing to send. Raises RanksLost.
        """
        assert self._group is not None or not (out or into)
        going = [(to, _blocks((each, None) for each in pieces)) for to, pieces in out.items()]
        coming = [(source, _blocks(pieces)) for source, pieces in into.items()]
        under_way: deque[list[_Block]] = deque()
        number = 0
        try:
            while going or coming or under_way:
                while (going or coming) and len(under_way) < _AHEAD:
                    under_way.append(self._post(going, coming, number))
                    number += 1
                for block in under_way[0]:  # while the next ones travel already
                    block.wait()
                under_way.popleft()
        except _Broken as error:
            for block in (each for blocks in under_way for each in blocks):
                block.work = None  # it would keep the connections open
            raise self._lost(error) from error
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def leave(self, why: str) -> None:
        """Give the connections up for a reason of one's own; what the others wait for ends with that reason."""
        if self._group is not None:
            self._in_time(lambda store: store.set("why", f"rank {self._rank}: {why}"))
            self._group = None

    def _post(self, going: list[_Stream], coming: list[_Stream], number: int) -> list[_Block]:
        """Begin to send and receive the next block of every stream, and drop the streams that have ended."""
        assert self._group is not None
        posted: list[_Block] = []
        for streams in (going, coming):
            for stream in list(streams):
                other, blocks = stream
                data, arrived = next(blocks, (None, None))
                if data is None:
                    streams.remove(stream)
                    continue
                begin = self._group.send if streams is going else self._group.recv
                with _connected():
                    posted.append(_Block(begin([data], other, number), data, arrived))
        return posted

    def _answers(self, produce: Callable[[], object]) -> list[dict[str, Any]]:
        if self._world_size == 1:
            return [tried(produce)]
        talk = _Talk(self._tell_all)
        answer = tried(_interrupted)  # unless there is another: the others need not wait for one who was interrupted
        try:
            answer = tried(produce)
        finally:
            talk.say(answer)
            talk.join()
        if isinstance(talk.failure, _Broken):
            raise self._lost(talk.failure) from talk.failure
        if talk.failure is not None:
            self.leave(str(talk.failure))
            raise RanksLost(f"rank {self._rank}: {talk.failure}") from talk.failure
        return talk.answers

    def _tell_all(self, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Tell every rank something, and hear what they tell. Raises _Broken when one is not there."""
        data = json.dumps(answer).encode()
        parts = self._all_gather(len(data).to_bytes(8, "little") + data[: _SLOT - 8], _SLOT)
        lengths = [int.from_bytes(part[:8], "little") for part in parts]
        texts = [part[8:] for part in parts]
        if (longest := max(lengths) + 8 - _SLOT) > 0:
            texts = [
                start + rest for start, rest in zip(texts, self._all_gather(data[_SLOT - 8 :], longest), strict=True)
            ]
        return [json.loads(text[:length]) for text, length in zip(texts, lengths, strict=True)]

    def _all_gather(self, data: bytes, size: int) -> list[bytes]:
        if self._group is None:
            raise _Broken("there are no connections any more")
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rooms = [bytearray(size) for _ in range(self._world_size)]
        with _connected():
            self._group.allgather([[torch.frombuffer(room, dtype=torch.uint8) for room in rooms]], [mine]).wait()
        return [bytes(room) for room in rooms]

    def _lost(self, error: _Broken) -> RanksLost:
        """Close the connections, so that others notice, and find out who is missing or what it said."""
        self._group = None
        found = self._in_time(self._ask_why)
        log.debug("a connection broke: %s", error)
        return RanksLost(found or "the connections between the ranks broke")

    def _ask_why(self, store: Any) -> str:
        store.set(f"left/{self._rank}", "")
        silent = [rank for rank in range(self._world_size) if rank != self._rank and self._world_size <= _NAMED]
        deadline = time.monotonic() + _LEAVING_S
        while True:
            if store.check(["why"]):
                return str(store.get("why"), "utf-8")
            silent = [rank for rank in silent if not store.check([f"left/{rank}"])]
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return f"{name_ranks(silent)} ended, or said nothing for {SILENCE_S:g} s" if silent else ""

    def _in_time(self, ask: Callable[[Any], object]) -> str:
        """Use the store, which may be gone with its host, for a few seconds at most; "" when nothing comes of it."""
        said: list[object] = []

        def run() -> None:
            try:
                assert self._store is not None
                said.append(ask(self._store))
            except RuntimeError as error:
                log.debug("the store does not answer: %s", error)

        thread = threading.Thread(target=run, name="elastipod-checkpoint-why", daemon=True)
        thread.start()
        thread.join(_REASONS_S)
        return str(said[0] or "") if said else ""


@dataclass(slots=True)
class _Block:
    """A block under way. arrived: is told when it is there."""

    work: Any
    data: torch.Tensor
    arrived: Arrived | None

    def wait(self) -> None:
        with _connected():
            self.work.wait()
        if self.arrived is not None:
            self.arrived(self.data)


class _Talk(threading.Thread):
    """Tells the others that this rank is at work, until there is an answer and all have one."""

    def __init__(self, tell_all: Callable[[Mapping[str, Any]], list[dict[str, Any]]]) -> None:
        super().__init__(name="elastipod-checkpoint-talk", daemon=True)
        self._tell_all = tell_all
        self._answer: dict[str, Any] = {}
        self._is_said = threading.Event()
        self.answers: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        self.start()

    def say(self, answer: dict[str, Any]) -> None:
        self._answer = answer
        self._is_said.set()

    def run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        try:
            while not self.answers or not all(self.answers):
                if not self._is_said.wait(BEAT_S) and time.monotonic() > deadline:
                    raise TimeoutError(f"its part was not done within {PATIENCE_S:g} s")
                self.answers = self._tell_all(self._answer if self._is_said.is_set() else {})
        except Exception as error:
            self.failure = error


def _interrupted() -> None:
    raise CheckpointError("it was interrupted")


def _blocks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for data, arrived in pieces:
        for start in range(0, data.numel(), BLOCK):
            yield data[start : start + BLOCK], arrived
