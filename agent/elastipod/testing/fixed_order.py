"""Gradients whose sum does not depend on the world size, bit for bit.

Floating-point addition is not associative: another order of additions changes the last digits, and a resized run drifts from an
undisturbed one. Here the global batch is divided into *grains* of fixed size. Each grain is one pass, on whichever rank, and the
gradients of the grains are added along one binary tree over the whole batch: grain 2i to grain 2i + 1, then pair to pair, and so
on. A rank adds the complete subtrees that it holds. The remaining sums of all ranks are gathered, and every rank adds them along
the same tree.

It costs more than DDP: up to 2 log2(grains) gradients are gathered from every rank, and log2(grains) are held in memory. Use it
for proofs, debugging and small models. It needs the same kernels on every rank (one type of machine, the same number of threads,
`torch.use_deterministic_algorithms`) and a plain module or DDP. It refuses sharded models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from elastipod.collectives import all_gather_json
from elastipod.data import Batch, MicroBatch
from elastipod.gradients import announce_reduced_gradients, gradient_sync
from elastipod.rank_in_world import RankInWorld
from elastipod.torch_compat import DTensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node(Generic[T]):
    """The sum of the leaves ``index * 2**level`` to ``(index + 1) * 2**level``."""

    level: int
    index: int
    value: T


class SumTree(Generic[T]):
    """Adds leaves, which come in order, along the binary tree over all leaves. Holds as few sums as possible."""

    def __init__(self, add: Callable[[T, T], T], first: int = 0) -> None:
        """add: gives left + right. first: number of the first leaf."""
        self._add = add
        self._next = first
        self.nodes: list[Node[T]] = []  # complete subtrees, left to right

    def append(self, leaf: T) -> None:
        """Add the next leaf."""
        self.push(Node(0, self._next, leaf))
        self._next += 1

    def push(self, node: Node[T]) -> None:
        """Add the subtree that follows the ones added so far."""
        while self.nodes and self.nodes[-1].level == node.level and node.index % 2:
            left = self.nodes.pop()
            node = Node(node.level + 1, node.index // 2, self._add(left.value, node.value))
        self.nodes.append(node)

    def total(self) -> T:
        """Give the sum of all leaves. The first leaf must have been number 0, and there must be at least one."""
        *others, last = self.nodes
        value = last.value
        for node in reversed(others):
            value = self._add(node.value, value)
        return value


def fixed_order_passes(model: nn.Module, batch: Batch, grain: int) -> Iterator[MicroBatch]:
    """Give this rank's micro-batches of one optimizer step; after the last one each parameter's `grad` is that of the global batch.

    batch: from ``plan.iterate(..., grain=grain)``. Multiply the mean loss of a micro-batch by its weight, as with `accumulate`.
    Ranks may have different numbers of passes, including none, so the model must not run collectives of its own. Collective over
    the default process group. Raises ValueError for a sharded model and for a batch with another grain.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _refuse_sharded(parameters)
    first, rest = divmod(batch.first, grain)
    if rest and batch.indices:
        raise ValueError(
            f"this batch was not cut into groups of {grain}; give the same grain to ElasticBatches.iterate"
        )
    tree: SumTree[list[torch.Tensor]] = SumTree(_added, first)
    for part in batch.micro_batches(grain):
        if not part.weight:
            continue  # a pass that only serves collectives, of which there are none here
        for parameter in parameters:
            parameter.grad = None
        with gradient_sync(model, enabled=False):
            yield replace(part, weight=len(part.indices) / batch.global_size)
        tree.append([_gradient(parameter) for parameter in parameters])
    for parameter, value in zip(parameters, _sum_over_all_ranks(tree, parameters), strict=True):
        parameter.grad = value
    announce_reduced_gradients(1.0)


def exact_sum(values: Iterable[float]) -> float:
    """Give the sum of all ranks' numbers with a single rounding, so it depends on neither order nor world size. Collective."""
    own = list(values)
    return math.fsum(value for part in all_gather_json(lambda: own) for value in part)


def _added(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.add_(other) for one, other in zip(left, right, strict=True)]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    parameter.grad = None
    return gradient.detach()


def _sum_over_all_ranks(tree: SumTree[list[torch.Tensor]], parameters: list[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Give every parameter's sum over all ranks' subtrees, one parameter in memory at a time."""
    if RankInWorld.current().world_size == 1:
        yield from tree.total()
        return
    shapes = all_gather_json(lambda: [(node.level, node.index) for node in tree.nodes])
    most = max(map(len, shapes))
    for number, parameter in enumerate(parameters):
        own = torch.zeros((most, *parameter.shape), dtype=parameter.dtype, device=parameter.device)
        for place, node in enumerate(tree.nodes):
            own[place] = node.value[number]
        parts = [torch.empty_like(own) for _ in shapes]
        dist.all_gather(parts, own)
        whole: SumTree[torch.Tensor] = SumTree(torch.add)
        for part, names in zip(parts, shapes, strict=True):
            for place, (level, index) in enumerate(names):
                whole.push(Node(level, index, part[place]))
        yield whole.total()


def _refuse_sharded(parameters: list[nn.Parameter]) -> None:
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ValueError("sums in a fixed order need whole gradients on every rank; this model is sharded (FSDP2)")
