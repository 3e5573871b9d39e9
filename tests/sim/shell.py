"""A small shell around the real plan(): the same order of reads and writes as the operator's own, in virtual time.

It can die between any two calls; a new one begins with nothing but what the API server and the agents tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Any

from tests.sim.cluster import JOB_UID, ApiFailure, Body, Cluster, SimPod
from tests.sim.invariants import Watchman
from tests.sim.kernel import EPOCH, Kernel, Process, Script, stamp

from elastipod_operator.agents.answers import read
from elastipod_operator.core import plan as planning
from elastipod_operator.core.actions import (
    CreatePod,
    DeleteJob,
    DeletePod,
    HoldSpare,
    Plan,
    SetFinalizer,
    ShutDownAgent,
    StartWorkers,
    StopWorkers,
    VerifyPods,
)
from elastipod_operator.core.backoff import backoff
from elastipod_operator.core.codec import encode
from elastipod_operator.core.facts import AgentFact, Observed
from elastipod_operator.core.health import SILENCE_LIMIT
from elastipod_operator.core.history import decode_history, encode_history, mark_running
from elastipod_operator.core.names import (
    ANNOTATION_APPLIED,
    ANNOTATION_HISTORY,
    ANNOTATION_SIZE,
    ANNOTATION_STATE,
    FINALIZER,
    master_port,
)
from elastipod_operator.kube.applied import applied_of, effective_spec, encode_applied
from elastipod_operator.kube.pods import pod_manifest
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.kube.translate import node_fact

SETTLE_S = 3.0
RETRY_S, LAST_RETRY_S = 0.2, 15.0
COMMAND_RETRY_S = 1.0
REFUSAL, LAST_REFUSAL = timedelta(seconds=5), timedelta(seconds=120)


class SimStore(Store):
    """The real store, told the virtual time."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def put_node(self, body: Mapping[str, Any]) -> list[str]:
        name = body["metadata"]["name"]
        before = self.nodes.get(name)
        super().put_node(body)
        self.nodes[name] = node_fact(body, before, self._kernel.utc())
        return self.jobs_on(name) if self.nodes[name] != before else []


@dataclass(slots=True)
class Watched:
    """One agent on the board."""

    ip: str
    fact: AgentFact
    heard_at: float


class Shell:
    """One life of the operator's process."""

    def __init__(self, kernel: Kernel, rng: Random, cluster: Cluster, watchman: Watchman) -> None:
        self._kernel = kernel
        self._rng = rng
        self._cluster = cluster
        self._watchman = watchman
        self._store = SimStore(kernel)
        self._board: dict[str, Watched] = {}
        self._sent: dict[tuple[str, ...], float] = {}
        self._pass: Process | None = None
        self._again = False
        self._due = 0
        self._retry_s = RETRY_S
        self._listed_at: datetime | None = None
        self._refusal, self._refusals = "", 0
        self._refused_until: datetime | None = None
        self.alive = True
        self.last_actions: tuple[object, ...] = ()
        self.passes = 0
        self.die_after: int | None = None
        """Die after so many further calls."""
        cluster.on_agent_change = self._agent_changed
        cluster.watch(self._watched)
        self._heart = kernel.spawn(self._beat())

    def die(self) -> None:
        """The process ends between two calls."""
        self.alive = False
        self._cluster.watch(None)
        self._heart.kill()
        if self._pass is not None:
            self._pass.kill()

    # -- watches and agents

    def _watched(self, kind: str, change: str, body: Body) -> None:
        if kind == "node":
            name = body["metadata"]["name"]
            changed = self._store.drop_node(name) if change == "DELETED" else self._store.put_node(body)
            if changed:
                self.wake()
        elif kind == "job":
            if change == "DELETED":
                self._store.drop_job(JOB_UID)
                self._board.clear()
            elif self._store.put_job(body):
                self.wake()
        elif change == "DELETED":
            self._board.pop(body["metadata"]["uid"], None)
            self._store.drop_pod(body)
            self.wake()
        elif self._store.put_pod(body):
            self.wake()

    def _agent_changed(self, pod: SimPod) -> None:
        self._kernel.after(self._rng.uniform(0.005, 0.1), lambda: self._refresh(pod))

    def _refresh(self, pod: SimPod) -> None:
        watched = self._board.get(pod.uid)
        if not self.alive or watched is None or pod.agent is None or not pod.reachable():
            return
        before = watched.fact
        watched.fact = read(pod.agent.status(), before, self._kernel.utc()).fact
        watched.heard_at = self._kernel.now
        back = before.last_answer is None or self._kernel.utc() - before.last_answer >= SILENCE_LIMIT
        if back or _matters(before) != _matters(watched.fact):
            self.wake()

    def _beat(self) -> Script:
        while True:
            yield 1.0
            for uid, watched in list(self._board.items()):
                pod = self._cluster.pods.get(uid)
                if pod is not None and pod.reachable() and pod.agent is not None:
                    if self._kernel.now - watched.heard_at >= 4.0:
                        self._refresh(pod)
                    continue
                since = watched.fact.last_answer or watched.fact.trying_since
                if since is not None and self._kernel.utc() - since >= SILENCE_LIMIT:
                    self.wake()

    def _follow_agents(self, job: Job) -> None:
        for uid, pod in job.pods.items():
            if pod.ended:
                self._board.pop(uid, None)
            elif pod.ip and pod.started and uid not in self._board:
                self._board[uid] = Watched(pod.ip, AgentFact(trying_since=self._kernel.utc()), -4.0)
                real = self._cluster.pods.get(uid)
                if real is not None:
                    self._agent_changed(real)

    # -- passes

    def wake(self) -> None:
        """Look at the job soon; many wakes before the next pass are one."""
        if not self.alive:
            return
        if self._pass is not None and not self._pass.done:
            self._again = True
            return
        self._again = False
        self._pass = self._kernel.spawn(self._run())

    def _wake_at(self, time: datetime) -> None:
        self._due += 1
        due = self._due

        def fire() -> None:
            if self._due == due:
                self.wake()

        self._kernel.at((time - EPOCH).total_seconds(), fire)

    def _run(self) -> Script:
        yield 0.001
        while True:
            self._again = False
            job = self._store.jobs.get(JOB_UID)
            if job is None:
                return
            try:
                due = yield from self._once(job)
                self._retry_s = RETRY_S
            except ApiFailure as failure:
                due = self._kernel.utc() + timedelta(seconds=self._retry_s)
                if failure.status == 409:
                    yield from self._read_again()
                elif failure.status != 404:
                    self._retry_s = min(LAST_RETRY_S, self._retry_s * 2)
            self._due += 1
            if not self._again:
                if due is not None:
                    self._wake_at(due)
                return
            yield 0.001

    def _read_again(self) -> Script:
        try:
            self._store.put_job((yield from self._call(self._cluster.job_body, writes=False)))
        except ApiFailure:
            return

    def _call(self, effect: Any, *, writes: bool = True) -> Any:
        if self.die_after is not None:
            if self.die_after <= 0:
                self._kernel.at(self._kernel.now, self.die)
                yield 1e9
            self.die_after -= 1
        return (yield from self._cluster.call(effect, writes=writes))

    def _once(self, job: Job) -> Any:
        self.passes += 1
        if not job.listed:
            yield from self._list_pods()
        self._follow_agents(job)
        todo = planning.plan(self._observe(job))
        self.last_actions = todo.actions
        yield from self._write_record(job, todo)
        acted = yield from self._command_all(job, todo)
        yield from self._create_all(job, todo)
        for action in todo.actions:
            if isinstance(action, DeletePod):
                yield from self._delete(action)
            elif isinstance(action, VerifyPods):
                yield from self._list_pods()
            elif isinstance(action, DeleteJob):
                yield from self._call(self._cluster.delete_job)
        yield from self._write_status(job, todo)
        if not acted:
            return todo.wake_at
        soon = self._kernel.utc() + timedelta(seconds=COMMAND_RETRY_S)
        return soon if todo.wake_at is None else min(todo.wake_at, soon)

    def _list_pods(self) -> Script:
        bodies, version = yield from self._call(self._cluster.list_pods, writes=False)
        job = self._store.jobs.get(JOB_UID)
        known = set(job.pods) if job else set()
        self._store.replace_pods(JOB_UID, bodies, version)
        self._listed_at = self._kernel.utc()
        for uid in known - set(job.pods if job else ()):
            self._board.pop(uid, None)

    def _observe(self, job: Job) -> Observed:
        pods = tuple(job.pods.values())
        return Observed(
            now=self._kernel.utc(), job=job.fact, pods=pods,
            agents={p.name: self._board[p.uid].fact for p in pods if p.uid in self._board},
            nodes=self._store.nodes_of(job),
            refusal=self._refusal, refused_until=self._refused_until, listed_at=self._listed_at,
        )  # fmt: skip

    def _write_record(self, job: Job, todo: Plan) -> Script:
        present = job.body["metadata"].get("annotations") or {}
        wanted = {} if todo.is_record_kept else {ANNOTATION_STATE: encode(todo.record), ANNOTATION_SIZE: todo.size}
        if job.fact.policy is not None and (todo.takes_spec or (wanted and applied_of(job.body) is None)):
            wanted[ANNOTATION_APPLIED] = encode_applied(job.body["spec"])
        if todo.history or todo.running_since is not None:
            entries = decode_history(present.get(ANNOTATION_HISTORY, "[]")) + todo.history
            if todo.running_since is not None:
                entries = mark_running(entries, todo.record.generation, todo.running_since)
            wanted[ANNOTATION_HISTORY] = encode_history(entries)
        metadata: Body = {}
        present_finalizers = job.body["metadata"].get("finalizers") or []
        for action in todo.actions:
            if isinstance(action, SetFinalizer) and action.present and FINALIZER not in present_finalizers:
                metadata["finalizers"] = [*present_finalizers, FINALIZER]
            elif isinstance(action, SetFinalizer) and not action.present and FINALIZER in present_finalizers:
                metadata["finalizers"] = [f for f in present_finalizers if f != FINALIZER]
        released = FINALIZER not in metadata.get("finalizers", [FINALIZER])
        changed = {} if released else {k: v for k, v in wanted.items() if v != present.get(k)}
        if changed:
            metadata["annotations"] = changed
        if metadata:
            version = job.body["metadata"]["resourceVersion"]
            body = yield from self._call(lambda: self._cluster.patch_metadata(version, metadata))
            self._store.put_job(body)

    def _command_all(self, job: Job, todo: Plan) -> Any:
        commands = [a for a in todo.actions if isinstance(a, StartWorkers | HoldSpare | StopWorkers | ShutDownAgent)]
        now = self._kernel.now
        self._sent = {key: at for key, at in self._sent.items() if now - at < SETTLE_S}
        for action in commands:
            fact = next((p for p in job.pods.values() if p.name == action.pod), None)
            if fact is None or not fact.ip:
                continue
            path, body = _request(todo, action)
            if body is not None and self._board[fact.uid].fact.generation is None:
                del body["generation"]  # an agent of another make
            key = (
                fact.uid,
                path,
                json.dumps(body, sort_keys=True) if path != "/stop" else str(body and body["is_graceful"]),
            )
            if key in self._sent:
                continue
            ending = job.fact.deleting_since is not None
            self._watchman.called(path, fact.id, body, ending=ending)
            if self._send(fact.uid, path, body):
                self._sent[key] = now
        if commands:
            yield from self._call(_nothing, writes=False)
        return bool(commands)

    def _send(self, uid: str, path: str, body: Body | None) -> bool:
        """Let a call travel; gives whether its answer came back. A late one arrives all the same."""
        pod = self._cluster.pods.get(uid)
        if pod is None or pod.agent is None:
            return False
        agent = pod.agent
        lossy = self._kernel.now < self._cluster.calls_lossy_until
        late = lossy and self._rng.random() < 0.3

        def arrive() -> None:
            if not agent.alive or not pod.node_runs():
                return
            if path == "/start":
                agent.start(body or {})
            elif path == "/stop":
                agent.stop(body or {})
            else:
                agent.shut_down()

        if not pod.reachable():
            return False
        self._kernel.after(self._rng.uniform(3.0, 20.0) if late else self._rng.uniform(0.001, 0.02), arrive)
        return not late and not (lossy and self._rng.random() < 0.3)

    def _create_all(self, job: Job, todo: Plan) -> Script:
        actions = [a for a in todo.actions if isinstance(a, CreatePod)]
        if self._refused_until is not None and self._kernel.utc() < self._refused_until:
            return
        assert job.fact.policy is not None or not actions
        refusals: list[str] = []
        for action in actions:
            assert job.fact.policy is not None
            manifest = pod_manifest(
                job.fact, effective_spec(job.body), job.fact.policy, action.pod, action.nnodes,
                generation=action.generation, avoids=action.avoids,
            )  # fmt: skip
            try:
                self._store.put_pod((yield from self._call(lambda m=manifest: self._cluster.create_pod(m))))
            except ApiFailure as failure:
                if failure.status == 409:
                    job.listed = False
                elif failure.status == 403:
                    refusals.append(str(failure))
                else:
                    raise
        if not refusals:
            if self._refusal:
                self._refusal, self._refusals, self._refused_until = "", 0, None
                self._again = True
            return
        self._refusal = f"{len(refusals)} pods were refused by the API server: {refusals[0]}"
        self._refusals += 1
        wait = backoff(REFUSAL, LAST_REFUSAL, self._refusals, JOB_UID)
        self._refused_until = self._kernel.utc() + wait
        self._kernel.after(wait.total_seconds(), self.wake)

    def _delete(self, action: DeletePod) -> Script:
        try:
            call = self._call(lambda: self._cluster.delete_pod(action.name, action.uid, force=action.force))
            body = yield from call
        except ApiFailure as failure:
            if failure.status not in (404, 409):
                raise
            body = {}
        if body.get("kind") == "Pod" and not action.force:
            self._store.put_pod(body)
        else:
            self._store.drop_pod_uid(JOB_UID, action.uid)
            self._board.pop(action.uid, None)

    def _write_status(self, job: Job, todo: Plan) -> Script:
        if any(isinstance(a, SetFinalizer) and not a.present for a in todo.actions):
            return
        conditions = [
            {"type": c.type, "status": "True" if c.status else "False", "reason": c.reason, "message": c.message,
             "lastTransitionTime": stamp(c.since)}
            for c in todo.conditions
        ]  # fmt: skip
        kept = (job.body.get("status") or {}) if todo.is_record_kept else todo.status
        status = {**kept, "conditions": conditions}
        if (job.body.get("status") or {}) != status:
            before = job.fact
            self._store.put_job((yield from self._call(lambda: self._cluster.apply_status(status))))
            # The answer may carry an edit that the watch will then not tell as new.
            self._again |= (job.fact.policy, job.fact.deleting_since) != (before.policy, before.deleting_since)


def _nothing() -> None:
    """The effect of calls that travel by themselves."""


def _request(todo: Plan, action: StartWorkers | HoldSpare | StopWorkers | ShutDownAgent) -> tuple[str, Body | None]:
    record = todo.record
    if isinstance(action, StartWorkers | HoldSpare):
        return "/start", {
            "spare": isinstance(action, HoldSpare), "rank": action.number if isinstance(action, HoldSpare) else action.group_rank,
            "nnodes": len(record.members), "faultCount": record.generation - 1,
            "master_addr": record.master_addr, "master_port": master_port(record.generation),
            "generation": record.generation,
        }  # fmt: skip
    if isinstance(action, StopWorkers):
        return "/stop", {
            "is_graceful": action.graceful, "timeout": action.timeout_s, "generation": action.generation
        }  # fmt: skip
    return "/shutdown", None


def _matters(fact: AgentFact) -> tuple[object, ...]:
    is_first_step = fact.step is not None
    return (fact.state, fact.generation, fact.drained, fact.terminating, fact.failure, fact.reason, is_first_step)
