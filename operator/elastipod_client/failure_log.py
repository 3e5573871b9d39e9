"""The part of a pod's log that shows the first failure. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastipod_operator.kube.reading import Body, mapping, mappings, name_of, text

from .situation import JobFacts

# The agent begins the lines of workers with their local rank.
PREFIX = re.compile(r"^\[[\w-]*?(\d+)\]:\s?")
TRACEBACK = "Traceback (most recent call last)"
MAX_LINES = 80
RANK = re.compile(r"\brank (\d+) ")


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """Where the newest fault began. pod: empty if unknown. message: what the operator says about it; may be empty."""

    pod: str
    rank: int | None
    message: str


def first_failure(job: Body, facts: JobFacts) -> FirstFailure | None:
    """Give the first failing replica of the newest fault; None for a job without a fault."""
    faulty = mapping(mapping(job.get("status")).get("latestFaultyPodInstanceList"))
    pods = [one for one in faulty.get("faultyPodList") or () if isinstance(one, str)]
    state = facts.state
    message = state.message if state is not None and state.type in ("Failed", "Faulted") else ""
    if not pods and not message:
        return None
    named = RANK.search(message)
    return FirstFailure(pods[0] if pods else "", int(named[1]) if named else None, message)


def excerpt(log: str, local_rank: int | None = None) -> list[str]:
    """Give the newest traceback of a log, of one local rank if it has one; else the last lines.

    A traceback ends with the first line of its rank that is not indented, which names the exception, and what follows it.
    """
    lines = log.splitlines()
    starts = [at for at, line in enumerate(lines) if TRACEBACK in line]
    of_rank = [at for at in starts if local_rank is not None and _rank(lines[at]) == str(local_rank)]
    if not starts:
        return lines[-MAX_LINES // 2 :]
    start = (of_rank or starts)[-1]
    # An exception that was raised while another was handled belongs to the same failure.
    rank = _rank(lines[start])
    return [line for line in lines[start:] if _rank(line) == rank][:MAX_LINES]


def _rank(line: str) -> str:
    found = PREFIX.match(line)
    return found[1] if found else ""


def ended_first(pods: Sequence[Body]) -> str:
    """Give the pod whose container failed first; empty if none did. Pods of jobs that crash in place have restarted containers."""
    ends = [
        (text(ended.get("finishedAt")), name_of(pod))
        for pod in pods
        for status in mappings(mapping(pod.get("status")).get("containerStatuses"))
        for state in ("state", "lastState")
        if (ended := mapping(mapping(status.get(state)).get("terminated"))) and ended.get("exitCode")
    ]
    return min(ends)[1] if ends else ""
