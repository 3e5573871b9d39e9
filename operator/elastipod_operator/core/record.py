"""The one record of a job (decision 1): everything that must outlive the operator, in annotation `elastipod.io/state`.

Every write that allocates a generation or spends a budget carries the job's resourceVersion and comes before the first
call to an agent. Members are stored as runs of ordinals, so that thousands of pods fit into 16 KiB.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any

from .names import PodId, Slot
from .sizes import MAX_REPLICAS

VERSION = 1
MAX_BYTES = 16 * 1024
MAX_HISTORY = 64


class RecordError(ValueError):
    """The annotation holds something that this version cannot read."""


class Kind(StrEnum):
    """Why the workers are stopped, or not yet started."""

    START = "start"
    RESIZE = "resize"
    RECOVERY = "recovery"
    SUSPEND = "suspend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change of generation under way: recorded before the first /stop, gone with the record of the next start.

    graceful: workers are asked to reach a checkpoint until `deadline`, else they are ended at once. goal: the size that
    is waited for. counted: the incident was already booked to the retry budget.
    """

    kind: Kind
    cause: str
    message: str
    from_size: int
    goal: int
    began_at: datetime
    detected_at: datetime
    deadline: datetime
    graceful: bool = False
    not_before: datetime | None = None
    counted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the operator decided and must not forget.

    generation 0 and no members: never started. members are in order of their group ranks. lost: pods that were given
    up and must never be taken back, while the API server still lists them. incarnations: the newest one of each slot
    that is not 0. window_since: when the present growth (or start) window opened. incident_at: when the fault that is
    being recovered from was seen. best_step: the newest step known at the last incident.
    """

    generation: int = 0
    members: tuple[PodId, ...] = ()
    master_addr: str = ""
    transition: Transition | None = None
    lost: tuple[PodId, ...] = ()
    incarnations: dict[Slot, int] = field(default_factory=dict)
    window_since: datetime | None = None
    settled_at: datetime | None = None
    resized_at: datetime | None = None
    recovered_at: datetime | None = None
    incident_at: datetime | None = None
    started_at: datetime | None = None
    restarts: int = 0
    retries: int = 0
    failures_in_row: int = 0
    best_step: int = -1
    outcome: str = ""
    outcome_reason: str = ""
    outcome_message: str = ""
    ended_at: datetime | None = None

    @property
    def size(self) -> int:
        """Replicas that train together in the present generation; 0 while the workers are being exchanged."""
        return 0 if self.transition else len(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One start of the workers, for people and pictures (annotation `elastipod.io/history`)."""

    generation: int
    from_size: int
    to_size: int
    kind: Kind
    cause: str
    at: datetime
    detected_at: datetime
    running_at: datetime | None = None


def encode(record: Record) -> str:
    """Give the annotation's text, deterministic for equal records. Raises RecordError above MAX_BYTES."""
    body: dict[str, Any] = {
        "v": VERSION,
        "generation": record.generation,
        "members": _runs(record.members),
        "master": record.master_addr,
        "lost": _runs(record.lost),
        "incarnations": _runs(sorted(PodId(s.spec, s.ordinal, i) for s, i in record.incarnations.items())),
        "budget": [record.restarts, record.retries, record.failures_in_row, record.best_step],
        "times": [
            _stamp(t)
            for t in (
                record.window_since,
                record.settled_at,
                record.resized_at,
                record.recovered_at,
                record.incident_at,
                record.started_at,
                record.ended_at,
            )
        ],
    }
    if record.transition:
        t = record.transition
        body["transition"] = [
            t.kind.value, t.cause, t.message, t.from_size, t.goal, _stamp(t.began_at), _stamp(t.detected_at),
            _stamp(t.deadline), t.graceful, _stamp(t.not_before), t.counted,
        ]  # fmt: skip
    if record.outcome:
        body["outcome"] = [record.outcome, record.outcome_reason, record.outcome_message]
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    if len(text.encode()) > MAX_BYTES:
        raise RecordError(f"the state record takes {len(text.encode())} bytes, more than {MAX_BYTES}")
    return text


def decode(text: str) -> Record:
    """Read an annotation written by encode(). Raises RecordError with what is wrong with it."""
    try:
        body = json.loads(text)
        if body["v"] != VERSION:
            raise RecordError(f"the state record has version {body['v']}; this operator reads version {VERSION}")
        restarts, retries, failures, best = body["budget"]
        window, settled, resized, recovered, incident, started, ended = (_time(t) for t in body["times"])
        outcome = body.get("outcome", ["", "", ""])
        return Record(
            generation=int(body["generation"]),
            members=_pods(body["members"]),
            master_addr=str(body["master"]),
            transition=_transition(body["transition"]) if "transition" in body else None,
            lost=_pods(body["lost"]),
            incarnations={pod.slot: pod.incarnation for pod in _pods(body["incarnations"])},
            window_since=window, settled_at=settled, resized_at=resized, recovered_at=recovered, incident_at=incident,
            started_at=started, ended_at=ended,
            restarts=int(restarts), retries=int(retries), failures_in_row=int(failures), best_step=int(best),
            outcome=str(outcome[0]), outcome_reason=str(outcome[1]), outcome_message=str(outcome[2]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"the state record cannot be read: {type(error).__name__}: {error}") from error


def encode_history(entries: tuple[HistoryEntry, ...]) -> str:
    """Give the text of the history annotation, the newest MAX_HISTORY entries."""
    return json.dumps(
        [
            {
                "generation": e.generation, "from": e.from_size, "to": e.to_size, "kind": e.kind.value, "cause": e.cause,
                "at": _stamp(e.at), "detected_at": _stamp(e.detected_at), "running_at": _stamp(e.running_at),
            }
            for e in entries[-MAX_HISTORY:]
        ],
        separators=(",", ":"),
    )  # fmt: skip


def decode_history(text: str) -> tuple[HistoryEntry, ...]:
    """Read a history annotation; a damaged one counts as empty, for nothing is decided by it."""
    try:
        return tuple(
            HistoryEntry(
                generation=int(e["generation"]), from_size=int(e["from"]), to_size=int(e["to"]), kind=Kind(e["kind"]),
                cause=str(e["cause"]), at=_sure(e["at"]), detected_at=_sure(e["detected_at"]),
                running_at=_time(e["running_at"]),
            )
            for e in json.loads(text)
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return ()


def mark_running(entries: tuple[HistoryEntry, ...], generation: int, at: datetime) -> tuple[HistoryEntry, ...]:
    """Note when all agents of a generation answered RUNNING."""
    return tuple(
        replace(e, running_at=at) if e.generation == generation and e.running_at is None else e for e in entries
    )


def _runs(pods: tuple[PodId, ...] | list[PodId]) -> list[list[str]]:
    """Write pods in their order: for each stretch of one spec its name and runs such as `0-6,7.2,9-12` (7.2: incarnation 2)."""
    stretches: list[tuple[str, list[list[int]]]] = []
    for before, pod in pairwise((None, *pods)):
        assert pod is not None
        if before is None or before.spec != pod.spec:
            stretches.append((pod.spec, []))
        runs = stretches[-1][1]
        if runs and (runs[-1][1] + 1, runs[-1][2]) == (pod.ordinal, pod.incarnation):
            runs[-1][1] = pod.ordinal
        else:
            runs.append([pod.ordinal, pod.ordinal, pod.incarnation])
    return [[spec, ",".join(_run(*run) for run in runs)] for spec, runs in stretches]


def _run(first: int, last: int, incarnation: int) -> str:
    ordinals = str(first) if first == last else f"{first}-{last}"
    return f"{ordinals}.{incarnation}" if incarnation else ordinals


def _pods(stretches: list[list[str]]) -> tuple[PodId, ...]:
    pods: list[PodId] = []
    for spec, runs in stretches:
        for run in runs.split(","):
            ordinals, _, incarnation = run.partition(".")
            first, _, last = ordinals.partition("-")
            if int(last or first) - int(first) >= MAX_REPLICAS:
                raise RecordError(f"{run} is no run of pods")
            numbers = range(int(first), int(last or first) + 1)
            pods += (PodId(str(spec), ordinal, int(incarnation or 0)) for ordinal in numbers)
    return tuple(pods)


def _transition(values: list[Any]) -> Transition:
    kind, cause, message, from_size, goal, began, detected, deadline, graceful, not_before, counted = values
    return Transition(
        kind=Kind(kind), cause=str(cause), message=str(message), from_size=int(from_size), goal=int(goal),
        began_at=_sure(began), detected_at=_sure(detected), deadline=_sure(deadline), graceful=bool(graceful),
        not_before=_time(not_before), counted=bool(counted),
    )  # fmt: skip


def _stamp(at: datetime | None) -> str | None:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def _sure(text: str | None) -> datetime:
    at = _time(text)
    if at is None:
        raise RecordError("a time is missing")
    return at
