"""What the ranks send one another for checkpoints, over connections of their own. Every wait has a time limit.

Objects are reduced on rank 0 and the result is sent to all, by way of subgroup leaders (`hierarchy.py`). Two ranks that
transfer raw bytes connect when they first do so, unless they are in one subgroup.

A rank that is at work sends a heartbeat every HEARTBEAT_S. A rank that is silent for SILENCE_TIMEOUT_S is given up by those
that wait for it. A rank that gives up writes its reason into the store and closes its connections, so that the waits of the
others end too, within moments. Training continues meanwhile, and `connect` creates new connections.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastipod.checkpoint import rank_connections
from elastipod.checkpoint.gloo_collectives import ConnectionBroken, translated_errors
from elastipod.checkpoint.heartbeat import HeartbeatThread
from elastipod.checkpoint.hierarchy import HierarchicalCollectives, Hierarchy
from elastipod.checkpoint.rank_connections import RankConnections, training_collectives
from elastipod.checkpoint.reductions import (
    broadcast_result,
    encode_answer,
    first_value,
    interrupted,
    messages_by_receiver,
    no_result,
    reduced,
    scatter_result,
)
from elastipod.checkpoint.transfer_blocks import Buffer, OnBlock, blocks_to_receive, blocks_to_send
from elastipod.collectives import capture_outcome, unwrap_outcome
from elastipod.errors import CheckpointError
from elastipod.group_release import release_in_background
from elastipod.rank_in_world import RankInWorld
from elastipod.rank_ranges import format_ranks
from elastipod.torch_compat import default_group_store

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_Distribute = Callable[[HierarchicalCollectives | None, Mapping[str, Any] | None, Hierarchy], bytes]
_Stream = tuple[int, Iterator[Buffer]]  # the other rank, and blocks to or from it

_BLOCKS_IN_FLIGHT = 4  # of each stream
_STORE_TIMEOUT_S = 5.0
_DEPARTURE_WAIT_S = 1.0  # for living ranks to notice that one has left
_STORE_QUERIES_PER_S = 5000  # of all ranks together
_RANDOM = random.SystemRandom()  # the default generator's state belongs to the training script
_MAX_NAMED_RANKS = 64  # in larger worlds silent ranks are not searched for


class RanksLost(CheckpointError):
    """Ranks lost contact during a checkpoint; the text says why. All ranks abandon the operation."""


class Communicator:
    """The connections between the ranks for one manager. Methods are collective, and called by one thread at a time."""

    def __init__(self, *, on_default_group: bool = False) -> None:
        """Create the groups that the training threads use; only they can be used before `connect`.

        on_default_group: the training threads may use torch's default group, which carries tensors of the host by gloo, and in which
        no other thread runs collectives.
        """
        place = RankInWorld.current()
        self._rank, self._world_size = place.rank, place.world_size
        self._hierarchy = Hierarchy.of(self._world_size)
        self._training: HierarchicalCollectives | None = None
        self._training_groups: list[Any] = []  # of torch, that were created for it
        if self._world_size > 1:
            self._training, self._training_groups = training_collectives(
                self._rank, self._hierarchy, on_default_group=on_default_group
            )
        self._connections: RankConnections | None = None  # not torch's groups, which cannot be aborted
        self._store: Any = None
        self._retired = ""  # why, once it is
        self._progress_at: float | None = None  # of this rank's part of an operation, while that is being done
        self._heartbeat: HeartbeatThread | None = None  # meanwhile

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def is_open(self) -> bool:
        """Whether this rank has connections; a single process needs none."""
        return self._world_size == 1 or self._connections is not None

    def training_all_reduce(self, produce: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """As `all_reduce`, for the training thread: without heartbeats. Ranks may arrive as late as for a training step."""
        gathered = [encode_answer(capture_outcome(produce))]
        if self._training is not None:
            gathered = self._training.gather(gathered[0])
        value: R = unwrap_outcome(
            json.loads(
                broadcast_result(self._training, reduced(gathered, combine) if gathered else None, self._hierarchy)
            )
        )
        return value

    def training_broadcast(self, decide: Callable[[], T]) -> T:
        """As `broadcast`, for the training thread (see `training_all_reduce`)."""
        value: T = unwrap_outcome(
            self.training_all_reduce(lambda: capture_outcome(decide) if self._rank == 0 else {}, first_value)
        )
        return value

    def connect(self, name: str) -> None:
        """Connect, or replace the connections. From the training thread. Raises CheckpointError on all ranks.

        name: of these connections alone, and the same on every rank, as `name_of_connections` makes it.
        """
        self._connections = None
        if self._world_size == 1:
            return
        self._store = default_group_store(f"elastipod-checkpoints/{name}")

        def connect() -> None:
            try:
                self._connections = RankConnections(self._store, self._rank, self._hierarchy)
            except RuntimeError as error:
                raise CheckpointError(f"it cannot connect to the other ranks for checkpoints: {error}") from error

        self.training_all_reduce(connect, no_result)

    def close(self) -> None:
        """Drop the connections. No operation may be in progress."""
        held, self._connections = [self._connections], None
        release_in_background(held)

    def end(self) -> None:
        """Close it, and destroy the groups of the training threads, which would stay as long as the job's other groups.

        For a communicator that was made for one operation.
        """
        self.close()
        groups, self._training_groups, self._training = self._training_groups, [], None
        for group in groups:
            dist.destroy_process_group(group)

    def all_reduce(self, produce: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Run ``produce`` on every rank and ``combine`` on rank 0 with all values, by rank; return its result on every rank.

        Values and result are JSON values. When ``produce`` fails on a rank, its error is raised on all ranks, with the number of the
        first rank that failed; an error of ``combine``, which must be quick, is raised on all ranks too. ``produce`` may take long:
        a thread sends heartbeats meanwhile. It must not use the communicator. Raises RanksLost, FencedError, CheckpointError.
        """
        value: R = unwrap_outcome(json.loads(self._reduce_with_heartbeat(produce, combine, broadcast_result)))
        return value

    def on_every_rank(self, work: Callable[[], object]) -> None:
        """Run ``work`` on every rank, as `all_reduce` does; return when all ranks have finished, or raise on all."""

        def done() -> None:
            work()

        self.all_reduce(done, no_result)

    def broadcast(self, decide: Callable[[], T]) -> T:
        """Run ``decide``, which may take long, on rank 0 and return its value on every rank; as `all_reduce`."""
        value: T = unwrap_outcome(
            self.all_reduce(lambda: capture_outcome(decide) if self._rank == 0 else {}, first_value)
        )
        return value

    def all_to_all(self, write: Callable[[], Mapping[int, T]]) -> dict[int, T]:
        """Run ``write`` on every rank, which returns JSON messages by receiver; return the messages for this rank, by sender.

        Messages go by way of rank 0. Otherwise as `all_reduce`.
        """
        answer = unwrap_outcome(
            json.loads(self._reduce_with_heartbeat(lambda: [*write().items()], messages_by_receiver, scatter_result))
        )
        return {int(sender): message for sender, message in answer}

    def transfer(self, out: Mapping[int, Iterable[torch.Tensor]], into: Mapping[int, Iterable[Buffer]]) -> None:
        """Send and receive raw bytes, all streams at once, block by block.

        out: by receiver, contiguous uint8 tensors. into: by sender, tensors of the same sizes in the same order, each with a function
        that is called for each of its blocks, in order, as it arrives. Both are consumed lazily. All ranks call this, even with
        nothing to send. Raises RanksLost.
        """
        self.check_retired()
        outgoing: list[_Stream] = [
            (to, ((block, None) for block in blocks_to_send(buffers))) for to, buffers in out.items()
        ]
        incoming: list[_Stream] = [(source, blocks_to_receive(buffers)) for source, buffers in into.items()]
        in_transfer: deque[list[_PendingBlock]] = deque()
        number = 0
        try:
            self._connect_to({*out, *into})
            while outgoing or incoming or in_transfer:
                while (outgoing or incoming) and len(in_transfer) < _BLOCKS_IN_FLIGHT:
                    in_transfer.append(self._post_blocks(outgoing, incoming, number))
                    number += 1
                for block in in_transfer[0]:  # while the next ones are in transfer
                    block.wait()
                in_transfer.popleft()
        except ConnectionBroken as error:
            for block in (each for blocks in in_transfer for each in blocks):
                block.work = None  # a reference would keep the connections open
            raise self._ranks_lost(error) from error
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def abort(self, why: str) -> None:
        """Close the connections for a reason of this rank; the waits of other ranks end with that reason."""
        if self._connections is not None:
            self._query_store(lambda store: store.set("why", f"rank {self._rank}: {why}"))
            self._connections = None

    def retire(self, why: str) -> None:
        """Abort for good: a thread that is inside an operation gets RanksLost at its end, and can begin no other one. Any thread.

        For a thread that hangs. All others go on with a `replacement`, whose connections that thread does not know.
        """
        self._retired = why
        self.abort(why)

    @property
    def is_retired(self) -> bool:
        return bool(self._retired)

    def replacement(self) -> Communicator:
        """Return one for the same ranks that has no connections yet; `connect` makes them. Not collective."""
        other = copy.copy(self)  # shares the groups of the training threads, which a retired one does not use
        other._connections, other._store, other._retired = None, None, ""
        other._progress_at, other._heartbeat = None, None
        return other

    @property
    def has_lost_ranks(self) -> bool:
        """Whether other ranks have ended an operation of which this rank still does its part."""
        heartbeat = self._heartbeat
        return heartbeat is not None and heartbeat.failure is not None

    def silent_s(self) -> float:
        """Return for how long this rank's part of an operation has made no progress, in seconds; 0 while it waits for others."""
        progress_at = self._progress_at
        return 0.0 if progress_at is None else time.monotonic() - progress_at

    def note_progress(self) -> None:
        """Record that this rank's part of an operation makes progress. From the thread that does it."""
        self._progress_at = time.monotonic()

    def _connect_to(self, others: Iterable[int]) -> None:
        """Connect to ranks that there is no connection to yet, in an order that cannot deadlock."""
        if self._connections is None:
            return
        for other in sorted(others, key=lambda other: (min(self._rank, other), max(self._rank, other))):
            with translated_errors():
                self._connections.to(other)

    def _post_blocks(self, outgoing: list[_Stream], incoming: list[_Stream], number: int) -> list[_PendingBlock]:
        """Start to send and receive the next block of every stream, and drop the streams that have ended."""
        if self._connections is None:
            raise ConnectionBroken("there are no connections any more")
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
        """Carry out `all_reduce` and `all_to_all`: return what rank 0 sends to this rank."""
        self.check_retired()
        if self._world_size == 1:
            own = encode_answer(self._own_part(produce))
            self.check_retired()
            return distribute(None, reduced([own], combine), self._hierarchy)
        heartbeat = self._heartbeat = HeartbeatThread(lambda answer: self._heartbeat_round(answer, combine, distribute))
        answer = capture_outcome(interrupted)  # default: the others do not wait for an interrupted rank
        try:
            answer = self._own_part(produce)
        finally:
            heartbeat.set_answer(encode_answer(answer))
            heartbeat.join()
            self._heartbeat = None
        self.check_retired()
        if isinstance(heartbeat.failure, ConnectionBroken):
            raise self._ranks_lost(heartbeat.failure) from heartbeat.failure
        if heartbeat.failure is not None:
            self.abort(str(heartbeat.failure))
            raise RanksLost(f"rank {self._rank}: {heartbeat.failure}") from heartbeat.failure
        return heartbeat.result

    def _own_part(self, produce: Callable[[], object]) -> dict[str, Any]:
        """Do this rank's part, and let `silent_s` tell how it gets on."""
        self.note_progress()
        try:
            return capture_outcome(produce)
        finally:
            self._progress_at = None

    def check_retired(self) -> None:
        """Raise RanksLost when it is retired."""
        if self._retired:
            raise RanksLost(self._retired)

    def _heartbeat_round(self, answer: bytes, combine: Callable[[list[Any]], object], distribute: _Distribute) -> bytes:
        """Send an answer to rank 0, empty if there is none yet; return its result, empty while some ranks have not answered."""
        if self._connections is None:
            raise ConnectionBroken("there are no connections any more")
        collectives = self._connections.collectives
        gathered = collectives.gather(answer)
        is_complete = collectives.broadcast(b"complete" if gathered and all(gathered) else b"")
        if not is_complete:
            return b""
        return distribute(collectives, reduced(gathered, combine) if gathered else None, self._hierarchy)

    def _ranks_lost(self, error: ConnectionBroken) -> RanksLost:
        """Close the connections, so that others notice, and find out which ranks are missing or what they reported."""
        self._connections = None
        _release_frames(error)
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
            f"{format_ranks(silent)} ended, or was silent for {rank_connections.SILENCE_TIMEOUT_S:g} s"
            if silent
            else ""
        )

    def _query_store(self, ask: Callable[[Any], object]) -> str:
        """Use the store, which may be gone with its host, for a few seconds at most; return "" if it does not answer."""
        result: list[object] = []

        def run() -> None:
            try:
                assert self._store is not None
                result.append(ask(self._store))
            except RuntimeError as error:
                log.debug("the store does not answer: %s", error)

        thread = threading.Thread(target=run, name="elastipod-checkpoint-why", daemon=True)
        with suppress(RuntimeError):  # Python exits and can start no thread
            thread.start()
            thread.join(_STORE_TIMEOUT_S)
        return str(result[0] or "") if result else ""


def name_of_connections(are_open: Iterable[bool]) -> str:
    """Give a name that no other connections have had in this world; an empty one where all ranks have some, as ``are_open`` says."""
    return "" if all(are_open) else secrets.token_hex(8)


def _release_frames(error: BaseException | None) -> None:
    """Drop what the frames of an error hold, the connections among it: other ranks would wait until Python collects garbage."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


@dataclass(slots=True)
class _PendingBlock:
    """A block in transfer. on_block: called when it has arrived."""

    work: Any
    data: torch.Tensor
    on_block: OnBlock | None

    def wait(self) -> None:
        with translated_errors():
            self.work.wait()
        if self.on_block is not None:
            self.on_block(self.data)
