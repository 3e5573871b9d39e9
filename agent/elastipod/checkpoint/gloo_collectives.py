"""Collectives for messages of any length over a gloo group: a slot of fixed size first, then the rest if there is more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastipod.message_slots import BODY_BYTES, SLOT_BYTES, parse_slot, slot_of


class ConnectionBroken(RuntimeError):
    """A connection failed, or nothing arrived in time."""


@contextmanager
def translated_errors() -> Iterator[None]:
    """Convert the errors of torch's connections to ConnectionBroken."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBroken(str(error).splitlines()[0]) from error


class GlooCollectives:
    """`Collectives` over a gloo group: one of torch's, or one of our own (`connect`). Methods raise ConnectionBroken.

    Rank 0 is the root of torch's options where nothing else is said.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    @classmethod
    def connect(cls, store: Any, rank: int, size: int, timeout_s: float) -> GlooCollectives:
        """Connect ``size`` ranks, each of which calls this, through a store. Raises RuntimeError when some do not."""
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s)) if size > 1 else None
        return cls(group, rank, size)

    def gather(self, data: bytes) -> list[bytes]:
        if self.size == 1:
            return [data]
        buffers = [bytearray(SLOT_BYTES) for _ in range(self.size)] if self.rank == 0 else []
        with translated_errors():
            into = [[_tensor(buffer) for buffer in buffers]] if buffers else []
            self.group.gather(into, [_tensor(slot_of(data))], dist.GatherOptions()).wait()
            if self.rank == 0:
                return [data, *self._received(buffers)]
            self._send_rest(data, 0)
            return []

    def broadcast(self, data: bytes) -> bytes:
        if self.size == 1:
            return data
        head = slot_of(data) if self.rank == 0 else bytearray(SLOT_BYTES)
        with translated_errors():
            self.group.broadcast([_tensor(head)], dist.BroadcastOptions()).wait()
            start, left = parse_slot(head)
            if left <= 0:
                return start
            rest = bytearray(data[BODY_BYTES:]) if self.rank == 0 else bytearray(left)
            self.group.broadcast([_tensor(rest)], dist.BroadcastOptions()).wait()
            return start + bytes(rest)

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        if self.size == 1:
            return parts[0]
        head = bytearray(SLOT_BYTES)
        with translated_errors():
            slots = [[_tensor(slot_of(part)) for part in parts]] if self.rank == 0 else []
            self.group.scatter([_tensor(head)], slots, dist.ScatterOptions()).wait()
            if self.rank == 0:
                for to, part in enumerate(parts[1:], start=1):
                    self._send_rest(part, to)
                return parts[0]
            start, left = parse_slot(head)
            return start + self._receive_rest(left, 0)() if left > 0 else start

    def _received(self, buffers: Sequence[bytearray]) -> list[bytes]:
        """Parse the slots of the others; receive what is longer than a slot from all of them at once."""
        starts = [parse_slot(buffer) for buffer in buffers]
        rests = {rank: self._receive_rest(left, rank) for rank, (_, left) in enumerate(starts) if rank and left > 0}
        return [start + rests[rank]() if rank in rests else start for rank, (start, _) in enumerate(starts) if rank]

    def _send_rest(self, data: bytes, to: int) -> None:
        if len(data) > BODY_BYTES:
            self.group.send([_tensor(bytearray(data[BODY_BYTES:]))], to, 0).wait()

    def _receive_rest(self, size: int, source: int) -> Callable[[], bytes]:
        """Start to receive; return a function that waits for the rest."""
        buffer = bytearray(size)
        work = self.group.recv([_tensor(buffer)], source, 0)

        def wait() -> bytes:
            work.wait()
            return bytes(buffer)

        return wait


def _tensor(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)
