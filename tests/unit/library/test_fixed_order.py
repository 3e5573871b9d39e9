"""Sums along one tree: the same bits however the leaves are shared out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastipod.data import ElasticBatches, even_part
from elastipod.testing.fixed_order import Node, SumTree, exact_sum, fixed_order_passes


def subtrees(first: int, end: int) -> list[tuple[int, int]]:
    """Give (level, index) of the complete subtrees of the leaves ``first`` to ``end`` (exclusive), left to right."""
    tree: SumTree[None] = SumTree(lambda left, right: None, first)
    for _ in range(first, end):
        tree.append(None)
    return [(node.level, node.index) for node in tree.nodes]


def by_definition(leaves: list[float]) -> float:
    """Add pair by pair, level by level; what has no partner goes up as it is."""
    while len(leaves) > 1:
        pairs = [leaves[at : at + 2] for at in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


@given(leaves=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60), world=st.integers(1, 9))
def test_the_sum_has_the_same_bits_for_every_world(leaves: list[float], world: int) -> None:
    whole: SumTree[float] = SumTree(float.__add__)
    for rank in range(world):
        own = even_part(len(leaves), rank, world)
        tree: SumTree[float] = SumTree(float.__add__, own.start)
        for number in own:
            tree.append(leaves[number])
        assert [(node.level, node.index) for node in tree.nodes] == subtrees(own.start, own.stop)
        assert len(tree.nodes) <= 2 * math.log2(len(leaves) + 1) + 1
        for node in tree.nodes:
            whole.push(Node(node.level, node.index, node.value))
    assert whole.total() == by_definition(leaves)


def test_order_matters_in_this_data() -> None:
    """Otherwise the property above would hold for any order of summation."""
    leaves = [1e16, 1.0, -1e16, 1.0, 3.0]
    assert by_definition(leaves) != sum(leaves)


def small_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def test_one_process_gets_the_gradient_of_the_whole_batch() -> None:
    model, inputs, targets = small_model(), torch.randn(13, 5), torch.randint(0, 3, (13,))
    plan = ElasticBatches(13, 13)
    (batch,) = plan.iterate(0, 1, grain=4)
    losses = []
    for part in fixed_order_passes(model, batch, grain=4):
        chosen = list(part.indices)
        loss = torch.nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]) * part.weight
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    assert len(losses) == 4
    summed = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    whole = torch.nn.functional.cross_entropy(model(inputs), targets)
    whole.backward()  # type: ignore[no-untyped-call]
    for mine, parameter in zip(summed, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)
    assert exact_sum(losses) == pytest.approx(whole.item())


def test_a_batch_of_another_grain_is_refused() -> None:
    batch = ElasticBatches(10, 10).batch(1, rank=1, world_size=2)
    with pytest.raises(ValueError, match="was not cut into groups of 4"):
        next(fixed_order_passes(small_model(), batch, grain=4))
