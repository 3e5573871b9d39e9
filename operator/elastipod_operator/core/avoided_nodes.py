"""Nodes that new pods avoid: for a while those with repeated faults (maxNumRepeatOffendersToAvoid), and those that announce trouble."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import JobEvent
from .context import Context
from .reasons import Reason
from .record import NodeFaults, Record
from .snapshot import Policy

# A node with this many faults is a repeat offender.
REPEATED = 2
# Only the faults of this many nodes are recorded; the record has no room for more.
MAX_KEPT = 32
# How long pods that are needed for the minimum size wait for other nodes than those of repeat offenders: an autoscaler needs
# minutes to bring one.
AVOIDED_IN_VAIN = timedelta(minutes=5)
# How long one of them has to be without a node by then. Pods of a partial gang are recreated meanwhile, which gives back their nodes.
UNPLACED_FOR = timedelta(seconds=60)
# So many nodes are avoided for what they announce; each is a requirement in the affinity of a pod.
MAX_CLOSED = 100


def count_node_fault(record: Record, policy: Policy, now: datetime) -> tuple[Record, tuple[JobEvent, ...]]:
    """Count a worker fault or a lost node against the nodes on which it began. Actions of users and queues do not count."""
    transition = record.transition
    assert transition is not None
    if not policy.max_offenders or not (transition.uses_budget or transition.cause == Reason.NODE_LOST):
        return record, ()
    before = avoided(record, policy, now)
    known = {o.node: o for o in _current(record, policy, now)}
    for node in {c.node for c in record.faulty_replicas if c.node}:
        times = known[node].times + 1 if node in known else 1
        known[node] = NodeFaults(node, times, now)
    newest = sorted(known.values(), key=lambda o: (o.at, o.node))[-MAX_KEPT:]
    booked = replace(record, node_faults=tuple(newest))
    fresh = [node for node in avoided(booked, policy, now) if node not in before]
    return booked, tuple(_note(node, booked, policy) for node in fresh)


def _note(node: str, record: Record, policy: Policy) -> JobEvent:
    times = next(o.times for o in record.node_faults if o.node == node)
    text = f"node {node} had {times} faults; new pods avoid it for {policy.eval_period.total_seconds():g} s"
    return JobEvent(Reason.NODE_AVOIDED, text)


def avoided(record: Record, policy: Policy, now: datetime) -> tuple[str, ...]:
    """Give the repeat offenders: the latest ones, as many as the user allows."""
    if not policy.max_offenders:
        return ()
    repeated = [o for o in _current(record, policy, now) if o.times >= REPEATED]
    latest = sorted(repeated, key=lambda o: (o.at, o.node))[-min(policy.max_offenders, MAX_KEPT) :]
    return tuple(sorted(o.node for o in latest))


def nodes_to_avoid(record: Record, context: Context) -> tuple[str, ...]:
    """Give the nodes that new pods must not be placed on, of which the scheduler does not know, in the order of their names.

    A pod that got one of them would have to leave at once, and so would the next one.
    """
    closed = sorted(context.snapshot.closed_nodes)[:MAX_CLOSED]
    return tuple(sorted({*avoided(record, context.policy, context.now), *closed}))


def use_again(record: Record, context: Context) -> tuple[Record, tuple[JobEvent, ...], datetime | None]:
    """Use repeat offenders until their next fault where too few other nodes have room for the minimum size.

    To wait longer would be worse than another fault. Gives the record, what is told, and when that is due.
    """
    offenders = avoided(record, context.policy, context.now)
    waiting = [r.pod.created_at for r in context.replicas.newest.values() if r.may_train and not r.pod.node]
    if not offenders or not waiting or record.transition is None:
        return record, (), None
    due = max(record.transition.began_at + AVOIDED_IN_VAIN, min(waiting) + UNPLACED_FOR)
    if context.now < due:
        expires_at = next_fault_expiry(record, context.policy, context.now)
        return record, (), due if expires_at is None else min(due, expires_at)
    what = "nodes with repeated faults are used until their next fault"
    text = f"too few nodes but {', '.join(offenders)} had room for the minimum size: {what}"
    on_probation = tuple(replace(one, times=min(one.times, REPEATED - 1)) for one in record.node_faults)
    return replace(record, node_faults=on_probation), (JobEvent(Reason.NODE_USED_AGAIN, text),), None


def drop_expired_faults(record: Record, policy: Policy, now: datetime) -> Record:
    """Drop node_faults that are older than the evaluation period."""
    current = _current(record, policy, now) if policy.max_offenders else ()
    return record if len(current) == len(record.node_faults) else replace(record, node_faults=tuple(current))


def next_fault_expiry(record: Record, policy: Policy, now: datetime) -> datetime | None:
    """Give when the next node fault expires."""
    ends = (o.at + policy.eval_period for o in record.node_faults)
    return min((at for at in ends if at > now), default=None)


def _current(record: Record, policy: Policy, now: datetime) -> list[NodeFaults]:
    return [o for o in record.node_faults if now < o.at + policy.eval_period]
