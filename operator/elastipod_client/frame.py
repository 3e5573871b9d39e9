"""One picture of `elastipod watch`: state and size, the explanation, and the pods. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from elastipod_operator.core.names import PodId, pod_id_of
from elastipod_operator.kube.reading import Body, labels_of, mapping, mappings, name_of, text
from elastipod_operator.kube.times import time_or

from .explanation import explain
from .life import life_of, sums_text
from .options import table
from .situation import JobFacts, Situation, job_facts
from .spans import span_text
from .terminal import printable

MAX_PODS = 24


def frame(situation: Situation, width: int) -> list[str]:
    """Give the lines to show."""
    job = job_facts(situation.job, situation.now)
    lines = [headline(job), ""]
    lines += wrap(printable(explain(situation).text), width, break_long_words=False, break_on_hyphens=False)
    lines += ["", *_pods(situation, job)]
    sums = sums_text(life_of(job, situation.events, situation.now))
    return lines + (["", *wrap(sums, width)] if sums else [])


def headline(job: JobFacts) -> str:
    """Give the first line: state and size."""
    state = job.state.type if job.state is not None else "not seen by an operator"
    return f"{job.name}   {state}   running {job.running}, target {job.target}, maximum {job.maximum}"


def has_ended(situation: Situation) -> str:
    """Give how the job ended: Completed or Failed; empty while it has not."""
    job = job_facts(situation.job, situation.now)
    return job.state.type if job.state is not None and job.has_ended else ""


def _pods(situation: Situation, job: JobFacts) -> list[str]:
    members: Sequence[PodId] = job.record.members if job.record is not None and job.record.transition is None else ()
    rank = {member: str(at) for at, member in enumerate(members)}
    rows = [
        (
            name_of(pod), rank.get(identity, "") if (identity := pod_id_of(labels_of(pod))) is not None else "",
            _state(pod), text(mapping(pod.get("spec")).get("nodeName")) or "none", _age(pod, situation),
        )
        for pod in situation.pods
    ]  # fmt: skip
    # Members first, in the order of their ranks.
    rows.sort(key=lambda row: (not row[1], int(row[1] or 0), row[0]))
    more = [f"and {len(rows) - MAX_PODS} more"] if len(rows) > MAX_PODS else []
    return [*table([("POD", "GROUP RANK", "STATE", "NODE", "AGE"), *rows[:MAX_PODS]]).splitlines(), *more]


def _state(pod: Body) -> str:
    if mapping(pod.get("metadata")).get("deletionTimestamp"):
        return "Terminating"
    status = mapping(pod.get("status"))
    for one in mappings(status.get("containerStatuses")):
        waiting = text(mapping(mapping(one.get("state")).get("waiting")).get("reason"))
        if waiting:
            return waiting
    return text(status.get("phase")) or "Pending"


def _age(pod: Body, situation: Situation) -> str:
    created = time_or(mapping(pod.get("metadata")).get("creationTimestamp"), situation.now)
    return span_text(situation.now - created)
