"""The part of a pod's log that shows the first failure. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastipod_operator.core.quoted_output import OPEN
from elastipod_operator.kube.reading import Body, mapping, mappings, name_of, text

from .situation import JobFacts

# The agent begins the lines of workers with their local rank.
PREFIX = re.compile(r"^\[[\w-]*?(\d+)\]:\s?")
# Those within an exception group are its parts, and have a "|" in front.
TRACEBACK = re.compile(r"^[^|]*Traceback \(most recent call last\)")
CHAINED = ("the direct cause of the following exception", "another exception occurred:")
# The agent says so before the workers of a generation write.
STARTS = re.compile(r"^hyperpodrun: \S+ INFO starting workers\b(?:.* nproc=(\d+))?")
MAX_LINES = 80
# Group ranks count pods. What a script printed is quoted, and may name other ranks.
RANK = re.compile(r"(?<!group )\brank (\d+) ")


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """Where the newest fault began. pod: empty if unknown. rank: global. message: what the operator says about it; may be empty."""

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
    named = RANK.search(message.partition(OPEN)[0])
    return FirstFailure(pods[0] if pods else "", int(named[1]) if named else None, message)


def excerpt(log: str, local_rank: int | None = None) -> list[str]:
    """Give the lines of the newest failure of a log from its first traceback on; else the last lines.

    local_rank: whose failure it is; if it is None or has no traceback, that of the rank that failed first. All lines are of one
    rank. A traceback ends with the first line of its rank that is not indented, which names the exception, and what follows it.
    """
    lines = log.removesuffix("\n").split("\n")  # not at \r, which progress bars print
    newest = _newest(lines, _failures(lines))
    if not newest:
        return lines[-MAX_LINES // 2 :]
    start = newest.get(str(local_rank), min(newest.values()))
    rank = _rank(lines[start])
    return [line for line in lines[start:] if _rank(line) == rank][:MAX_LINES]


def has_failure(log: str) -> bool:
    """Whether a log shows the traceback of a worker."""
    return bool(_failures(log.split("\n")))


def workers_in(log: str) -> int | None:
    """Give how many workers a pod had in its newest generation; None if its log does not say."""
    starts = [int(found[1]) for line in log.splitlines() if (found := STARTS.match(line)) and found[1]]
    return starts[-1] if starts else None


def _failures(lines: Sequence[str]) -> list[int]:
    """Give where each failure begins: at a traceback, of several that are chained at the first, which shows the cause."""
    found = []
    told: dict[str, str] = {}  # the last line of each rank that says something
    for at, line in enumerate(lines):
        rank = _rank(line)
        if TRACEBACK.match(line) and not any(words in told.get(rank, "") for words in CHAINED):
            found.append(at)
        if line[len(prefix[0]) if (prefix := PREFIX.match(line)) else 0 :].strip():
            told[rank] = line
    return found


def _newest(lines: Sequence[str], failures: Sequence[int]) -> dict[str, int]:
    """Give where the failure of each rank begins that failed in the last generation with a failure."""
    starts = [at for at, line in enumerate(lines) if failures and at < failures[-1] and STARTS.match(line)]
    found: dict[str, int] = {}
    for at in reversed(failures):
        rank = _rank(lines[at])
        if starts and at > starts[-1]:
            found.setdefault(rank, at)  # the last traceback of a rank is the one that ended it
        elif starts or rank in found:
            break  # without words of the agent: a rank that fails again does so in a later generation
        else:
            found[rank] = at
    return found


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
