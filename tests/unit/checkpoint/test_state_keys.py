"""States whose ranks hold different things are refused when they are saved, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod.checkpoint.state_keys import StateKeys, check_same_keys, describe_missing_keys
from elastipod.errors import CheckpointError

STATE = "optimizer.state"


def keys(*names: str, empty: tuple[str, ...] = ()) -> StateKeys:
    return StateKeys(frozenset(names), frozenset(empty))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(
            [keys("model.0.w", "model.0.b"), keys("model.0.w", "model.0.b"), keys("model.1.w"), keys("model.1.w")],
            "ranks 2-3 lack model.0.b, model.0.w, which ranks 0-1 have; for stages of a pipeline pass",
            id="stages of a pipeline",
        ),
        pytest.param(
            [keys("model.w", *(f"{STATE}.w.{n}" for n in range(5))), keys("model.w")],
            f"rank 1 lacks {STATE}.w.0, {STATE}.w.1, {STATE}.w.2 and 2 more, which rank 0 has; ",
            id="optimizer state on one replica only",
        ),
        pytest.param(
            [keys("model.w", f"{STATE}.w.m"), keys("model.w", empty=("other",))],
            f"rank 1 lacks {STATE}.w.m, which rank 0 has; ",
            id="the shard of another parameter is empty",
        ),
        pytest.param(
            [keys("model.w", "model.x"), keys("model.w", empty=("x",))],
            "rank 1 lacks model.x, which rank 0 has; ",
            id="a weight is there also where its shard is empty",
        ),
    ],
)
def test_which_ranks_lack_what(ranks: list[StateKeys], words: str) -> None:
    assert f"this state cannot be saved: {words}" in (describe_missing_keys(dict(enumerate(ranks))) or "")


def test_an_empty_shard_needs_no_optimizer_state() -> None:
    assert describe_missing_keys({0: keys("model.w", f"{STATE}.w.m"), 1: keys("model.w", empty=("w",))}) is None


@given(st.lists(st.frozensets(st.sampled_from(["a", "b", "c"])), min_size=1, max_size=5))
def test_only_equal_keys_are_taken(ranks: list[frozenset[str]]) -> None:
    assert (describe_missing_keys({n: StateKeys(each, frozenset()) for n, each in enumerate(ranks)}) is None) == (
        len(set(ranks)) == 1
    )


@pytest.mark.parametrize(("count", "stages"), [(1, [0, 0]), (2, [0, 0, 1, 1])])
def test_ranks_of_one_stage_have_the_same_keys_and_the_first_that_lacks_one_is_named(
    monkeypatch: pytest.MonkeyPatch, count: int, stages: list[int]
) -> None:
    """The other ranks are played: the last one lacks a weight."""
    held = [keys(f"model.{number}.w", f"model.{number}.b") for number in stages[:-1]] + [keys(f"model.{stages[-1]}.w")]
    monkeypatch.setattr(StateKeys, "of", classmethod(lambda cls, state: held[0]))
    state: Any = mock.Mock(stage=mock.Mock(number=0, count=count, speaks=False))

    def reduce(produce: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        own, others = produce(), list[Any]()
        if isinstance(own, tuple):
            others = [(number, sorted(each.keys), []) for number, each in zip(stages[1:], held[1:], strict=True)]
        elif own:
            others = [[number, each.digest] for number, each in zip(stages[1:], held[1:], strict=True)]
        return combine([own, *others])

    with pytest.raises(CheckpointError, match=rf": rank {len(stages) - 1} lacks model\.{stages[-1]}\.b, which rank "):
        check_same_keys(state, mock.Mock(training_all_reduce=reduce))
    held[-1] = held[-2]
    check_same_keys(state, mock.Mock(training_all_reduce=reduce))
