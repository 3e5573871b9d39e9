"""A small shell around the real plan(): the same order of reads and writes as the operator's own, in virtual time.

It can die between any two calls; a new one begins with nothing but what the API server and the agents tell.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, cast

from tests.sim.api_server import JOB_UID, ApiFailure
from tests.sim.board import SimBoard
from tests.sim.cluster import Cluster
from tests.sim.invariants import Watchman
from tests.sim.kernel import EPOCH, Kernel, Process, Script
from tests.sim.kueue_server import KueueApi
from tests.sim.objects import Body
from tests.sim.process import OwnProcess, Wait

from elastipod_operator.agents.board import Address, Board
from elastipod_operator.agents.commands import Command
from elastipod_operator.agents.orders import Orders
from elastipod_operator.clock import SteadyClock
from elastipod_operator.core import plan as planning
from elastipod_operator.core.actions import (
    CreatePod,
    DeleteJob,
    DeletePod,
    Plan,
    StopWorkers,
    VerifyPods,
)
from elastipod_operator.core.facts import Observed, PodFact
from elastipod_operator.in_flight import WRITE_PARALLEL
from elastipod_operator.kube.api import CALL_ERRORS, Api, ApiError
from elastipod_operator.kube.applied import effective_spec
from elastipod_operator.kube.changes import metadata_changes, status_change
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.kube.tokens import Tokens
from elastipod_operator.kube.workload_watch import WorkloadWatch
from elastipod_operator.pod_creation import PodCreation
from elastipod_operator.pod_deletion import PodDeletion
from elastipod_operator.pod_desk import PodDesk
from elastipod_operator.queueing import Queues
from elastipod_operator.queueing.placing import Placed
from elastipod_operator.queueing.sight import Seen
from elastipod_operator.worker import Worker, actions_of

if TYPE_CHECKING:
    from tests.sim.kueue_server import Tenant

SETTLE_S = 3.0
RETRY_S, LAST_RETRY_S = 0.2, 15.0
COMMAND_RETRY_S = 1.0
# Calls for pods at a time: few, so that the pods of small jobs wait for their turn, too, or as many as the operator's.
SLOTS = (1, 2, WRITE_PARALLEL)


class _PodCalls:
    """The calls for pods. sent_away: is told of each pod that is to go, before its deletion is asked for."""

    def __init__(self, call: Callable[[Any], Script], cluster: Cluster, sent_away: Callable[[str, str], None]) -> None:
        self._call, self._cluster, self._sent_away = call, cluster, sent_away

    async def create_pod(self, manifest: Body) -> Any:
        await Wait(self._cluster.admission())
        return await Wait(self._call(lambda: self._cluster.create_pod(manifest)))

    async def delete_pod(self, namespace: str, name: str, uid: str, *, force: bool, grace_s: int | None = None) -> Any:
        self._sent_away(name, uid)
        return await Wait(self._call(lambda: self._cluster.delete_pod(name, uid, force=force, grace_s=grace_s)))


class Shell:
    """One life of the operator's process."""

    def __init__(self, kernel: Kernel, rng: Random, cluster: Cluster, watchman: Watchman) -> None:
        self._kernel = kernel
        self._rng = rng
        self._cluster = cluster
        self._watchman = watchman
        self._clock = SteadyClock(
            wall=lambda: EPOCH.timestamp() + kernel.now + cluster.clock_offset_s, steady=lambda: kernel.now
        )
        self._store = Store(self._clock.now)
        self._board = SimBoard(kernel, rng, cluster, self._clock.now, self.wake, self._held)
        self._sent: dict[tuple[object, ...], float] = {}
        self._pass: Process | None = None
        self._again = False
        self._due = 0
        self._retry_s = RETRY_S
        self._farewells: list[Process] = []
        self.alive = True
        self.last_actions: tuple[object, ...] = ()
        self.passes = 0
        self.die_after: int | None = None
        """Die after so many further calls."""
        self.held_until = 0.0
        """It stands still until then, and goes on where it was."""
        cluster.followers.append(self._board.agent_changed)
        self._watch = cluster.watch(self._watched)
        self._heart = kernel.spawn(self._board.beat(), self._held)
        self._process = OwnProcess(kernel, self._clock, self._held)
        self._queues: Queues | None = None
        with self._process.inside():
            desk = PodDesk(
                cast(Api, _PodCalls(self._call, cluster, self._note_sent_away)), self._store, Tokens(),
                place=self._placed, list_pods=self._list_for_queues, forget=self._board.forget,
                wake=lambda _: self.wake(), failed=self._call_failed, slots=asyncio.Semaphore(rng.choice(SLOTS)),
            )  # fmt: skip
            self._worker = Worker(PodCreation(desk, JOB_UID), PodDeletion(desk, JOB_UID))
        self._workload_watch: Process | None = None
        if cluster.tenant is not None:
            self._join_queues(cluster.tenant)

    def _join_queues(self, tenant: Tenant) -> None:
        """Speak to Kueue as the operator does, with all of its own code; without a queue nothing of that is there."""
        api = QueueApi(cast(Api, KueueApi(tenant, self._call)))
        with self._process.inside():
            self._queues = Queues(api, self._store, lambda _: self.wake(), self._list_for_queues)
        queues = self._queues
        watch = WorkloadWatch(api, self._store, lambda _: self.wake(), queues.are_back, queues.wanted)
        self._workload_watch = self._kernel.spawn(self._process.run(watch._follow("")), self._held)

    async def _list_for_queues(self, job: Job) -> None:
        await Wait(self._list_pods())

    async def _call_failed(self, job: Job, failure: Exception) -> None:
        if isinstance(failure, ApiError) and failure.status in (404, 409):
            await Wait(self._read_again())
        elif not isinstance(failure, CALL_ERRORS):
            self._kernel.after(0.0, partial(_raise, failure))  # a mistake in the operator, which would log it and go on

    async def _placed(self, job: Job, actions: Sequence[CreatePod]) -> tuple[list[Placed], str]:
        if self._queues is None:
            return [(action, None) for action in actions], ""
        return await self._queues.placed(job, actions)

    def die(self) -> None:
        """The process ends between two calls."""
        if not self.alive:
            return
        self.alive = False
        self._cluster.unwatch(self._watch)
        self._cluster.followers.remove(self._board.agent_changed)
        self._board.is_open = False
        self._heart.kill()
        if self._workload_watch is not None:
            self._workload_watch.kill()
        for process in (self._pass, *self._farewells):
            if process is not None:
                process.kill()
        self._process.end()

    def _held(self) -> float:
        return self.held_until

    # -- watches

    def _watched(self, kind: str, change: str, body: Body) -> None:
        if self._kernel.now < self.held_until:
            self._kernel.at(self.held_until, lambda: self._watched(kind, change, body))
            return
        if kind == "node":
            name = body["metadata"]["name"]
            changed = self._store.drop_node(name) if change == "DELETED" else self._store.put_node(body)
            if changed:
                self.wake()
        elif kind == "job":
            if change == "DELETED":
                self._forget()
            elif self._store.put_job(body):
                self.wake()
        elif change == "DELETED":
            self._board.forget(body["metadata"]["uid"])
            self._store.drop_pod(body)
            self.wake()
        elif self._store.put_pod(body):
            self.wake()

    def _forget(self) -> None:
        """The job is gone."""
        self._store.drop_job(JOB_UID)
        self._worker.withdraw()
        self._board.clear()

    # -- passes

    def wake(self) -> None:
        """Look at the job soon; many wakes before the next pass are one."""
        if not self.alive:
            return
        if self._pass is not None and not self._pass.done:
            self._again = True
            return
        self._again = False
        self._pass = self._kernel.spawn(self._run(), self._held)

    def _wake_at(self, time: datetime) -> None:
        self._due += 1
        due = self._due

        def fire() -> None:
            if self._due == due:
                self.wake()

        self._kernel.after((time - self._clock.now()).total_seconds(), fire)

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
            except CALL_ERRORS as failure:
                if isinstance(failure, ApiError) and failure.status in (404, 409):
                    self._worker.withdraw()
                    yield from self._read_again()
                due = self._clock.now() + timedelta(seconds=self._retry_s)
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
        except ApiFailure as failure:
            if failure.status == 404:
                self._forget()

    def _call(self, effect: Any, *, writes: bool = True) -> Any:
        yield from self._may_die()
        return (yield from self._cluster.call(effect, writes=writes))

    def _may_die(self) -> Script:
        """A call to the API server or to an agent is about to be made."""
        self._cluster.called_at.append(self._kernel.now)
        if self.die_after is None:
            return
        if self.die_after <= 0:
            self._watchman.met["the operator dies before a call"] += 1
            self._kernel.at(self._kernel.now, self.die)
            yield 1e9
        self.die_after -= 1

    def _once(self, job: Job) -> Any:
        self.passes += 1
        if not job.listed:
            yield from self._list_pods()
        if self._queues is not None:
            yield from self._process.run(self._queues.look(job))
        self._board.follow(job)
        todo = yield from self._decide(job)
        as_seen = copy.copy(job)  # what the watches show meanwhile is for the next decision
        to_create, to_delete = (
            self._worker.creation.missing(actions_of(CreatePod, todo)),
            self._worker.deletion.missing(actions_of(DeletePod, todo)),
        )
        yield from self._write_record(as_seen, todo)
        may_create = yield from self._process.run(self._worker.creation.create_secret(as_seen, to_create))
        orders = self._orders(as_seen, todo)
        farewells = {order.pod_uid: order for order in orders if order.path == "/shutdown"}

        def report_and_supply() -> Script:
            failure = None
            try:
                yield from self._report(job, todo)
            except CALL_ERRORS as error:
                failure = error
            with self._process.inside():
                self._worker.deletion.begin(
                    as_seen, to_delete, lambda action: self._bid_farewell(as_seen, farewells.get(action.uid))
                )
            if may_create:
                yield from self._process.run(self._worker.creation.begin(as_seen, to_create))
            if failure is not None:
                raise failure

        is_told_first = self._rng.random() < 0.5  # the operator writes the status beside its actions
        if is_told_first:
            yield from report_and_supply()
        yield from self._command([order for order in orders if order.path != "/shutdown"], as_seen)
        for uid in sorted(farewells.keys() - {action.uid for action in actions_of(DeletePod, todo)}):
            self._bid_farewell(as_seen, farewells[uid])
        if self._queues is not None:
            yield from self._process.run(self._queues.give_back(as_seen, todo))
        for action in todo.actions:
            if isinstance(action, VerifyPods):
                yield from self._list_pods()
            elif isinstance(action, DeleteJob):
                yield from self._call(self._cluster.delete_job)
        if self._queues is not None:
            yield from self._process.run(self._queues.ask(as_seen, todo))
        if not is_told_first:
            yield from report_and_supply()
        if not orders:
            return todo.wake_at
        soon = self._clock.now() + timedelta(seconds=COMMAND_RETRY_S)
        return soon if todo.wake_at is None else min(todo.wake_at, soon)

    def _decide(self, job: Job) -> Any:
        while True:
            todo = planning.plan(self._observe(job))
            self.last_actions = todo.actions
            with self._process.inside():
                is_kept = self._worker.keep_only(todo)
            if is_kept:
                return todo
            self._watchman.met["a decision waits for calls that it does not want"] += 1
            yield from self._process.run(self._worker.creation.calls.answered())
            yield from self._process.run(self._worker.deletion.calls.answered())

    def _bid_farewell(self, job: Job, order: Command | None) -> None:
        if order is None:
            return
        self._farewells = [one for one in self._farewells if not one.done]
        self._farewells.append(self._kernel.spawn(self._farewell(order, job), self._held))

    def _farewell(self, order: Command, job: Job) -> Script:
        with suppress(*CALL_ERRORS):  # it is called again as long as its pod is there
            yield from self._command([order], job)

    def _list_pods(self) -> Script:
        bodies, version = yield from self._call(self._cluster.list_pods, writes=False)
        job = self._store.jobs.get(JOB_UID)
        known = set(job.pods) if job else set()
        self._store.replace_pods(JOB_UID, bodies, version)
        for uid in known - set(job.pods if job else ()):
            self._board.forget(uid)

    def _observe(self, job: Job) -> Observed:
        pods = tuple(job.pods.values())
        with self._process.inside():
            quota = self._queues.seen(job) if self._queues is not None else Seen()
        return Observed(
            now=self._clock.now(), job=job.fact, pods=pods, agents={p.name: self._board.fact(p.uid) for p in pods},
            nodes=self._store.nodes_of(job),
            refusal=self._worker.creation.refusal.why, refused_until=self._worker.creation.refusal.until,
            kept_pods=self._worker.deletion.why_kept,
            listed_at=job.listed_at, room_at=self._store.room_at,
            workloads=quota.workloads, default_queue=quota.default_queue, queue_trouble=quota.trouble, queue_fact=quota.queue,
            return_trouble=quota.return_trouble,
        )  # fmt: skip

    def _write_record(self, job: Job, todo: Plan) -> Script:
        metadata = metadata_changes(job, todo)
        is_doubtful = any(isinstance(a, StopWorkers) and a.generation > todo.record.generation for a in todo.actions)
        if metadata or is_doubtful:
            version = job.body["metadata"]["resourceVersion"]
            body = yield from self._call(lambda: self._cluster.patch_metadata(version, metadata))
            self._store.put_job(body)

    def _orders(self, job: Job, todo: Plan) -> list[Command]:
        pods = {pod.name: pod for pod in job.pods.values()}
        board = cast(Board, self._board)
        orders = Orders(effective_spec(job.body), pods, todo.record, board, lambda pod: Address(JOB_UID, pod.ip, 0))
        return [order for action in todo.actions if (order := orders.of(action)) is not None]

    def _command(self, orders: list[Command], job: Job) -> Script:
        now = self._kernel.now
        self._sent = {key: at for key, at in self._sent.items() if now - at < SETTLE_S}
        for order in orders:
            if (order.pod_uid, *order.key) not in self._sent and order.pod_uid in job.pods:
                yield from self._may_die()
                self._order(job, job.pods[order.pod_uid], order)
        if orders:
            yield from self._call(_nothing, writes=False)

    def _order(self, job: Job, pod: PodFact, order: Command) -> None:
        is_late = self.held_until > 0.0  # it stood still; others have decided since
        self._watchman.called(
            order.path, pod.id, order.body, ending=job.fact.deleting_since is not None, by_the_past=is_late
        )
        if order.path == "/shutdown":
            self._note_sent_away(pod.name, pod.uid)
            real = self._cluster.pods.get(pod.uid)
            if is_late and real is not None and real.agent is not None:  # this call has no generation
                self._watchman.touched(pod.name, self._kernel.now + 60.0)
                self._cluster.training.touched(real.agent, "a /shutdown from the past")
        if self._send(order.pod_uid, order.path, order.body):
            self._sent[(order.pod_uid, *order.key)] = self._kernel.now

    def _send(self, uid: str, path: str, body: Body | None) -> bool:
        """Let a call travel; gives whether its answer came back. A late one arrives all the same."""
        pod = self._cluster.pods.get(uid)
        if pod is None or pod.agent is None or not pod.hears():
            return False
        agent = pod.agent
        is_lossy = self._cluster.goes_on("lossy_calls")
        is_late = is_lossy and self._rng.random() < 0.3
        is_unanswered = not pod.answers() or is_late or (is_lossy and self._rng.random() < 0.3)
        self._watchman.met["call: late"] += is_late
        self._watchman.met["call: answer lost"] += is_unanswered

        def arrive() -> None:
            if not agent.alive or not pod.node_runs():
                return
            if path == "/start":
                agent.start(body or {})
            elif path == "/stop":
                agent.stop(body or {})
            else:
                agent.shut_down()

        self._kernel.after(self._rng.uniform(3.0, 20.0) if is_late else self._rng.uniform(0.001, 0.02), arrive)
        return not is_unanswered

    def _note_sent_away(self, name: str, uid: str) -> None:
        """From here on it ends because the operator wants it, unless its container has ended already."""
        real = self._cluster.pods.get(uid)
        if real is None or real.exit_code is None:
            self._watchman.sent_away(name)

    def _report(self, job: Job, todo: Plan) -> Script:
        yield from self._write_status(job, todo)
        for note in todo.notes:
            self._watchman.met[f"Event: {note.reason}"] += 1

    def _write_status(self, job: Job, todo: Plan) -> Script:
        status = status_change(job, todo)
        if status is not None:
            before = job.fact
            self._store.put_job((yield from self._call(lambda: self._cluster.apply_status(status))))
            # The answer may carry an edit that the watch will then not tell as new.
            self._again |= (job.fact.policy, job.fact.deleting_since) != (before.policy, before.deleting_since)


def _raise(failure: Exception) -> None:
    raise failure


def _nothing() -> None:
    """The effect of calls that travel by themselves."""
