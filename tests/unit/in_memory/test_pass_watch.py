"""A step whose world is over ends in its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.in_memory.forked_ranks import run_ranks
from tests.unit.in_memory.models import build
from torch import nn

from elastipod.in_memory.members import Members
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.pass_watch import CHECKS, PassWatch


class Watched:
    """A model whose passes are watched. checked: for each check, how many of its parameters had a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.is_lost = False
        self.checked: list[int] = []
        self.watch = PassWatch(Members(build() | {"model": model}), self._check)

    def _check(self) -> bool:
        self.checked.append(sum(each.grad is not None for each in self.model.parameters()))
        return self.is_lost

    def step(self) -> None:
        self.model.zero_grad()
        self.checked.clear()
        self.model(torch.ones(2, 3)).sum().backward()


def layers(number: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(number)))


@pytest.mark.parametrize(("number", "checks"), [(1, 2), (8, 16), (9, 9), (100, 16)])
def test_it_checks_some_times_in_a_pass_at_even_distances(number: int, checks: int) -> None:
    watched = Watched(layers(number))
    watched.watch.begin()
    watched.step()
    assert len(watched.checked) == checks <= CHECKS
    between = [late - early for early, late in zip(watched.checked, watched.checked[1:], strict=False)]
    assert max(between) - min(between) <= 1
    assert watched.checked[-1] == 2 * number, "the first parameter is the last that gets a gradient"


def test_a_lost_step_ends_at_the_next_check() -> None:
    watched = Watched(layers(4))
    watched.watch.begin()
    watched.is_lost = True
    with pytest.raises(WorldLost, match=r"^the agent has ended the generation in a backward pass$"):
        watched.step()
    assert watched.checked == [1]


def test_a_watch_that_was_closed_checks_no_more_and_one_begun_twice_checks_once() -> None:
    watched = Watched(layers(1))
    for _ in range(2):
        watched.watch.begin()
    watched.step()
    assert len(watched.checked) == 2
    for _ in range(2):
        watched.watch.close()
    watched.step()
    assert watched.checked == []


def test_what_is_not_trained_has_no_hooks_until_it_is() -> None:
    watched = Watched(layers(3))
    first: Any = next(iter(watched.model.children()))
    first.requires_grad_(False)
    watched.watch.begin()
    watched.step()
    assert len(watched.checked) == 4
    first.requires_grad_(True)
    watched.watch.begin()
    watched.step()
    assert len(watched.checked) == 6


def test_a_model_that_trains_nothing_is_watched_without_a_word() -> None:
    watched = Watched(layers(1).requires_grad_(False))
    watched.watch.begin()
    assert watched.checked == []


def test_a_compiled_model_is_not_compiled_again_for_it() -> None:
    """In a process of its own: what torch.compile has wrapped keeps process groups alive."""

    def body(rank: int) -> list[int]:
        graphs: list[Any] = []

        def count(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        watched = Watched(layers(2))
        compiled = torch.compile(watched.model, backend=count)
        checks = []
        for watches in (False, True, False, True):
            (watched.watch.begin if watches else watched.watch.close)()
            watched.checked.clear()
            compiled(torch.ones(2, 3)).sum().backward()
            checks.append(len(watched.checked))
        return [len(graphs), *checks]

    assert run_ranks(1, body) == [[1, 0, 4, 0, 4]]
