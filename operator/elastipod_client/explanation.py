"""A plain answer to "why": what a job does, what it waits for, since when, and what to do. Pure: objects and a time in, text out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from elastipod_operator.core.names import ANNOTATION_CHECKPOINT, ANNOTATION_ETA, ANNOTATION_STEP_AT
from elastipod_operator.core.progress import read_step
from elastipod_operator.core.reasons import AnyReason, Reason, Severity
from elastipod_operator.core.record import TransitionKind
from elastipod_operator.core.record_codec import format_time
from elastipod_operator.kube.times import time_or

from .activity import activity
from .blocker import NOTHING, Blocker, sentence
from .condition_blockers import auxiliary_blockers, event_blockers, state_blocker
from .life import goodput_text, life_of
from .mentions import mentions
from .pod_blockers import NAMED, pod_blockers, pods_left
from .queue_blockers import queue_blockers, usage_text
from .situation import UNKNOWN, JobFacts, Situation, job_facts
from .spans import since_text, time_text

RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
QUEUE_WAITS = (Reason.QUEUED,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer in parts. text: all of it as one paragraph."""

    job: str
    does: str
    since: datetime | None
    blockers: tuple[Blocker, ...]
    progress: str
    last_change: str
    goodput: str
    unread: Mapping[str, str]
    now: datetime

    @property
    def needs_attention(self) -> bool:
        """Whether a person should act: something failed, or is wrong."""
        return any(blocker.severity is not Severity.INFO for blocker in self.blockers)

    @property
    def text(self) -> str:
        parts = [f"Job {self.job} {self.does}."]
        several = len(self.blockers) > 1
        for number, blocker in enumerate(self.blockers, start=1):
            parts.append(f"{f'({number}) ' if several else ''}{_blocker_text(blocker, self.now)}")
        if not self.needs_attention and not any(blocker.advice for blocker in self.blockers):
            parts.append(NOTHING)
        if self.progress:
            parts.append(f"{self.progress}.")
        if self.last_change:
            parts.append(f"{self.last_change}.")
        if self.goodput:
            parts.append(f"{self.goodput}.")
        if self.unread:
            unread = "; ".join(f"{kind}: {why}" for kind, why in sorted(self.unread.items()))
            parts.append(f"Not read, so there may be more: {unread}.")
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Give the parts for `-o json`; times in UTC, or null."""
        return {
            "job": self.job,
            "does": self.does,
            "since": format_time(self.since),
            "needsAttention": self.needs_attention,
            "blockers": [
                {
                    "reason": str(blocker.reason), "severity": blocker.severity.value, "where": blocker.where,
                    "message": blocker.message, "since": format_time(blocker.since), "toDo": blocker.advice,
                }
                for blocker in self.blockers
            ],
            "progress": self.progress,
            "lastChange": self.last_change,
            "goodput": self.goodput,
            "notRead": dict(self.unread),
            "text": self.text,
        }  # fmt: skip


def explain(situation: Situation) -> Explanation:
    """Explain a job."""
    job = job_facts(situation.job, situation.now)
    doing = activity(job, situation.now)
    does = doing.text
    if job.deleting_since is not None:
        left = pods_left(situation)
        does += f"; {left} still exist" if left else ""
    return Explanation(
        job=job.name,
        does=does,
        since=doing.since,
        blockers=tuple(_blockers(situation, job)),
        progress=_progress(job, situation.now),
        last_change=_last_change(job, situation.now),
        goodput=goodput_text(life_of(job, (), situation.now)),
        unread=situation.unread,
        now=situation.now,
    )


def _blockers(situation: Situation, job: JobFacts) -> Iterable[Blocker]:
    """Give every blocker once, the most urgent first. What a condition has said already is not said again."""
    state = state_blocker(job)
    found = [state] if state is not None else []
    found += auxiliary_blockers(job, situation.events)
    found += event_blockers(job, situation.events, situation.now)
    usage = usage_text(situation.cluster_queue)
    for blocker in (*queue_blockers(situation, job), *pod_blockers(situation, job)):
        if not _is_told(blocker, found):
            found.append(blocker)
    if usage and (at := next((n for n, one in enumerate(found) if one.reason in QUEUE_WAITS), None)) is not None:
        found[at] = _with_usage(found[at], usage)
    return sorted(_few_of_each(_without_repetition(found)), key=lambda blocker: RANK[blocker.severity])


def _is_told(blocker: Blocker, found: Iterable[Blocker]) -> bool:
    """Whether a blocker was found before: one with its message, or one of the operator that names the same object."""
    core = blocker.message.split(": ", 1)[-1]
    about = blocker.where.split(" ", 1)[-1]
    return any(
        mentions(one.message, core) or (one.reason == blocker.reason and mentions(one.message, about)) for one in found
    )


def _without_repetition(found: list[Blocker]) -> list[Blocker]:
    """Cut the ends of messages that are a blocker of their own, which has the advice too: "0 of 2 are ready: image x ..."."""
    messages = [blocker.message for blocker in found]
    cut = []
    for blocker in found:
        ends = [f": {message}" for message in messages if blocker.message.endswith(f": {message}")]
        if ends:
            blocker = replace(blocker, message=blocker.message.removesuffix(ends[0]), advice="")
        cut.append(blocker)
    return cut


def _few_of_each(found: Iterable[Blocker]) -> list[Blocker]:
    """Give the first blockers of each reason, and in one more where the others are: a zone may take hundreds of nodes with it."""
    by_reason: dict[AnyReason, list[Blocker]] = defaultdict(list)
    for one in found:
        by_reason[one.reason].append(one)
    few: list[Blocker] = []
    for alike in by_reason.values():
        few += alike[:NAMED]
        if others := alike[NAMED:]:
            times = [one.since for one in others if one.since is not None]
            places = f"{', '.join(one.where for one in others[:NAMED])}{' and others' if len(others) > NAMED else ''}"
            message = f"the same holds for {len(others)} more: {places}"
            few.append(replace(others[0], where=places, message=message, since=min(times, default=None), advice=""))
    return few


def _with_usage(blocker: Blocker, usage: str) -> Blocker:
    return replace(blocker, message=f"{blocker.message} ({usage})")


def _blocker_text(blocker: Blocker, now: datetime) -> str:
    since = since_text(blocker.since, now)
    # A message of the operator often ends with the advice; it is not said twice.
    advice = "" if sentence(blocker.advice).lower() in blocker.message.lower() else blocker.advice
    told = f"{blocker.reason}: {sentence(blocker.message)}{f', {since}' if since else ''}."
    return f"{told} To do: {_own_sentence(advice)}" if advice else told


def _own_sentence(advice: str) -> str:
    return advice[0].lower() + advice[1:] if advice[:1].isupper() and not advice[:2].isupper() else advice


def _progress(job: JobFacts, now: datetime) -> str:
    """Say how far the training is; empty if the workers report no steps."""
    made, total = read_step(job.annotations) or (None, None)
    at, eta = (time_or(job.annotations.get(name), UNKNOWN) for name in (ANNOTATION_STEP_AT, ANNOTATION_ETA))
    if made is None or job.record is None or at is UNKNOWN:
        return ""
    text = f"At {time_text(at, now)} it had made {made:,}{f' of {total:,}' if total else ''} steps"
    if eta is not UNKNOWN:
        text += f", and at that pace it ends at {time_text(eta, now)}"
    checkpoint = job.annotations.get(ANNOTATION_CHECKPOINT, "")
    return text + (f"; the newest durable checkpoint is of step {checkpoint}" if checkpoint.isdecimal() else "")


def _last_change(job: JobFacts, now: datetime) -> str:
    """Say what changed the generation last; empty for a job that has only started."""
    entry = job.history[-1] if job.history else None
    if entry is None or entry.kind is TransitionKind.START:
        return ""
    meaning = f" ({sentence(entry.cause.meaning.split('. ')[0])})" if isinstance(entry.cause, Reason) else ""
    size = f"{entry.from_size} → {entry.to_size} replicas" if entry.from_size != entry.to_size else "same size"
    return f"Last change: {entry.kind.value}, {size}, at {time_text(entry.at, now)}, cause {entry.cause}{meaning}"
