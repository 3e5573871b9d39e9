"""What a step changes before it counts, such as the statistics of a BatchNorm: an interrupted step leaves nothing in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from elastipod.in_memory.data_positions import DataPositions
from elastipod.in_memory.members import Members
from elastipod.in_memory.parts import local_of
from elastipod.in_memory.tensor_digests import as_bytes
from elastipod.torch_compat import DTensor, copy_together


class StepBuffers:
    """Holds what the buffers, and the positions in data, were before the present step.

    All are copied before the first step of a world, and from then on those that it has changed: a large mask is not copied at each
    step. One that a later step is the first to change is therefore not put back.

    positions: of the members that read data.
    """

    def __init__(self, members: Members) -> None:
        self.positions = DataPositions(members)
        self._members = members
        self._copies: list[_Copy] = []
        self._groups: list[_Group] = []  # the same, as they are copied
        self._is_known = False  # which buffers steps change
        self._is_in_step = self._is_put_back = False

    def begin(self) -> None:
        """A step begins."""
        self._is_in_step, self._is_put_back = True, False
        self.positions.begin()
        if self._is_known:
            self._copy_again()
        else:
            self._copies = [_Copy(module, name) for module, name in self._buffers()]

    def committed(self) -> None:
        """The step counts."""
        self._is_in_step = False
        if not self._is_known:
            self._copies = [each for each in self._copies if not each.is_equal()]
            self._groups = _grouped(self._copies)
            self._is_known = True

    def begin_block(self) -> bool:
        """A block between two steps begins. False where an interrupted step or block is to be put back: it goes back with that."""
        begins = not self._is_in_step
        if begins:
            self.begin()
        return begins

    def end_block(self) -> None:
        """The block that began has ended. It does not tell which buffers steps change."""
        self._is_in_step = False

    def restore(self) -> None:
        """The step does not count, or not yet. Does nothing between two steps."""
        if self._is_in_step and not self._is_put_back:
            self._swap()

    def redo(self) -> None:
        """A step that was put back counts all the same."""
        if self._is_put_back:
            self._swap()

    def forget(self) -> None:
        """The world has ended: the next one may have other members."""
        self._copies, self._groups = [], []
        self._is_known = self._is_in_step = self._is_put_back = False
        self.positions.forget()

    def _swap(self) -> None:
        for each in self._copies:
            each.swap()
        self.positions.swap()
        self._is_put_back = not self._is_put_back

    def _copy_again(self) -> None:
        if not all([each.is_in_place() for each in self._copies]):  # a list, so that each of them is asked
            self._groups = _grouped(self._copies)
        for live, copies in self._groups:
            copy_together(copies, live)

    def _buffers(self) -> Iterator[tuple[nn.Module, str]]:
        known = set[int]()
        for member in self._members.of_type(nn.Module):
            for module in member.modules():
                for name, each in module.named_buffers(recurse=False):
                    if id(each) not in known and _local(each) is not None:
                        known.add(id(each))
                        yield module, name


class _Copy:
    """Of one buffer. Nothing here keeps the module alive: a sharded model goes with its world.

    live: the memory of the buffer, None where it is gone. copy: of it.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        buffers: Any = module._buffers
        # TorchScript has a view of its own.
        self._buffers = buffers if isinstance(buffers, dict) else dict(buffers.items())
        self._name = name
        self._take()

    def is_in_place(self) -> bool:
        """Whether the buffer is the one that was copied last. Another one in its place is copied here."""
        if self._buffers.get(self._name) is self._buffer:
            return True
        self._take()
        return False

    def is_equal(self) -> bool:
        """Whether the buffer is what it was."""
        now = _local(self._buffers.get(self._name))
        return now is not None and _is_alike(now, self.copy) and _is_equal(now, self.copy)

    def swap(self) -> None:
        """Exchange what the buffer is and what it was, unless it has become another thing: a cache may have grown, or be gone."""
        now = _local(self._buffers.get(self._name))
        # One that shares its memory with itself cannot be written to, and is equal.
        if now is not None and _is_alike(now, self.copy) and not _is_equal(now, self.copy):
            after = now.clone()
            now.copy_(self.copy)
            self.copy.copy_(after)

    def _take(self) -> None:
        self._buffer = self._buffers.get(self._name)
        self.live = _local(self._buffer)
        self.copy = torch.empty(0, device="cpu") if self.live is None else self.live.clone()


_Group = tuple[list[torch.Tensor], list[torch.Tensor]]


def _grouped(copies: Sequence[_Copy]) -> list[_Group]:
    """Give the memory of buffers and of their copies, by device and type: torch copies each group at once."""
    found: dict[tuple[torch.device, torch.dtype], _Group] = {}
    for each in copies:
        if each.live is not None:
            live, copied = found.setdefault((each.live.device, each.live.dtype), ([], []))
            live.append(each.live)
            copied.append(each.copy)
    return list(found.values())


def _local(buffer: torch.Tensor | None) -> torch.Tensor | None:
    """Give this rank's own part of a buffer, the same memory.

    None for what torch can neither compare nor overwrite, such as sparse ones.
    """
    is_plain = type(buffer) in (torch.Tensor, nn.Parameter, DTensor)
    if buffer is None or not is_plain or buffer.layout is not torch.strided or buffer.is_meta:
        return None
    return local_of(buffer)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except NotImplementedError:  # torch compares no tensors of some types, such as numbers of 4 bits
        return torch.equal(as_bytes(one), as_bytes(other))
