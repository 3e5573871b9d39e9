"""What rank 0 makes of the answers of all ranks, and how it sends the result to each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from elastipod.checkpoint.hierarchy import HierarchicalCollectives, Hierarchy
from elastipod.collectives import FAILED, capture_outcome
from elastipod.errors import CheckpointError

T = TypeVar("T")


def no_result(_: list[Any]) -> None:
    """Discard the values: for work that only has to be done everywhere, or fail everywhere."""


def first_message(texts: list[str | None]) -> str | None:
    """Return the first message of a rank, None if no rank has one."""
    return next((each for each in texts if each is not None), None)


def reduced(gathered: Sequence[bytes], combine: Callable[[list[Any]], object]) -> dict[str, Any]:
    """Return rank 0's result: the first failure of a rank, else what ``combine`` makes of the values."""
    answers = [json.loads(each) for each in gathered]
    failed = next(((rank, each) for rank, each in enumerate(answers) if "value" not in each), None)
    if failed is None:
        return capture_outcome(lambda: combine([each["value"] for each in answers]))
    rank, answer = failed
    return {kind: f"rank {rank}: {text}" if kind == FAILED else text for kind, text in answer.items()}


def broadcast_result(
    collectives: HierarchicalCollectives | None, result: Mapping[str, Any] | None, _: Hierarchy
) -> bytes:
    data = encode_answer(result) if result is not None else b""
    return collectives.broadcast(data) if collectives is not None else data


def scatter_result(
    collectives: HierarchicalCollectives | None, result: Mapping[str, Any] | None, hierarchy: Hierarchy
) -> bytes:
    """Send each rank its messages; send a failure to all."""
    parts: list[bytes] = []
    if result is not None:
        messages = result.get("value", {})
        parts = [
            encode_answer({"value": messages.get(rank, [])} if "value" in result else result)
            for rank in range(hierarchy.world_size)
        ]
    return collectives.scatter(parts, hierarchy) if collectives is not None else parts[0]


def messages_by_receiver(written: list[list[Any]]) -> dict[int, list[Any]]:
    """Return the messages for each rank, as (sender, message)."""
    messages: dict[int, list[Any]] = {}
    for sender, own in enumerate(written):
        for to, message in own:
            messages.setdefault(to, []).append((sender, message))
    return messages


def encode_answer(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def first_value(values: list[T]) -> T:
    return values[0]


def interrupted() -> None:
    """Fail as a rank that was interrupted before it had an answer."""
    raise CheckpointError("it was interrupted")
