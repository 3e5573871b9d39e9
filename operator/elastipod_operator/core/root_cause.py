"""Correct the root cause of a recovery as more becomes known."""

from __future__ import annotations

from dataclasses import replace

from .faults import AGENT_RESTARTED, first_line, gone_text, is_port_taken, unprovoked_end
from .names import PodId
from .reasons import AnyReason, Reason
from .record import FaultyReplica, Record, TransitionKind
from .recovery import uncounted
from .replica import CONTAINER_RESTARTED, POD_FAILED, Health, Replica
from .silence import AGENT_ENDED

OWN_ENDS = frozenset({POD_FAILED, AGENT_ENDED, CONTAINER_RESTARTED, AGENT_RESTARTED})


def attribute_to_own_end(record: Record, member: PodId, replica: Replica | None) -> Record:
    """Make an agent that ended by itself the root cause of the failures of other workers; the cost stays the same."""
    transition = record.transition
    if replica is None or transition is None or transition.kind is not TransitionKind.RECOVERY:
        return record
    end = unprovoked_end(replica, record)
    if end is None or not transition.uses_budget or transition.is_budget_checked or transition.cause in OWN_ENDS:
        return record
    cause, message = end
    blamed = replace(transition, cause=cause, message=message)
    culprit = _culprit(record, member, replica)
    return replace(record, transition=blamed, faulty_replicas=(culprit,), failed_in_place=(member,))


def attribute_to_outside(record: Record, member: PodId, replica: Replica | None) -> Record:
    """Make a lost node or a deleted pod the root cause of the workers' fault, and refund what it cost: no replica has failed."""
    transition = record.transition
    if (
        transition is None
        or transition.kind is not TransitionKind.RECOVERY
        or not transition.uses_budget
        or transition.is_budget_checked
    ):
        return record
    if transition.cause in OWN_ENDS and member in (culprit.pod for culprit in record.faulty_replicas):
        return record  # its later loss says nothing new
    cause: AnyReason
    if replica is None:
        cause, message = Reason.POD_LOST, gone_text(member)
    elif replica.health is Health.LOST and not replica.ended_by_itself:
        cause, message = replica.cause, replica.detail
    elif replica.health is Health.ENDED and not replica.ended_by_itself:
        cause, message = replica.cause if replica.cause != POD_FAILED else Reason.POD_LOST, replica.detail
    elif is_port_taken(replica, record):
        cause, message = Reason.MASTER_PORT_TAKEN, first_line(replica.agent.message)
    else:
        return record
    blamed = replace(transition, cause=cause, message=message, uses_budget=False)
    in_place = max(0, record.failures_in_place - 1)
    return replace(
        record, transition=blamed, retries=max(0, record.retries - 1), window=uncounted(record.window),
        stalled_recoveries=max(0, record.stalled_recoveries - 1), faults_without_step=max(0, record.faults_without_step - 1),
        faulty_replicas=(_culprit(record, member, replica),),
        failures_in_place=in_place, failed_in_place=record.failed_in_place if in_place else (),
    )  # fmt: skip


def _culprit(record: Record, member: PodId, replica: Replica | None) -> FaultyReplica:
    rank = record.members.index(member) if member in record.members else -1
    return FaultyReplica(member, rank, replica.pod.node if replica is not None else "")
