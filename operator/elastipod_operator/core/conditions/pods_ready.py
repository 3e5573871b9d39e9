"""Condition PodsReady: what keeps a pod from training, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from ..context import Context
from ..pod_supply import replacement_due
from ..reasons import Reason
from ..record import Record
from ..replica import Health, Replica, Replicas
from ..slots import wanted_slots
from ..snapshot import NOT_CONSIDERED, ObservedPod, pod_agent_port
from ..time_order import earliest
from ..wording import counted
from .draft import ConditionDraft, time_of_day

# A kubelet retries after 10 to 15 s. A problem that outlasts two retries is unlikely to go away by itself.
PROBLEM_REPORTED_AFTER = timedelta(seconds=30)


TRANSIENT_PROBLEMS = (Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_CANNOT_START, NOT_CONSIDERED)


def describe(record: Record, context: Context) -> tuple[ConditionDraft | None, datetime | None]:
    """Name what keeps a pod from training and how to fix it; gives too when a problem that may pass is to be reported."""
    snapshot, replicas, policy = context.snapshot, context.replicas, context.policy
    denied = _token_refused(replicas)
    if denied is not None:
        return denied, None
    if replicas.all_silent:
        text = "no agent answers the operator; training continues, and nothing is changed until an agent answers"
        return ConditionDraft("PodsReady", False, Reason.OPERATOR_CUT_OFF, text + _replaced_at(replicas)), None
    if snapshot.pod_creation_error:
        return ConditionDraft("PodsReady", False, Reason.PODS_REFUSED, snapshot.pod_creation_error), None
    reported = [c.reason for c in snapshot.job.conditions if c.type == "PodsReady"]
    scheduled = _newest_scheduling(replicas)
    wakes: list[datetime] = []
    for replica in sorted(replicas.newest.values(), key=lambda r: r.id):
        pod = replica.pod
        if pod.kill_at is not None:
            continue  # it was deleted on purpose, so how it ends is not a problem
        if replica.health is Health.PENDING and pod.started and replica.cause == Reason.AGENT_NOT_ANSWERING:
            text = (
                f"container {pod.agent_container} of pod {pod.name} runs, but nothing answers on port "
                f"{pod_agent_port(pod, policy)}: start the training with hyperpodrun, or set spec.elastipod.agentPort to the port it serves"
            )
            return ConditionDraft("PodsReady", False, Reason.AGENT_NOT_ANSWERING, text), earliest(*wakes)
        if replica.health is Health.SILENT and replica.presumed_lost_at is not None:
            text = f"{replica.detail}; unless it answers, it is replaced at {time_of_day(replica.presumed_lost_at)}"
            return ConditionDraft("PodsReady", False, Reason.AGENT_SILENT, text), earliest(*wakes)
        if not pod.problem or pod.problem_reason == Reason.UNSCHEDULABLE:
            continue
        if replica.health in (Health.PENDING, Health.ENDED):
            due = _persists_from(pod, scheduled) if pod.problem_reason not in reported else None
            if due is None or snapshot.now >= due:
                text = pod.problem + _recreated_at(replica, record, context)
                return ConditionDraft("PodsReady", False, pod.problem_reason, text), earliest(*wakes)
            wakes.append(due)
    # Without a problem there is no condition: auxiliary conditions are never True while a job runs, because clients take the
    # last True one for its state, and False would alarm its readers.
    return None, earliest(*wakes)


def _replaced_at(replicas: Replicas) -> str:
    """Say when the replicas are replaced if all agents stay silent."""
    until = max((r.presumed_lost_at for r in replicas.by_id.values() if r.presumed_lost_at is not None), default=None)
    return f"; if none answers by {time_of_day(until)}, the replicas are replaced" if until is not None else ""


def _recreated_at(replica: Replica, record: Record, context: Context) -> str:
    """Say when a pod that has ended is replaced, while its replacement waits for the back-off."""
    due = replacement_due(replica, record, context.policy, is_member=replica.id in record.member_set)
    is_wanted = not context.grant.is_suspended and replica.id.slot in wanted_slots(
        context.grant, record, context.replicas
    )
    if replica.health is not Health.ENDED or due is None or due <= context.now or not is_wanted:
        return ""
    return f"; after repeated failures, its replacement waits until {time_of_day(due)}"


def _newest_scheduling(replicas: Replicas) -> dict[str, datetime]:
    """Give when a scheduler last considered a pod of each spec. Pods of one spec name the same scheduler."""
    newest: dict[str, datetime] = {}
    for replica in replicas.by_id.values():
        at, spec = replica.pod.considered_at, replica.id.spec
        if at is not None and (spec not in newest or newest[spec] < at):
            newest[spec] = at
    return newest


def _persists_from(pod: ObservedPod, scheduled: Mapping[str, datetime]) -> datetime | None:
    """Give when a pod's problem is reported; None: at once, because it does not pass or its start is unknown.

    scheduled: as of `_newest_scheduling`. A scheduler that has just considered another pod is only slow.
    """
    if pod.problem_reason not in TRANSIENT_PROBLEMS or pod.problem_since is None:
        return None
    since = pod.problem_since
    if pod.problem_reason == NOT_CONSIDERED:
        since = max(since, scheduled.get(pod.id.spec, since))
    return since + PROBLEM_REPORTED_AFTER


def _token_refused(replicas: Replicas) -> ConditionDraft | None:
    pods = sorted((r.pod for r in replicas.newest.values() if r.agent.authentication_failed), key=lambda pod: pod.id)
    if not pods:
        return None
    pod, others = pods[0], f" (and of {counted(len(pods) - 1, 'more pod')})" if len(pods) > 1 else ""
    text = f"the agent of pod {pod.name}{others} and the operator do not accept each other: "
    if pod.key_secret:
        text += (
            f"Secret {pod.key_secret} does not hold the key that the operator derives, because it or the operator's install "
            "key was changed, or something else answers at the pod's address; restore the old install key, or delete that "
            "Secret and the pod: both are recreated"
        )
    else:
        text += "it has a key that is not the operator's; remove ELASTIPOD_KEY and ELASTIPOD_TOKEN from the template"
    return ConditionDraft("PodsReady", False, Reason.TOKEN_REFUSED, text)
