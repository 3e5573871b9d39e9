"""What must be true of quota at every point of a history of pods and Workloads, and what the history says of evictions.

Pure: a history goes in, what breaks which rule comes out. The rules:

* OVER_QUOTA: pods that live on a Workload, of a job, in a ClusterQueue and in the cohort never take more than is granted there;
* GIVEN_BACK_EARLY: quota is given back only when no pod lives on it;
* HELD_TOO_LONG: an evicted Workload gives its quota back soon after its last pod is gone;
* LEFT_BEHIND: a job that is deleted goes last, when nothing of it holds quota or waits for some;
* EXTRA_BEFORE_BASE: an increment never preempts a base;
* LEFT_OVER: at the end nobody has quota, and no pod lives.

Quota is counted in thousandths of a CPU. A pod lives from its creation until it is deleted or terminal, whether it ever ran or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.api.etcd_history import Change
from tests.api.quota_objects import ACCOMMODATES, _Pod, _pod, _Workload, _workload, lives

from elastipod_operator.core.record_codec import decode

POD, WORKLOAD, JOB = "Pod", "Workload", "HyperPodPyTorchJob"
OVER_QUOTA = "over quota"
GIVEN_BACK_EARLY = "given back before the pods are gone"
HELD_TOO_LONG = "held too long after the pods are gone"
LEFT_BEHIND = "left behind by a deleted job"
EXTRA_BEFORE_BASE = "an increment preempts a base"
LEFT_OVER = "left over at the end"
RULES = (OVER_QUOTA, GIVEN_BACK_EARLY, HELD_TOO_LONG, LEFT_BEHIND, EXTRA_BEFORE_BASE, LEFT_OVER)
MARGIN_S = 60.0  # of a machine that lets processes wait for seconds; who forgets to give back never does


@dataclass(frozen=True, slots=True)
class Violation:
    """What broke a rule, at which version of the cluster's etcd."""

    rule: str
    version: int
    what: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """A Workload that Kueue wanted back. Times are seconds; those of its pods are None when it had none.

    acted_at: when it was first seen that something was done about it: the job's drain is on record, or a pod is sent away.
    gone_at: when its last pod was gone.
    """

    workload: str
    is_base: bool
    reason: str
    began_at: float
    acted_at: float | None
    gone_at: float | None
    released_at: float

    @property
    def drain_s(self) -> float:
        """How long it took its pods to go, from the first act on."""
        return 0.0 if self.gone_at is None or self.acted_at is None else max(0.0, self.gone_at - self.acted_at)

    @property
    def beyond_drain_s(self) -> float:
        """How much longer it took from the eviction until the quota was given back."""
        return self.released_at - self.began_at - self.drain_s


@dataclass(slots=True)
class Verdict:
    """What a history shows. counts: of what happened in it."""

    violations: list[Violation] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def rules_broken(self) -> set[str]:
        """Give the rules that were broken."""
        return {violation.rule for violation in self.violations}


def check(history: Iterable[Change], quotas: Mapping[str, int], grace_s: float) -> Verdict:
    """Hold a whole history against the rules. It is in order, of one namespace, and begins before the first pod.

    quotas: nominal quota of the ClusterQueues of one cohort, by name. grace_s: the longest time that a job has for its drain.
    """
    run = _Run(quotas, grace_s)
    for change in history:
        run.take(change)
    return run.end()


class _Run:
    def __init__(self, quotas: Mapping[str, int], grace_s: float) -> None:
        self.verdict = Verdict()
        self._quotas = quotas
        self._limit_s = grace_s + MARGIN_S
        self._pods: dict[str, _Pod] = {}
        self._workloads: dict[str, _Workload] = {}
        """Those that are there, by name."""
        self._known: dict[str, _Workload] = {}
        """All that ever were, by UID: who preempts may be gone when it is asked for."""
        self._draining: set[str] = set()
        """Jobs whose record says that their workers are being stopped."""
        self._version, self._at = 0, 0.0

    def take(self, change: Change) -> None:
        assert change.version >= self._version, "a history is in order"
        self._version, self._at = change.version, change.at
        if change.kind == POD:
            self._take_pod(change)
        elif change.kind == WORKLOAD:
            self._take_workload(change)
        elif change.kind == JOB:
            self._take_job(change)
        self._check_sums()

    def end(self) -> Verdict:
        for name, workload in self._workloads.items():
            if workload.granted:
                self._broken(LEFT_OVER, f"Workload {name} holds {workload.granted}m")
            if workload.is_evicted and workload.granted and not self._on(name):
                self._check_wait(workload)
        for pod in self._pods.values():
            self._broken(LEFT_OVER, f"pod {pod.name} lives")
        return self.verdict

    # -- changes

    def _take_pod(self, change: Change) -> None:
        before = self._pods.pop(change.uid, None)
        pod = _pod(change.body) if change.type != "DELETED" and lives(change.body) else None
        if pod is not None:
            self._pods[change.uid] = pod
            if before is None:
                self.verdict.counts["pods"] += 1
                self._check_place(pod)
            workload = self._workloads.get(pod.workload)
            if workload is not None and workload.is_evicted:
                workload.had_pods, workload.gone_at = True, None  # who made it had not heard of the eviction yet
            if pod.is_leaving and workload is not None and workload.acted_at is None:
                workload.acted_at = change.at
        elif before is not None:
            self._left(before)

    def _check_place(self, pod: _Pod) -> None:
        workload = self._workloads.get(pod.workload)
        if workload is None or not (workload.granted and workload.is_admitted):
            self._broken(
                OVER_QUOTA, f"pod {pod.name} was made, and Workload {pod.workload or '(none)'} is not admitted"
            )
            return
        on = self._on(pod.workload)
        taken = sum(one.cpu for one in on)
        if taken > workload.granted:
            names = ", ".join(sorted(one.name for one in on))
            self._broken(OVER_QUOTA, f"{names} take {taken}m of {workload.granted}m of Workload {pod.workload}")

    def _left(self, pod: _Pod) -> None:
        workload = self._workloads.get(pod.workload)
        if workload is not None and workload.is_evicted and not self._on(pod.workload):
            workload.gone_at = self._at

    def _take_workload(self, change: Change) -> None:
        name = str(change.body["metadata"]["name"])
        before = self._workloads.get(name)
        if change.type == "DELETED":
            if before is not None:
                self._released(before, "deleted")
                del self._workloads[name]
            return
        now = self._workloads[name] = self._known[change.uid] = _workload(change.body)
        if before is None:
            self.verdict.counts["base Workloads" if now.number == 0 else "increment Workloads"] += 1
        if before is not None and before.granted and not now.granted:
            self._released(before, "given back")
        elif before is not None and before.granted and before.is_evicted and not now.is_evicted:
            self.verdict.counts["evictions that Kueue called off"] += 1
        elif now.granted and now.is_evicted:
            if before is not None and before.granted and before.is_evicted:
                now.evicted_at, now.acted_at, now.gone_at = before.evicted_at, before.acted_at, before.gone_at
                now.had_pods = before.had_pods
            else:
                self._evicted(now)

    def _evicted(self, workload: _Workload) -> None:
        on = self._on(workload.name)
        workload.evicted_at, workload.had_pods = self._at, bool(on)
        workload.gone_at = None if on else self._at
        if workload.job in self._draining or any(pod.is_leaving for pod in on):
            workload.acted_at = self._at
        kind = "base" if workload.number == 0 else "increment"
        self.verdict.counts[f"evicted: {kind}, {workload.reason}"] += 1
        if workload.reason == "Preempted":
            self._check_preemptor(workload)

    def _check_preemptor(self, victim: _Workload) -> None:
        self.verdict.counts["preemptions"] += 1
        found = ACCOMMODATES.search(victim.message)
        preemptor = self._known.get(found.group(1)) if found else None
        if preemptor is None:
            self._broken(EXTRA_BEFORE_BASE, f"nobody knows who preempted {victim.name}: {victim.message!r}")
        elif preemptor.number and victim.number == 0:
            self._broken(EXTRA_BEFORE_BASE, f"{preemptor.name} preempted {victim.name}")

    def _released(self, before: _Workload, how: str) -> None:
        on = self._on(before.name)
        if not before.granted:
            return
        if on:
            why = f"evicted ({before.reason})" if before.is_evicted else "not evicted"
            names = ", ".join(sorted(pod.name for pod in on))
            self._broken(GIVEN_BACK_EARLY, f"Workload {before.name}, {why}, was {how} and {names} lived on it")
        if not before.is_evicted:
            return
        if not on:
            self._check_wait(before)
        gone_at = before.gone_at if before.had_pods else None
        self.verdict.evictions.append(
            Eviction(
                before.name, before.number == 0, before.reason, before.evicted_at, before.acted_at, gone_at, self._at
            )
        )

    def _check_wait(self, workload: _Workload) -> None:
        waited_s = self._at - (workload.gone_at if workload.gone_at is not None else workload.evicted_at)
        if waited_s > self._limit_s:
            self._broken(
                HELD_TOO_LONG,
                f"Workload {workload.name} was evicted and without pods for {waited_s:.1f} s, {self._limit_s:g} s are allowed",
            )

    def _take_job(self, change: Change) -> None:
        name = str(change.body["metadata"]["name"])
        text = change.body["metadata"].get("annotations", {}).get("elastipod.io/state", "")
        if change.type == "DELETED":
            self._check_left_behind(name)
        is_draining = change.type != "DELETED" and bool(text) and decode(text).transition is not None
        if not is_draining:
            self._draining.discard(name)
            return
        self._draining.add(name)
        for workload in self._workloads.values():
            if workload.job == name and workload.granted and workload.is_evicted and workload.acted_at is None:
                workload.acted_at = change.at

    def _check_left_behind(self, job: str) -> None:
        self.verdict.counts["deleted jobs that are gone"] += 1
        for workload in self._workloads.values():
            if workload.job == job and not workload.is_finished:
                what = f"holds {workload.granted}m" if workload.granted else "waits"
                self._broken(LEFT_BEHIND, f"Workload {workload.name} {what} when its job is gone")

    # -- sums

    def _check_sums(self) -> None:
        """Hold what lives of each job, in each queue and in the cohort against what is granted, and that against the quota.

        What is being evicted counts toward no quota: Kueue 0.15 lets others in on it in the cycle that evicts it, when the one for
        whom it does so needs less than that gives.
        """
        granted: Counter[str] = Counter()
        granted_in: Counter[str] = Counter()
        queue_of: dict[str, str] = {}
        leaving = {w.name: w.granted for w in self._workloads.values() if w.granted and w.is_evicted}
        for workload in self._workloads.values():
            if workload.granted:
                granted[workload.job] += workload.granted
                granted_in[workload.queue] += workload.granted
                queue_of[workload.job] = workload.queue
        living: Counter[str] = Counter()
        living_in: Counter[str] = Counter()
        for pod in self._pods.values():
            living[pod.job] += pod.cpu
            living_in[queue_of.get(pod.job, "")] += pod.cpu
        total = sum(self._quotas.values())
        self.verdict.counts["most CPUs in use"] = max(self.verdict.counts["most CPUs in use"], living.total() // 1000)
        for what, has, may in (
            *((f"job {job}", cpu, granted[job]) for job, cpu in living.items()),
            *((f"ClusterQueue {queue or '(none)'}", cpu, granted_in[queue]) for queue, cpu in living_in.items()),
            ("all pods", sum(pod.cpu for pod in self._pods.values() if pod.workload not in leaving), total),
            ("all Workloads", granted_in.total() - sum(leaving.values()), total),
        ):
            if has > may:
                self._broken(OVER_QUOTA, f"{what}: {has}m of {may}m")
        for queue in granted_in:
            if queue not in self._quotas:
                self._broken(OVER_QUOTA, f"ClusterQueue {queue} is not known")

    def _on(self, workload: str) -> list[_Pod]:
        return [pod for pod in self._pods.values() if pod.workload == workload]

    def _broken(self, rule: str, what: str) -> None:
        """Note what broke a rule, once: it stays broken for a while."""
        if all((one.rule, one.what) != (rule, what) for one in self.verdict.violations):
            self.verdict.violations.append(Violation(rule, self._version, what))
