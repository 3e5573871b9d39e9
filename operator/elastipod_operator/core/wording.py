"""Parts of sentences that conditions, Events and log lines share."""

from __future__ import annotations


def counted(number: int, one: str, several: str = "") -> str:
    """Give a number with what it counts: "1 replica", "2 replicas". several: the plural, where an added "s" is not enough."""
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def share(number: int, total: int, verb: str, verbs: str) -> str:
    """Say of how many replicas something holds: "1 of 2 replicas is", "2 of 3 replicas are"."""
    return f"{number} of {counted(total, 'replica')} {verb if number == 1 else verbs}"


def training(number: int, generation: int) -> str:
    """Say how many replicas train in a generation."""
    return f"{counted(number, 'replica trains', 'replicas train')} in generation {generation}"
