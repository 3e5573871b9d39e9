"""Parts of sentences: numbers agree with their nouns and verbs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_operator.core.wording import counted, share, training

ONE_WITH_PLURAL = re.compile(r"(?<![\d.])1 (more )?(replicas|pods|agents|restarts|increments|recoveries|faults)\b")
MANY_WITH_SINGULAR = re.compile(r"\b(0|[2-9]|\d{2,}) (more )?(replica|pod|agent|restart|increment|recovery|fault)\b")


def disagreements(text: str) -> list[str]:
    """Give the places of a text at which a number and its noun do not agree."""
    return [match[0] for rule in (ONE_WITH_PLURAL, MANY_WITH_SINGULAR) for match in rule.finditer(text)]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 replicas"), (1, "1 replica"), (2, "2 replicas"), (11, "11 replicas"), (21, "21 replicas")],
)
def test_a_number_has_the_noun_that_goes_with_it(number: int, text: str) -> None:
    assert counted(number, "replica") == text
    assert disagreements(counted(number, "replica")) == []


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 of 2 replicas are"), (1, "1 of 2 replicas is"), (2, "2 of 2 replicas are")]
)
def test_a_share_has_the_verb_that_goes_with_it(number: int, text: str) -> None:
    assert share(number, 2, "is", "are") == text


def test_one_of_one() -> None:
    assert share(1, 1, "has", "have") == "1 of 1 replica has"


@given(st.integers(0, 2), st.integers(0, 2))
def test_sentences_agree_for_any_number(number: int, total: int) -> None:
    for text in (
        share(number, total, "is", "are"),
        training(number, 7),
        counted(number, "replica is ready", "replicas are ready"),
    ):
        assert disagreements(text) == []


@pytest.mark.parametrize("text", ["1 replicas train", "(and 1 more pods)", "2 replica", "0 more pod", "11 agent"])
def test_what_does_not_agree_is_found(text: str) -> None:
    assert disagreements(text) != []


@pytest.mark.parametrize("text", ["1 of 2 replicas", "21 replicas", "1.1 replicas", "pod 2 is", "1 -> 2 replicas"])
def test_what_agrees_is_not_found(text: str) -> None:
    assert disagreements(text) == []
