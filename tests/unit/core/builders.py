"""Builders of what the core observes: short to write, with the usual values filled in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from elastipod_operator.core.actions import Plan
from elastipod_operator.core.context import Context
from elastipod_operator.core.grant import Grant, grant_all
from elastipod_operator.core.health import assess
from elastipod_operator.core.names import PodId
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import SUSPENDED_BY_USER, Record, Transition, TransitionKind
from elastipod_operator.core.replica import Replicas
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import (
    AgentState,
    Failure,
    ObservedAgent,
    ObservedJob,
    ObservedNode,
    ObservedPod,
    Policy,
    Snapshot,
    SpecLimits,
)

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
LONG_AGO = NOW - timedelta(hours=1)
# A pod, and its agent if it has answered.
Seen = tuple[ObservedPod, ObservedAgent | None]


def seconds(number: float) -> timedelta:
    """Give a duration."""
    return timedelta(seconds=number)


def pid(ordinal: int, incarnation: int = 0, spec: str = "workers") -> PodId:
    """Give a pod's identity."""
    return PodId(spec, ordinal, incarnation)


def policy(low: int = 2, high: int = 4, **changes: Any) -> Policy:
    """Give an elastic policy over one spec, sizes `low` to `high`."""
    base = Policy(
        sizes=Sizes(tuple(range(low, high + 1)), low), specs=(SpecLimits("workers", high),),
        scaling_timeout=seconds(60), graceful_timeout=seconds(600), faulty_timeout=seconds(30),
        backoff_base=seconds(10), backoff_max=seconds(300),
    )  # fmt: skip
    return replace(base, **changes)


def pod(identity: PodId | int, **changes: Any) -> ObservedPod:
    """Give a pod that runs on a node of its own."""
    identity = pid(identity) if isinstance(identity, int) else identity
    name = identity.name("job")
    base = ObservedPod(
        id=identity, name=name, uid=f"uid-{name}", created_at=LONG_AGO, phase="Running", ip=f"10.0.0.{identity.ordinal}",
        node=f"node-{identity.ordinal}", started=True,
    )  # fmt: skip
    return replace(base, **changes)


def agent(state: AgentState | None = AgentState.RUNNING, generation: int | None = 1, **changes: Any) -> ObservedAgent:
    """Give an agent that answered a second ago."""
    base = ObservedAgent(
        state=state,
        generation=generation,
        trying_since=LONG_AGO,
        last_answer=NOW - seconds(1) if state else None,
        answering_since=LONG_AGO if state else None,
    )
    return replace(base, **changes)


def silent(for_s: float = 20.0, **changes: Any) -> ObservedAgent:
    """Give an agent that answered last so long ago."""
    return agent(last_answer=NOW - seconds(for_s), **changes)


def missed(for_s: float = 20.0, **changes: Any) -> ObservedAgent:
    """Give a silent agent that other agents of the job cannot reach either."""
    return silent(for_s, is_reached=False, peers_asked_at=NOW - timedelta(seconds=1), **changes)


def faulted(generation: int = 1, message: str = "ValueError: boom", **changes: Any) -> ObservedAgent:
    """Give an agent whose workers failed."""
    failure = Failure(0, 1, "", f"Traceback ...\n{message}")
    return agent(AgentState.FAULTED, generation, reason="WorkerCrash", failure=failure, **changes)


def ready(generation: int | None = 0, **changes: Any) -> ObservedAgent:
    """Give an agent that waits for a /start."""
    return agent(AgentState.READY, generation, **changes)


def running(generation: int = 1, **changes: Any) -> ObservedAgent:
    """Give an agent whose workers run."""
    return agent(AgentState.RUNNING, generation, **changes)


def trains(size: int = 2, generation: int = 1, **changes: Any) -> Record:
    """Give the record of a job that has trained for an hour."""
    base = Record(
        generation=generation, members=tuple(pid(n) for n in range(size)), master_addr="10.0.0.0", running_since=LONG_AGO,
        started_at=LONG_AGO,
    )  # fmt: skip
    return replace(base, **changes)


def transition(
    kind: TransitionKind = TransitionKind.RESIZE, *, began_s: float = 5.0, target_size: int = 2, **changes: Any
) -> Transition:
    """Give a transition that began some seconds ago, with its time for checkpoints left."""
    began = NOW - seconds(began_s)
    graceful = kind in (TransitionKind.RESIZE, TransitionKind.SUSPEND)
    cause = SUSPENDED_BY_USER if kind is TransitionKind.SUSPEND else OpenReason("Test")
    base = Transition(
        kind=kind, cause=cause, message="a test", from_size=2, target_size=target_size, began_at=began, detected_at=began,
        deadline=began + seconds(600 if graceful else 30), graceful=graceful,
    )  # fmt: skip
    return replace(base, **changes)


def job(record: Record | None = None, wishes: Policy | None = None, **changes: Any) -> ObservedJob:
    """Give the job."""
    base = ObservedJob(
        namespace="team", name="job", uid="job-uid", created_at=LONG_AGO, policy=wishes or policy(), record=record,
        has_finalizer=True,
    )  # fmt: skip
    return replace(base, **changes)


def observed(
    job: ObservedJob,
    pods: Iterable[tuple[ObservedPod, ObservedAgent | None]] = (),
    nodes: Iterable[ObservedNode] = (),
    **changes: Any,
) -> Snapshot:
    """Give an observation; nodes that are not named are healthy."""
    pairs = list(pods)
    found = {p.node: ObservedNode(name=p.node) for p, _ in pairs if p.node} | {n.name: n for n in nodes}
    base = Snapshot(
        now=NOW, job=job, pods=tuple(p for p, _ in pairs), agents={p.name: a for p, a in pairs if a is not None},
        nodes=found,
    )  # fmt: skip
    return replace(base, **changes)


def replicas_of(record: Record, *pods: Seen, nodes: Iterable[Any] = ()) -> Replicas:
    """Give what is known of the replicas of a job with this record."""
    return assess(observed(job(record), pods, nodes))


def granted(snapshot: Snapshot) -> Grant | None:
    """Give the grant of a job without a queue: all that the user requested."""
    return grant_all(snapshot.job.policy) if snapshot.job.policy is not None else None


def context(snapshot: Snapshot, replicas: Replicas | None = None, **grants: Any) -> Context:
    """Give what policies read; `grants` differ from what the user requested."""
    requested = snapshot.job.policy
    assert requested is not None
    grant = replace(grant_all(requested), **grants)
    found = assess(snapshot, grant.quota_lost) if replicas is None else replicas
    return Context(snapshot, requested, found, grant)


def acts(plan: Plan, kind: type) -> list[Any]:
    """Give a plan's actions of one kind."""
    return [action for action in plan.actions if isinstance(action, kind)]
