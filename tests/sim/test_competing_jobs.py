"""Two jobs that each hold half of what the other waits for: both get to train in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random

import pytest
from tests.unit.core import builders

from elastipod_operator.core.actions import CreatePod, DeletePod, StartWorkers
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod, Policy, Snapshot

LIMIT_S = 3600
# So long a job trains before it ends and makes room for the other.
TRAINING_S = 300
READY_AFTER = timedelta(seconds=3)


@dataclass
class Rival:
    """One of the jobs, its pods, and what became of it."""

    uid: str
    policy: Policy
    record: Record | None = None
    pods: dict[PodId, ObservedPod] = field(default_factory=dict)
    bound_at: dict[PodId, datetime] = field(default_factory=dict)
    started_at: datetime | None = None

    def look(self, now: datetime) -> None:
        """Decide and carry out."""
        job = builders.job(self.record, self.policy, uid=self.uid, name=self.uid)
        nodes = {p.node: ObservedNode(name=p.node) for p in self.pods.values() if p.node}
        agents = {p.name: self._agent(p, now) for p in self.pods.values() if p.node}
        todo = plan(Snapshot(now=now, job=job, pods=tuple(self.pods.values()), agents=agents, nodes=nodes))
        self.record = todo.record
        for action in todo.actions:
            if isinstance(action, CreatePod):
                name = action.pod.name(self.uid)
                self.pods[action.pod] = ObservedPod(id=action.pod, name=name, uid=name, created_at=now)
            elif isinstance(action, DeletePod):
                self.pods = {i: p for i, p in self.pods.items() if p.uid != action.uid}
            elif isinstance(action, StartWorkers) and self.started_at is None:
                self.started_at = now

    def _agent(self, pod: ObservedPod, now: datetime) -> ObservedAgent:
        if now - self.bound_at[pod.id] < READY_AFTER:
            return ObservedAgent(trying_since=now)
        at_work = self.record is not None and pod.id in self.record.members and self.record.transition is None
        state = AgentState.RUNNING if at_work else AgentState.READY
        generation = self.record.generation if at_work and self.record else 0
        return builders.agent(state, generation, last_answer=now)

    def bind(self, pod: ObservedPod, node: str, now: datetime) -> None:
        """The scheduler gives a pod its node."""
        placed = builders.pod(pod.id, name=pod.name, uid=pod.uid, node=node, created_at=pod.created_at)
        self.pods[pod.id], self.bound_at[pod.id] = placed, now


def schedule(rng: Random, rivals: list[Rival], nodes: int, now: datetime) -> None:
    """Give free nodes to pods in wait, whosever they are."""
    taken = {p.node for r in rivals for p in r.pods.values() if p.node}
    free = [f"node-{n}" for n in range(nodes) if f"node-{n}" not in taken]
    waiting = [(r, p) for r in rivals for p in r.pods.values() if not p.node]
    rng.shuffle(waiting)
    for (rival, pod), node in zip(waiting, free, strict=False):
        rival.bind(pod, node, now)


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        pytest.param((4, 4), 4, id="each needs all there is"),
        pytest.param((4, 4), 5, id="one more than one of them needs", marks=pytest.mark.slow),
        pytest.param((3, 5), 6, id="of different sizes", marks=pytest.mark.slow),
        pytest.param((3, 3, 3), 4, id="three of them"),
    ],
)
def test_all_get_their_turn(sizes: tuple[int, ...], nodes: int) -> None:
    for seed in range(2):
        rng, now = Random(seed), builders.NOW
        waiting = [Rival(f"job-{seed}-{n}", builders.policy(size, size)) for n, size in enumerate(sizes)]
        for _ in range(LIMIT_S):
            now += timedelta(seconds=1)
            for rival in waiting:
                rival.look(now)
            schedule(rng, waiting, nodes, now)
            ended = [r for r in waiting if r.started_at and now - r.started_at > timedelta(seconds=TRAINING_S)]
            waiting = [r for r in waiting if r not in ended]
            if not waiting:
                break
        assert not waiting, f"seed {seed}: {[r.uid for r in waiting]} never trained"
