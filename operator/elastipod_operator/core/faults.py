"""Faults: what broke, which replicas it hit, and whether it counts against the restart budgets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from .names import PodId
from .next_generation import has_begun_next
from .quoted_output import quote_output
from .reasons import AnyReason, Reason, ReasonAndMessage, as_reason
from .record import FaultyReplica, Record
from .replica import Health, Replica, Replicas
from .silence import HEARTBEAT, SILENCE_LIMIT
from .snapshot import AgentState

# Workers that do not report steps are taken to have made progress after this time.
PROOF_OF_LIFE = timedelta(seconds=60)
# Time for a hard stop; after that the operator repeats it and gives the pod up (stopping.HARD_STOP_AFTER, GIVE_UP_AFTER).
STOP_TIME = timedelta(seconds=30)
# An agent reports RUNNING as soon as it accepts a /start, which is repeated every few seconds.
START_LIMIT = timedelta(seconds=60)
STARTS_TRIED = 3
# An agent answers within milliseconds. An operator that has just taken over waits this long for it before it decides without it.
FIRST_ANSWER = HEARTBEAT
AGENT_RESTARTED = Reason.AGENT_RESTARTED
# Only this many replicas of one fault are recorded.
MAX_FAULTY_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, however many pods it hit. uses_budget: it counts against the restart budgets (worker and log-rule faults).

    faulty_replicas: the replicas on which it began, at most MAX_FAULTY_REPLICAS.
    """

    cause: AnyReason
    message: str
    uses_budget: bool
    lost: tuple[PodId, ...] = ()
    faulty_replicas: tuple[FaultyReplica, ...] = ()


def find_fault(record: Record, replicas: Replicas) -> Fault | None:
    """Find what ended the present generation; None while nothing did.

    A lost pod or node is the root cause even if workers of other pods failed too. During a drain a missing member does no harm
    once any member has reached the checkpoint, because all members reach it together.
    """
    draining = record.transition is not None
    missing = _missing(record, replicas)
    trained = [r for m in record.members if (r := replicas.get(m)) is not None]
    if missing and not (draining and any(_drained(r, record) or _is_unknown(r) for r in trained)):
        return missing
    faulted = [
        (rank, r)
        for rank, m in enumerate(record.members)
        if (r := replicas.get(m)) is not None
        and r.health in (Health.GOOD, Health.DISRUPTED)
        and (r.agent.state is AgentState.FAULTED or (draining and r.failed_draining))
        and r.runs(record.generation)
    ]
    if faulted:
        return _worker_fault(record, faulted)
    if draining:
        return None
    return _generation_mismatch(trained, record, replicas) or _start_not_taken(trained, record, replicas.now)


def first_answers_due(record: Record, replicas: Replicas, fault: Fault | None = None) -> datetime | None:
    """Give when to stop waiting for members that have never answered this operator; None if there is nothing to wait for.

    Their agents know what the workers keep in memory, which decides the depth of a change. fault: its lost replicas are not
    waited for.
    """
    lost = frozenset(fault.lost) if fault is not None else frozenset()
    unheard = (r for m in record.members if m not in lost and (r := replicas.get(m)) is not None and _is_unknown(r))
    due = max((r.agent.trying_since + FIRST_ANSWER for r in unheard if r.agent.trying_since is not None), default=None)
    return due if due is not None and replicas.now is not None and due > replicas.now else None


def _drained(replica: Replica, record: Record) -> bool:
    """Whether its workers ended at the checkpoint. An agent that does not report a generation is believed once it is idle."""
    if has_begun_next(replica, record):
        return True
    if not replica.is_idle or not replica.runs(record.generation):
        return False
    return replica.agent.drained or replica.agent.generation is None


def _is_unknown(replica: Replica) -> bool:
    """Whether an agent has not answered this operator yet, but still may."""
    return replica.agent.state is None and replica.health in (Health.PENDING, Health.DISRUPTED)


def _missing(record: Record, replicas: Replicas) -> Fault | None:
    missing = [m for m in record.members if replicas.get(m) is None]
    there = [r for m in record.members if (r := replicas.get(m)) is not None]
    lost = [r for r in there if r.health is Health.LOST]
    ended = [r for r in there if r.has_no_workers and not r.finished(record.generation)]
    hit = lost or ended
    if hit:
        # A failure from outside is the root cause, even if other pods ended by themselves because of it.
        first = next((r for r in hit if not r.ended_by_itself), hit[0])
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        faulty_replicas = _culprits(record, *(r.id for r in hit), replicas=replicas)
        uses_budget = all(r.ended_by_itself for r in hit)
        return Fault(first.cause, first.detail + more, uses_budget, tuple(r.id for r in lost), faulty_replicas)
    if missing:
        return Fault(Reason.POD_LOST, gone_text(missing[0]), False, (), _culprits(record, *missing, replicas=replicas))
    return None


def _culprits(record: Record, *pods: PodId, replicas: Replicas) -> tuple[FaultyReplica, ...]:
    ranks = {member: rank for rank, member in enumerate(record.members)}
    found = ((pod, replicas.get(pod)) for pod in pods[:MAX_FAULTY_REPLICAS])
    return tuple(FaultyReplica(pod, ranks.get(pod, -1), r.pod.node if r is not None else "") for pod, r in found)


def gone_text(member: PodId) -> str:
    return f"pod {member.spec}-{member.ordinal} (incarnation {member.incarnation}) is gone"


def _worker_fault(record: Record, faulted: list[tuple[int, Replica]]) -> Fault:
    taken = next((r for _, r in faulted if is_port_taken(r, record)), None)
    if taken is not None:
        return Fault(Reason.MASTER_PORT_TAKEN, first_line(taken.agent.message), uses_budget=False)
    group_rank, replica = next(
        ((rank, r) for rank, r in faulted if r.agent.failure is not None and r.agent.failure.signal != "SIGTERM"),
        faulted[0],
    )
    agent = replica.agent
    text = failure_text(replica) or quote_output(agent.message)
    rule = _log_rule(agent.reason)
    if rule and rule not in text:
        text = f"log rule {rule}: {text}" if text else f"log rule {rule} found it"
    text = text or agent.reason
    culprit = FaultyReplica(replica.id, group_rank, replica.pod.node)
    message = f"group rank {group_rank} (pod {replica.pod.name}): {text}"
    return Fault(
        as_reason(_valid_reason(agent.reason) or Reason.WORKER_FAULT),
        message,
        uses_budget=True,
        faulty_replicas=(culprit,),
    )


def is_port_taken(replica: Replica, record: Record) -> bool:
    """Whether another process held the port that global rank 0 needed; the next generation uses another port."""
    return replica.agent.message.startswith("EADDRINUSE") and replica.runs(record.generation)


def first_line(message: str) -> str:
    """Give the agent's own sentence; the output of its workers follows on further lines."""
    return message.partition("\n")[0]


def _log_rule(reason: str) -> str:
    """Give the name of the log rule that found a fault (LogHang_<rule>, ...); empty for other reasons."""
    kind, _, rule = reason.partition("_")
    return rule if kind in ("LogHang", "LogSlow", "LogFault") else ""


def _valid_reason(text: str) -> str:
    """Make a valid reason for conditions and Events: the agent's reason may contain the name that a user gave to a log rule."""
    return re.sub(r"[^A-Za-z0-9_]", "_", text).strip("_")


def failure_text(replica: Replica) -> str:
    """Say how the first failing rank of a pod ended, in one sentence; empty when its agent does not report it."""
    failure = replica.agent.failure
    if failure is None:
        return ""
    if failure.global_rank < 0:
        return quote_output(failure.message.strip()[:300])
    how = f"was killed by {failure.signal}" if failure.signal else f"exited with code {failure.exitcode}"
    lines = [line.strip() for line in failure.message.splitlines() if line.strip()]
    if not lines:
        return f"rank {failure.global_rank} {how}"
    if lines[-1].startswith(f"rank {failure.global_rank} "):
        # The agent's own sentence; an error that the worker printed follows the colon.
        sentence, _, words = lines[-1][:300].partition(": ")
        return f"{sentence}: {quote_output(words)}" if words else sentence
    return f"rank {failure.global_rank} {how}: {quote_output(lines[-1][:300])}"


def _generation_mismatch(members: list[Replica], record: Record, replicas: Replicas) -> Fault | None:
    for replica in members:
        agent = replica.agent
        if agent.generation is None or replica.health not in (Health.GOOD, Health.DISRUPTED):
            continue
        name = replica.pod.name
        if agent.generation > record.generation:
            message = f"the agent of pod {name} runs generation {agent.generation}, the record says {record.generation}"
            return Fault(Reason.RECORD_BEHIND, message, uses_budget=False)
        if agent_restarted(replica, record):
            cause, message = unprovoked_end(replica, record) or (AGENT_RESTARTED, "")
            return Fault(cause, message, True, faulty_replicas=_culprits(record, replica.id, replicas=replicas))
        stopped = agent.state in (AgentState.READY, AgentState.SHUTDOWN) and not agent.drained
        if agent.generation == record.generation and stopped:
            return Fault(Reason.WORKERS_STOPPED, f"another client stopped the workers of pod {name}", uses_budget=False)
    return None


def agent_restarted(replica: Replica, record: Record) -> bool:
    """Whether an agent that ran this generation has restarted. Answers from before it ran the generation do not count."""
    agent = replica.agent
    if agent.state not in (AgentState.INIT, AgentState.READY) or agent.generation != 0 or not record.generation:
        return False
    return (
        record.running_since is not None
        and agent.last_answer is not None
        and agent.last_answer >= answers_count_from(record)
    )


def unprovoked_end(replica: Replica, record: Record) -> ReasonAndMessage | None:
    """Give the cause and message if an agent or its container ended without a cause from outside; else None."""
    if replica.ended_by_itself and not replica.finished(record.generation):
        return replica.cause, replica.detail
    if agent_restarted(replica, record):
        what = f"has restarted and knows nothing of generation {record.generation}: its process had ended"
        return AGENT_RESTARTED, f"the agent of pod {replica.pod.name} {what}"
    return None


def answers_count_from(record: Record) -> datetime:
    """Give the time from which an agent's answer is certain to be later than RUNNING of all agents."""
    assert record.running_since is not None
    return record.running_since + SILENCE_LIMIT


def _start_not_taken(members: list[Replica], record: Record, now: datetime | None) -> Fault | None:
    """Find agents that answer but have not accepted the /start, while the other members wait for them.

    If no agent accepted it, the calls of this operator may not arrive: then further generations are tried before pods are given up.
    """
    if record.generation_began_at is None or record.running_since is not None or now is None:
        return None
    late = [r for r in members if (limit := start_limit(r, record)) is not None and now >= limit]
    if not late:
        return None
    is_running = any(r.agent.state is AgentState.RUNNING and r.runs(record.generation) for r in members)
    more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    message = (
        f"the agent of pod {late[0].pod.name}{more} answers, but did not start the workers of generation {record.generation} "
        f"within {START_LIMIT.total_seconds():g} s"
    )
    is_hopeless = is_running or record.consecutive_failures >= STARTS_TRIED
    # The recovery stops agents that are still STOPPING hard before it gives them up.
    lost = tuple(r.id for r in late if r.ready) if is_hopeless else ()
    return Fault(Reason.START_NOT_TAKEN, message, uses_budget=False, lost=lost)


def start_limit(replica: Replica, record: Record) -> datetime | None:
    """Give when an agent that answers must have accepted the /start; None if it has, or need not."""
    agent = replica.agent
    is_stopping = replica.health is Health.GOOD and agent.state is AgentState.STOPPING and agent.generation is not None
    is_older = (agent.generation or 0) < record.generation
    if (
        not (replica.ready or is_stopping)
        or not is_older
        or record.generation_began_at is None
        or agent.answering_since is None
    ):
        return None
    return max(agent.answering_since, record.generation_began_at) + START_LIMIT
