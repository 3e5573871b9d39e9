"""A churn: elastic and fixed jobs of all priorities come and go in queues that lend to each other, on a real Kueue.

Workers crash, pods are deleted, users suspend, resume, scale and delete. One seed gives all choices; what they hit depends
on how far the cluster is by then. What happened is judged afterwards, by `quota_checker` and from the same history."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.api.churn_queues import CLASSES, QUEUES, _jobs_path
from tests.api.compat_nodes import PlayedNodes
from tests.api.etcd_history import Change, Client, Recorder
from tests.api.jobs import job
from tests.api.played_agent import NO_DATA
from tests.api.quota_checker import JOB, POD, WORKLOAD
from tests.api.quota_objects import holds_quota, lives
from tests.patience import PATIENCE_S

from elastipod_agent.core.states import AgentState
from elastipod_operator.core.history import HistoryEntry, decode_history
from elastipod_operator.core.names import ANNOTATION_HISTORY
from elastipod_operator.core.record import TransitionKind

GRACE_S = 3
# Pods take so long to go after they were told to, as kubelets do.
LINGERS_S = (0.0, 0.0, 0.2, 1.0)
TICK_S = 0.1
# When all jobs have ended, what is left of them goes within that time, or it is left over.
REST_S = PATIENCE_S
TELL_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of it. elastic, fixed: so many jobs of each sort at most at a time. cpus: nominal quota of each queue.

    Pairs are the least and the most seconds: trains of a job's training, wave until the wished number of jobs changes,
    act between two things that befall jobs. acts: so many of them at least; a slow cluster gets PATIENCE_S longer for them.
    """

    seconds: float
    elastic: int
    fixed: int
    cpus: int
    trains_s: tuple[float, float]
    wave_s: tuple[float, float]
    act_s: tuple[float, float]
    settle_s: float
    acts: int = 0

    @property
    def nodes(self) -> int:
        """So many nodes have room for the whole quota."""
        return 1 + len(QUEUES) * self.cpus // 24


@dataclass(slots=True)
class Life:
    """A job of the churn."""

    name: str
    is_elastic: bool
    sizes: tuple[int, int]
    train_s: float
    trained_s: float = 0.0
    state: str = ""
    reason: str = ""
    is_resumed_at: float | None = None
    is_deleted: bool = False
    is_done: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_deleted or self.is_done

    @property
    def trains(self) -> bool:
        return not self.is_over and self.state == "Running" and self.reason == "Training"


class ChurnNodes(PlayedNodes):
    """Nodes whose pods take their time to go, and whose workers can be made to crash."""

    def crash(self, job_name: str, choose: Callable[[list[str]], str]) -> bool:
        """Let a worker of a job die; False when none is at work."""

        async def hit() -> bool:
            at_work = {
                agent.pod: agent
                for agent in self.agents.values()
                if agent.state is AgentState.RUNNING and self._job_of(agent.pod) == job_name
            }
            if at_work:
                at_work[choose(sorted(at_work))].crash(NO_DATA)
            return bool(at_work)

        return self._call(hit())

    async def _end(self, pod: dict[str, Any], *, delete: bool) -> None:
        if delete:
            await asyncio.sleep(_lingers(pod))
        await super()._end(pod, delete=delete)

    async def _succeed(self, pod: dict[str, Any]) -> None:
        await asyncio.sleep(_lingers(pod))
        await super()._succeed(pod)


def _lingers(pod: dict[str, Any]) -> float:
    return LINGERS_S[sum(pod["metadata"]["name"].encode()) % len(LINGERS_S)]


class Churn:
    """The churn, run from one thread. manners: those of the nodes, where jobs that ignore elastic events are put down."""

    def __init__(
        self,
        plan: Plan,
        rng: random.Random,
        namespace: str,
        client: Client,
        nodes: ChurnNodes,
        recorder: Recorder,
        manners: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.lives: dict[str, Life] = {}
        self.acts: Counter[str] = Counter()
        self._plan = plan
        self._rng = rng
        self._namespace = namespace
        self._client = client
        self._nodes = nodes
        self._recorder = recorder
        self._strategy_warnings = manners
        self._say = say
        self._queues = [f"{namespace}-{letter}" for letter in QUEUES]
        self._wished = (plan.elastic, 0)
        self._looked_at = self._began_at = self._told_at = time.monotonic()

    def run(self) -> None:
        """Let jobs come and go for the planned time: elastic ones that fill the queues first, then all."""
        rng, plan = self._rng, self._plan
        self._began_at = self._looked_at = now = time.monotonic()
        end = now + plan.seconds
        arrive_at, act_at = now, now + rng.uniform(*plan.act_s)
        wave_at = now + rng.uniform(*plan.wave_s)
        while (now := time.monotonic()) < end or (self.acts.total() < plan.acts and now < end + PATIENCE_S):
            self._look(now)
            if now >= wave_at:
                share = rng.choice((0.2, 0.5, 1.0)) if self._wished[1] else 1.0
                self._wished = (round(share * plan.elastic), round(share * plan.fixed))
                wave_at = now + rng.uniform(*plan.wave_s)
            if now >= arrive_at and self._arrive():
                arrive_at = now + rng.uniform(0.0, 2 * plan.trains_s[0] / (plan.elastic + plan.fixed))
            if now >= act_at:
                self._act(now)
                act_at = now + rng.uniform(*plan.act_s)
            time.sleep(TICK_S)

    def settle(self) -> None:
        """Let every job go to its end, and wait until all are there."""
        for life in self.lives.values():
            if life.is_resumed_at is not None:
                life.is_resumed_at = 0.0
        self._nodes.complete({life.name for life in self.lives.values() if not life.is_over})
        end = time.monotonic() + self._plan.settle_s
        while any(not life.is_over for life in self.lives.values()):
            self._look(time.monotonic())
            assert time.monotonic() < end, f"not completed: {self.summary()}"
            time.sleep(TICK_S)
        rest = time.monotonic() + REST_S
        while self._goes_on() and time.monotonic() < rest:
            time.sleep(TICK_S)

    def summary(self) -> str:
        """Say how far the jobs are."""
        waiting = [f"{one.name} {one.state} {one.reason}" for one in self.lives.values() if not one.is_over]
        return (
            f"{len(self.lives)} jobs, {sum(one.is_done for one in self.lives.values())} completed; {', '.join(waiting)}"
        )

    # -- what is seen

    def _goes_on(self) -> bool:
        """Whether quota is held or pods live yet: jobs that users deleted take a while to go."""
        workloads, pods = self._recorder.now(WORKLOAD).values(), self._recorder.now(POD).values()
        return any(map(holds_quota, workloads)) or any(map(lives, pods))

    def _look(self, now: float) -> None:
        jobs = self._recorder.now(JOB)
        passed_s, self._looked_at = now - self._looked_at, now
        through: set[str] = set()
        for life in self.lives.values():
            if life.is_over or life.name not in jobs:
                continue
            last = (jobs[life.name].get("status", {}).get("conditions") or [{}])[-1]
            life.state, life.reason = last.get("type", ""), last.get("reason", "")
            assert life.state != "Failed", f"{life.name} failed: {last}"
            life.is_done = life.state == "Completed"
            if life.trains:
                before, life.trained_s = life.trained_s, life.trained_s + passed_s
                if before < life.train_s <= life.trained_s:
                    through.add(life.name)
            if life.is_resumed_at is not None and now >= life.is_resumed_at:
                life.is_resumed_at = None
                self._patch(life, {"runPolicy": {"suspend": False}})
        if through:
            self._nodes.complete(through)
        if now >= self._told_at + TELL_EVERY_S:
            self._told_at = now
            pods = len(self._recorder.now(POD))
            states = Counter(life.state for life in self.lives.values() if not life.is_over)
            self._say(
                f"{now - self._began_at:5.0f} s: {len(self.lives)} jobs, {pods} pods, {dict(states)}, {dict(self.acts)}"
            )

    # -- what befalls jobs

    def _arrive(self) -> bool:
        """Hand in a job of a sort that there are too few of; False when there are enough."""
        present = Counter(life.is_elastic for life in self.lives.values() if not life.is_over)
        lacking = [s for s, wished in zip((True, False), self._wished, strict=True) if present[s] < wished]
        if not lacking:
            return False
        is_elastic = self._rng.choice(lacking)
        number = len(self.lives)
        life = Life(
            name=f"{'elastic' if is_elastic else 'fixed'}-{number}",
            is_elastic=is_elastic,
            sizes=self._sizes() if is_elastic else (self._rng.randint(1, 3),) * 2,
            train_s=self._rng.uniform(*self._plan.trains_s),
        )
        if is_elastic and self._rng.random() < 0.15:
            self._strategy_warnings[life.name] = "deaf"
        self.lives[life.name] = life
        self._client.call("POST", _jobs_path(self._namespace), self._manifest(life))
        return True

    def _sizes(self) -> tuple[int, int]:
        minimum = self._rng.randint(1, 2)
        return minimum, minimum + self._rng.randint(2, 6)

    def _manifest(self, life: Life) -> dict[str, Any]:
        minimum, maximum = life.sizes
        container = {
            "name": "trainer", "image": "train:1", "command": ["hyperpodrun", "train.py"],
            "resources": {"requests": {"cpu": "1"}},
        }  # fmt: skip
        elastic = {
            "minReplicas": minimum, "maxReplicas": maximum, "replicaIncrementStep": self._rng.choice((1, 1, 2)),
            "scalingTimeoutInSeconds": self._rng.choice((0, 1)), "gracefulShutdownTimeoutInSeconds": GRACE_S,
        }  # fmt: skip
        body = job(
            life.name,
            replica_specs=[{"name": "pods", "replicas": minimum, "template": {"spec": {"containers": [container]}}}],
            runPolicy={"jobMaxRetryCount": 10_000, "ttlSecondsAfterFinished": 30},
            elastipod={
                "minStableSeconds": self._rng.choice((0, 2)), "payback": "Off",
                "backoff": {"baseSeconds": 1, "maxSeconds": 4},
            },
            **({"elasticPolicy": elastic} if life.is_elastic else {}),
        )  # fmt: skip
        body["metadata"]["labels"] = {
            "kueue.x-k8s.io/queue-name": self._rng.choice(self._queues),
            "kueue.x-k8s.io/priority-class": self._rng.choice(sorted(CLASSES)),
        }
        return body

    def _act(self, now: float) -> None:
        at_work = [life for life in self.lives.values() if life.trains and life.is_resumed_at is None]
        if not at_work:
            return
        life = self._rng.choice(at_work)
        acts = (self._crash, self._delete_pod, self._suspend, self._scale, self._delete)
        act = self._rng.choices(acts, (40, 15, 15, 20, 10))[0]
        act(life, now)

    def _crash(self, life: Life, now: float) -> None:
        self.acts["crashed workers"] += self._nodes.crash(life.name, self._rng.choice)

    def _delete_pod(self, life: Life, now: float) -> None:
        pods = [
            name for name, body in self._recorder.now(POD).items() if body["metadata"]["labels"]["HPJob"] == life.name
        ]
        if pods:
            path = f"/api/v1/namespaces/{self._namespace}/pods/{self._rng.choice(sorted(pods))}"
            self._client.call("DELETE", path, {"gracePeriodSeconds": 1}, fine=(404,))
            self.acts["deleted pods"] += 1

    def _suspend(self, life: Life, now: float) -> None:
        life.is_resumed_at = now + self._rng.uniform(1.0, 6.0)
        self._patch(life, {"runPolicy": {"suspend": True}})
        self.acts["suspended jobs"] += 1

    def _scale(self, life: Life, now: float) -> None:
        if life.is_elastic:
            self._patch(life, {"replicas": self._rng.randint(*life.sizes)})
            self.acts["scaled jobs"] += 1

    def _delete(self, life: Life, now: float) -> None:
        self._client.call("DELETE", f"{_jobs_path(self._namespace)}/{life.name}", fine=(404,))
        life.is_deleted = True
        self.acts["deleted jobs"] += 1

    def _patch(self, life: Life, spec: dict[str, Any]) -> None:
        self._client.call("PATCH", f"{_jobs_path(self._namespace)}/{life.name}", {"spec": spec}, fine=(404,))


def starts(history: list[Change]) -> Counter[str]:
    """Count the starts of workers by what they were: growths, shrinks and others by their kind."""
    entries: dict[tuple[str, int], HistoryEntry] = {}
    for change in history:
        if change.kind == JOB:
            text = change.body["metadata"].get("annotations", {}).get(ANNOTATION_HISTORY, "[]")
            entries |= {(change.uid, entry.generation): entry for entry in decode_history(text)}
    return Counter(_what(entry) for entry in entries.values())


def _what(entry: HistoryEntry) -> str:
    if entry.kind is not TransitionKind.RESIZE:
        return str(entry.kind.value)
    return "growths" if entry.to_size > entry.from_size else "shrinks"


def finished(history: list[Change]) -> set[str]:
    """Give the jobs that were seen to be completed."""
    return {
        change.body["metadata"]["name"]
        for change in history
        if change.kind == JOB
        for condition in change.body.get("status", {}).get("conditions", ())
        if condition["type"] == "Completed" and condition["status"] == "True"
    }
