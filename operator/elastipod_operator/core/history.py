"""The history of worker starts, for users and plots (annotation `elastipod.io/history`, docs/design/contracts.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime

from .depth_reasons import DepthReason
from .reasons import AnyReason, as_reason
from .record import Depth, TransitionKind
from .record_codec import RecordError, format_time, parse_required_time, parse_time

MAX_HISTORY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One start of the workers."""

    generation: int
    from_size: int
    to_size: int
    kind: TransitionKind
    cause: AnyReason
    at: datetime
    detected_at: datetime
    running_at: datetime | None = None
    depth: Depth | None = None
    """How deep the change went; None for the first start, and in entries of earlier operators."""
    depth_reason: str = ""
    depth_code: DepthReason = DepthReason.UNKNOWN
    owner: str = ""
    """UID of the job; empty in entries of earlier operators."""


def encode_history(entries: tuple[HistoryEntry, ...]) -> str:
    """Give the text of the history annotation: the newest MAX_HISTORY entries."""
    return json.dumps(
        [
            {
                "generation": e.generation, "from": e.from_size, "to": e.to_size, "kind": e.kind.value, "cause": e.cause,
                "at": format_time(e.at), "detected_at": format_time(e.detected_at), "running_at": format_time(e.running_at),
                **({"depth": e.depth.value} if e.depth is not None else {}),
                **({"depth_reason": e.depth_reason} if e.depth_reason else {}),
                **({"depth_code": e.depth_code.value} if e.depth_code is not DepthReason.UNKNOWN else {}),
                **({"uid": e.owner} if e.owner else {}),
            }
            for e in entries[-MAX_HISTORY:]
        ],
        separators=(",", ":"),
    )  # fmt: skip


def decode_history(text: str) -> tuple[HistoryEntry, ...]:
    """Read a history annotation; a damaged one counts as empty."""
    try:
        return tuple(
            HistoryEntry(
                generation=int(e["generation"]), from_size=int(e["from"]), to_size=int(e["to"]), kind=TransitionKind(e["kind"]),
                cause=as_reason(str(e["cause"])), at=parse_required_time(e["at"]), detected_at=parse_required_time(e["detected_at"]),
                running_at=parse_time(e["running_at"]), owner=str(e.get("uid", "")), depth=_depth(e.get("depth")),
                depth_reason=str(e.get("depth_reason", "")), depth_code=DepthReason(str(e.get("depth_code", ""))),
            )
            for e in json.loads(text)
        )  # fmt: skip
    except (RecordError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError):
        return ()


def _depth(word: object) -> Depth | None:
    """Read a depth; None for one that only a later operator knows."""
    return next((depth for depth in Depth if depth.value == word), None)


def mark_running(entries: tuple[HistoryEntry, ...], generation: int, at: datetime) -> tuple[HistoryEntry, ...]:
    """Note when all agents of a generation answered RUNNING."""
    return tuple(
        replace(e, running_at=at) if e.generation == generation and e.running_at is None else e for e in entries
    )
