"""What the ranks of a checkpoint tell and send one another, over connections of their own; no wait is without an end.

What ranks tell goes by team leaders to rank 0, which makes one value of it for all (`hierarchy.py`). Two ranks that send each other
raw bytes connect when they do so first, unless they are of one team.

A rank that is at work says so every BEAT_S. One that says nothing for SILENCE_S is given up by those who wait for it; who
gives up puts its reason into the store and closes its connections, so that the others' waits end too, within moments
and one after the other. Training goes on meanwhile, and `connect` connects anew.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastipod.checkpoint import rank_connections
from elastipod.checkpoint.gloo_collectives import ConnectionBroken, translated_errors
from elastipod.checkpoint.heartbeat import HeartbeatThread
from elastipod.checkpoint.hierarchy import HierarchicalCollectives, Hierarchy
from elastipod.checkpoint.rank_connections import RankConnections, training_collectives
from elastipod.collectives import FAILED, capture_outcome, rank_and_world, unwrap_outcome
from elastipod.errors import CheckpointError
from elastipod.rank_ranges import format_ranks

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
OnBlock = Callable[[torch.Tensor], None]
Buffer = tuple[torch.Tensor, OnBlock | None]
_Distribute = Callable[[HierarchicalCollectives | None, Mapping[str, Any] | None, Hierarchy], bytes]
_Stream = tuple[int, Iterator[Buffer]]  # the other rank, and blocks to or from it

TRANSFER_BLOCK_BYTES = (
    4 << 20
)  # bytes that travel at once; they are still in the processor's cache when they are added up
_BLOCKS_IN_FLIGHT = 4  # blocks of each stream that are under way at once
_STORE_TIMEOUT_S = 5.0  # for asking the store why
_DEPARTURE_WAIT_S = 1.0  # within which the ranks that live have noticed that one has left
_STORE_QUERIES_PER_S = 5000  # that all ranks together may put to the store
_RANDOM = random.SystemRandom()  # not Python's own generator, whose state belongs to the training script
_MAX_NAMED_RANKS = 64  # ranks; in larger worlds the silent ones are not looked for


class RanksLost(CheckpointError):
    """The ranks lost touch in the middle of a checkpoint; the text says why. What was under way is given up by all."""


class Communicator:
    """Connections between the ranks for one manager. Methods are collective and called by one thread at a time."""

    def __init__(self) -> None:
        """Make the groups in which the training's threads meet, and connect."""
        self._rank, self._world_size = rank_and_world()
        self._hierarchy = Hierarchy.of(self._world_size)
        self._training = training_collectives(self._rank, self._hierarchy) if self._world_size > 1 else None
        self._connections: RankConnections | None = None  # of our own: of torch's groups none can be given up
        self._store: Any = None
        self.connect()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def is_open(self) -> bool:
        """Tell whether this rank has connections to use; a single process needs none."""
        return self._world_size == 1 or self._connections is not None

    def training_all_reduce(self, produce: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """As `all_reduce`, but quick, and from the training's thread: ranks may come to it as late as to a step."""
        said = [_encode(capture_outcome(produce))]
        if self._training is not None:
            said = self._training.gather(said[0])
        value: R = unwrap_outcome(
            json.loads(_broadcast_result(self._training, _reduced(said, combine) if said else None, self._hierarchy))
        )
        return value

    def training_broadcast(self, decide: Callable[[], T]) -> T:
        """As `broadcast`, in the way of `training_all_reduce`."""
        value: T = unwrap_outcome(
            self.training_all_reduce(lambda: capture_outcome(decide) if self._rank == 0 else {}, _first_value)
        )
        return value

    def connect(self) -> None:
        """Connect, anew where there were connections. From the training's thread. Raises CheckpointError on all ranks."""
        self._connections = None
        if self._world_size == 1:
            return
        name = self.training_broadcast(lambda: secrets.token_hex(8))
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"elastipod-checkpoints/{name}", store)

        def connect() -> None:
            try:
                self._connections = RankConnections(self._store, self._rank, self._hierarchy)
            except RuntimeError as error:
                raise CheckpointError(f"it cannot connect to the others for checkpoints: {error}") from error

        self.training_all_reduce(connect, no_result)

    def close(self) -> None:
        """Let the connections go, when nothing is under way."""
        self._connections = None

    def all_reduce(self, produce: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run ``produce`` on every rank, and ``combine`` on rank 0 with all (JSON-able) values, by rank; give what it gives on every rank.

        When ``produce`` fails anywhere, its failure is raised everywhere and names the first rank that failed; so is what ``combine``
        raises, which must be quick. ``produce`` may take long: this rank says meanwhile that it is at work, from a thread. It must not
        use the exchange. Raises RanksLost, FencedError, CheckpointError.
        """
        value: R = unwrap_outcome(json.loads(self._reduce_with_heartbeat(produce, combine, _broadcast_result)))
        return value

    def on_every_rank(self, work: Callable[[], object]) -> None:
        """Run something on every rank, as `all_reduce` does; all come back when all have done it, or all raise."""

        def done() -> None:
            work()

        self.all_reduce(done, no_result)

    def broadcast(self, decide: Callable[[], T]) -> T:
        """Run ``decide``, which may take long, on rank 0 and give its value on every rank; as `all_reduce`."""
        value: T = unwrap_outcome(
            self.all_reduce(lambda: capture_outcome(decide) if self._rank == 0 else {}, _first_value)
        )
        return value

    def all_to_all(self, write: Callable[[], Mapping[int, T]]) -> dict[int, T]:
        """Run ``write`` on every rank, which gives (JSON-able) letters by the rank that gets them; give those for this rank, by sender.

        They go by way of rank 0. As `all_reduce`.
        """
        answer = unwrap_outcome(
            json.loads(self._reduce_with_heartbeat(lambda: [*write().items()], _messages_by_receiver, _scatter_result))
        )
        return {int(sender): message for sender, message in answer}

    def transfer(self, out: Mapping[int, Iterable[torch.Tensor]], into: Mapping[int, Iterable[Buffer]]) -> None:
        """Send and receive raw bytes, all at once, block by block.

        out: by the rank that gets them, contiguous uint8 tensors. into: by the rank that sends them, such tensors of the same
        sizes in the same order, each with what is called for each of its blocks, in order, when it is there; both are
        asked for one after the other. All ranks call this, also those with nothing to send. Raises RanksLost.
        """
        assert self.is_open or not (out or into)
        outgoing = [(to, _blocks((each, None) for each in buffers)) for to, buffers in out.items()]
        incoming = [(source, _blocks(buffers)) for source, buffers in into.items()]
        under_way: deque[list[_PendingBlock]] = deque()
        number = 0
        try:
            self._connect_to({*out, *into})
            while outgoing or incoming or under_way:
                while (outgoing or incoming) and len(under_way) < _BLOCKS_IN_FLIGHT:
                    under_way.append(self._post_blocks(outgoing, incoming, number))
                    number += 1
                for block in under_way[0]:  # while the next ones travel already
                    block.wait()
                under_way.popleft()
        except ConnectionBroken as error:
            for block in (each for blocks in under_way for each in blocks):
                block.work = None  # it would keep the connections open
            raise self._ranks_lost(error) from error
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def abort(self, why: str) -> None:
        """Give the connections up for a reason of one's own; what the others wait for ends with that reason."""
        if self._connections is not None:
            self._query_store(lambda store: store.set("why", f"rank {self._rank}: {why}"))
            self._connections = None

    def _connect_to(self, others: Iterable[int]) -> None:
        """Connect to those that there is no connection to, in an order in which no circle of ranks waits for one another."""
        if self._connections is None:
            return
        for other in sorted(others, key=lambda other: (min(self._rank, other), max(self._rank, other))):
            with translated_errors():
                self._connections.to(other)

    def _post_blocks(self, outgoing: list[_Stream], incoming: list[_Stream], number: int) -> list[_PendingBlock]:
        """Begin to send and receive the next block of every stream, and drop the streams that have ended."""
        assert self._connections is not None
        posted: list[_PendingBlock] = []
        for streams in (outgoing, incoming):
            for stream in list(streams):
                other, blocks = stream
                data, on_block = next(blocks, (None, None))
                if data is None:
                    streams.remove(stream)
                    continue
                group, there = self._connections.to(other)
                begin = group.send if streams is outgoing else group.recv
                with translated_errors():
                    posted.append(_PendingBlock(begin([data], there, number), data, on_block))
        return posted

    def _reduce_with_heartbeat(
        self, produce: Callable[[], T], combine: Callable[[list[T]], object], distribute: _Distribute
    ) -> bytes:
        """Carry out `all_reduce` and `all_to_all`: give what rank 0 has for this rank."""
        if self._world_size == 1:
            return distribute(None, _reduced([_encode(capture_outcome(produce))], combine), self._hierarchy)
        heartbeat = HeartbeatThread(lambda answer: self._heartbeat_round(answer, combine, distribute))
        answer = capture_outcome(
            _interrupted
        )  # unless there is another: the others need not wait for one who was interrupted
        try:
            answer = capture_outcome(produce)
        finally:
            heartbeat.set_answer(_encode(answer))
            heartbeat.join()
        if isinstance(heartbeat.failure, ConnectionBroken):
            raise self._ranks_lost(heartbeat.failure) from heartbeat.failure
        if heartbeat.failure is not None:
            self.abort(str(heartbeat.failure))
            raise RanksLost(f"rank {self._rank}: {heartbeat.failure}") from heartbeat.failure
        return heartbeat.result

    def _heartbeat_round(self, answer: bytes, combine: Callable[[list[Any]], object], distribute: _Distribute) -> bytes:
        """Tell rank 0 an answer, empty while there is none; gives its verdict, empty while not all have answered."""
        if self._connections is None:
            raise ConnectionBroken("there are no connections any more")
        collectives = self._connections.collectives
        said = collectives.gather(answer)
        is_complete = collectives.broadcast(b"complete" if said and all(said) else b"")
        if not is_complete:
            return b""
        return distribute(collectives, _reduced(said, combine) if said else None, self._hierarchy)

    def _ranks_lost(self, error: ConnectionBroken) -> RanksLost:
        """Close the connections, so that others notice, and find out who is missing or what it said."""
        self._connections = None
        found = self._query_store(self._read_abort_reason)
        log.debug("a connection broke: %s", error)
        return RanksLost(found or "the connections between the ranks broke")

    def _read_abort_reason(self, store: Any) -> str:
        store.set(f"left/{self._rank}", "")
        silent = [
            rank for rank in range(self._world_size) if rank != self._rank and self._world_size <= _MAX_NAMED_RANKS
        ]
        deadline = time.monotonic() + _DEPARTURE_WAIT_S
        while True:
            if store.check(["why"]):
                return str(store.get("why"), "utf-8")
            silent = [rank for rank in silent if not store.check([f"left/{rank}"])]
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(max(0.02, self._world_size / _STORE_QUERIES_PER_S) * _RANDOM.uniform(0.75, 1.25))
        return (
            f"{format_ranks(silent)} ended, or said nothing for {rank_connections.SILENCE_TIMEOUT_S:g} s"
            if silent
            else ""
        )

    def _query_store(self, ask: Callable[[Any], object]) -> str:
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
        thread.join(_STORE_TIMEOUT_S)
        return str(said[0] or "") if said else ""


@dataclass(slots=True)
class _PendingBlock:
    """A block under way. arrived: is told when it is there."""

    work: Any
    data: torch.Tensor
    on_block: OnBlock | None

    def wait(self) -> None:
        with translated_errors():
            self.work.wait()
        if self.on_block is not None:
            self.on_block(self.data)


def no_result(_: list[Any]) -> None:
    """Make nothing of what all ranks gave: for what need only be done everywhere, or fail everywhere."""


def first_message(texts: list[str | None]) -> str | None:
    """Give the first thing that a rank had to say, None where none had."""
    return next((each for each in texts if each is not None), None)


def _reduced(said: Sequence[bytes], combine: Callable[[list[Any]], object]) -> dict[str, Any]:
    """Make rank 0's verdict of what all ranks said: the first failure, else what ``combine`` makes of their values."""
    answers = [json.loads(each) for each in said]
    failed = next(((rank, each) for rank, each in enumerate(answers) if "value" not in each), None)
    if failed is None:
        return capture_outcome(lambda: combine([each["value"] for each in answers]))
    rank, answer = failed
    return {kind: f"rank {rank}: {text}" if kind == FAILED else text for kind, text in answer.items()}


def _broadcast_result(
    collectives: HierarchicalCollectives | None, result: Mapping[str, Any] | None, _: Hierarchy
) -> bytes:
    data = _encode(result) if result is not None else b""
    return collectives.broadcast(data) if collectives is not None else data


def _scatter_result(
    collectives: HierarchicalCollectives | None, result: Mapping[str, Any] | None, hierarchy: Hierarchy
) -> bytes:
    """Pass letters on to those whom they are for; a failure to all."""
    parts: list[bytes] = []
    if result is not None:
        messages = result.get("value", {})
        parts = [
            _encode({"value": messages.get(rank, [])} if "value" in result else result)
            for rank in range(hierarchy.world_size)
        ]
    return collectives.scatter(parts, hierarchy) if collectives is not None else parts[0]


def _messages_by_receiver(written: list[list[Any]]) -> dict[int, list[Any]]:
    """Give the letters for each rank, as (sender, letter)."""
    messages: dict[int, list[Any]] = {}
    for sender, own in enumerate(written):
        for to, message in own:
            messages.setdefault(to, []).append((sender, message))
    return messages


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _first_value(values: list[T]) -> T:
    return values[0]


def _interrupted() -> None:
    raise CheckpointError("it was interrupted")


def _blocks(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    for data, on_block in buffers:
        for start in range(0, data.numel(), TRANSFER_BLOCK_BYTES):
            yield data[start : start + TRANSFER_BLOCK_BYTES], on_block
