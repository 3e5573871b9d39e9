"""The shell around plan(): observe, decide, write the record, act, report. One task per job, one decision at a time."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

from . import clock, metrics
from .agents.command_builder import Orders
from .agents.commands import Command
from .agents.ports import ConnectAgents
from .agents.status_cache import Address
from .core.actions import CreatePod, DeleteJob, DeletePod, JobEvent, ListPods, Plan, StopWorkers
from .core.ending import deletion_notes
from .core.plan import plan
from .core.record import Record
from .core.snapshot import ObservedPod, Snapshot
from .decision_limiter import Turns
from .job_metrics import JobCounts
from .job_task import Decision, Worker, actions_of
from .job_writes import JobWrites
from .kube.api import CALL_ERRORS, ApiError
from .kube.applied import effective_spec
from .kube.changes import is_released, metadata_changes, status_change
from .kube.job_keys import Tokens
from .kube.ports import EventSink, JobCalls
from .kube.queue_api import QueueApi
from .kube.store import Job, Store
from .kube.writes import about, is_overtaken, together
from .operator_errors import mistake_text, note_mistake, tell_mistake
from .pod_control import PodDesk
from .pod_creation import PodCreation
from .pod_deletion import PodDeletion
from .queueing import Queues

log = logging.getLogger(__name__)

# After a failed pass: first quickly, then with patience.
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 15.0
# Commands that failed are looked at again so soon.
COMMAND_RETRY = timedelta(seconds=1)
NO_TOKENS = Tokens()


class Reconciler:
    """Runs a decision for a job whenever something about it changed or a time has come.

    What it reaches the world through is given to it; the time is that of `clock`, and of the event loop that it runs in.
    """

    def __init__(
        self, api: JobCalls, store: Store, agents: ConnectAgents, events: EventSink, tokens: Tokens = NO_TOKENS
    ) -> None:
        self._api = api
        self._tokens = tokens
        self._store = store
        self._board, self._commander = agents(self.wake)
        self._workers: dict[str, Worker] = {}
        self._counts = JobCounts()
        self._queues = Queues(QueueApi(api), store, self.wake, self._list_pods)
        self._desk = PodDesk(
            api, store, tokens, place=self._queues.placed, list_pods=self._list_pods, forget=self._board.forget,
            wake=self.wake, failed=self._after_failure,
        )  # fmt: skip
        self._events = events
        self._job_writes = JobWrites(events)
        self._farewells: set[asyncio.Task[None]] = set()
        self._passes = 0
        self.gap = asyncio.Event()  # set while no decision is being made or carried out
        self.gap.set()
        self._turns = Turns(self.gap)
        self._closed = False

    def wake(self, uid: str) -> None:
        """Have a job looked at soon. Cheap; many wakes before the next pass are one."""
        if uid not in self._store.jobs or self._closed:
            return
        worker = self._workers.get(uid)
        if worker is None:
            worker = self._workers[uid] = Worker(PodCreation(self._desk, uid), PodDeletion(self._desk, uid))
        if worker.task is None or worker.task.done():
            worker.task = asyncio.create_task(self._run(uid, worker), name=f"job {uid}")
            worker.task.add_done_callback(partial(self._has_ended, uid))
        worker.wake.set()

    def _has_ended(self, uid: str, task: asyncio.Task[None]) -> None:
        """See to it that a job is cared for as long as it is there, whatever ended its task."""
        worker = self._workers.get(uid)
        if self._closed or worker is None or worker.task is not task:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        note_mistake("task", error or RuntimeError("the task of a job ended"), self._store.jobs.get(uid))
        asyncio.get_running_loop().call_later(LAST_RETRY_S, self.wake, uid)

    def forget(self, uid: str) -> None:
        """Stop caring for a job that is gone."""
        worker = self._workers.pop(uid, None)
        job = self._store.jobs.get(uid)
        for pod_uid in job.pods if job else ():
            self._board.forget(pod_uid)
        self._store.drop_job(uid)
        self._counts.forget(uid)
        self._queues.forget(uid)
        self._job_writes.forget(uid)
        if worker is not None and worker.task is not None:
            worker.task.cancel()
            worker.withdraw()

    @property
    def queues_wanted(self) -> asyncio.Event:
        """Set once there is a job with a queue."""
        return self._queues.wanted

    async def follow_queues(self, namespaces: Sequence[str]) -> None:
        """Keep what is known of queues up to date, in these namespaces or in all, until cancelled."""
        await self._queues.follow(namespaces)

    def queues_are_back(self) -> None:
        """Have what waits for Kueue tried again: its objects can be read again."""
        self._queues.are_back()

    def forget_pod(self, pod_uid: str) -> None:
        """Stop asking the agent of a pod that is gone."""
        self._board.forget(pod_uid)

    async def close(self) -> None:
        """End all tasks, for good, and write the Events that wait; training goes on."""
        self._closed = True
        tasks = [*(w.task for w in self._workers.values() if w.task is not None), *self._farewells]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(part.calls.close() for w in self._workers.values() for part in (w.creation, w.deletion)))
        await self._board.close()
        await self._events.close()

    async def _run(self, uid: str, worker: Worker) -> None:
        retry_s = FIRST_RETRY_S
        while uid in self._store.jobs:
            await clock.wait(worker.wake, worker.due)
            await worker.rest()
            await self._turns.take(worker.decision_s)
            worker.wake.clear()
            job = self._store.jobs.get(uid)
            if job is None:
                return
            try:
                with self._under_way(), metrics.RECONCILE_SECONDS.time():
                    worker.due = await self._pass(job, worker)
                retry_s = FIRST_RETRY_S
                if worker.operator_error:
                    worker.operator_error = ""
                    worker.wake.set()  # the status must not tell of it any more
                continue
            except Exception as error:
                # The outer edge of one job's task: whatever is wrong with it must not touch the others.
                if is_overtaken(error):
                    worker.withdraw()  # another operator may have gone on with it
                await self._after_failed_pass(job, worker, error)
                if not isinstance(error, CALL_ERRORS):
                    retry_s = LAST_RETRY_S
            worker.due = clock.now() + timedelta(seconds=retry_s)
            retry_s = min(LAST_RETRY_S, retry_s * 2)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        self._passes += 1
        self.gap.clear()
        try:
            yield
        finally:
            self._passes -= 1
            if not self._passes:
                self.gap.set()

    async def _after_failed_pass(self, job: Job, worker: Worker, error: Exception) -> None:
        """Tell of a pass that failed. Raises nothing: that this fails, too, must not end the care for the job."""
        try:
            if isinstance(error, CALL_ERRORS):
                await self._after_failure(job, error)
                return
            note_mistake("pass", error, job)
            worker.operator_error = mistake_text(error)
            await tell_mistake(
                worker.operator_error, job, clock.now(),
                api=self._api, store=self._store, events=self._events, writes=self._job_writes,
            )  # fmt: skip
        except CALL_ERRORS as second:
            log.warning("a failure could not be told: %s %s", type(second).__name__, second, extra=about(job.fact))
        except Exception as second:  # the outer edge of one job's task, as above
            note_mistake("handling", second, job)

    async def _after_failure(self, job: Job, error: Exception) -> None:
        """Tell why something about a job did not work, and see whether the job is what it was taken for."""
        if not isinstance(error, CALL_ERRORS):
            note_mistake("pods", error, job)
            return
        if not isinstance(error, ApiError) or error.status not in (404, 409):
            log.warning("a call to the API server failed: %s %s", type(error).__name__, error, extra=about(job.fact))
            return
        # Somebody wrote or removed the job before us: decide anew on what it is now.
        if job.fact.record is None:
            job.listed = False  # it was another operator, perhaps
        try:
            body = await self._api.effective_job(job.fact.namespace, job.fact.name)
        except CALL_ERRORS as second:
            if isinstance(second, ApiError) and second.status == 404:
                self._is_gone(job)
            else:
                log.warning("cannot read the job: %s %s", type(second).__name__, second, extra=about(job.fact))
            return
        self._store.put_job(body)
        uid = body["metadata"]["uid"]
        if uid != job.fact.uid:  # made anew under the same name, perhaps before the watch tells
            self._is_gone(job)
            self.wake(uid)

    def _is_gone(self, job: Job) -> None:
        """The watch does not tell of what went while it was broken."""
        log.info("the job is gone", extra=about(job.fact))
        self.forget(job.fact.uid)

    async def _pass(self, job: Job, worker: Worker) -> datetime | None:
        if not job.listed:
            self._store.expect_no_pods(job)
        if not job.listed:
            await self._list_pods(job)
        await self._queues.look(job)
        self._follow_agents(job)
        made = await self._decide(job, worker)
        # The Secret is the same whatever is decided, so it need not wait for the record.
        _, may_create = await together(
            self._write_record(made), worker.creation.create_secret(made.job, made.creations)
        )
        if is_released(job):
            self._is_gone(job)
            return None
        calls, todo = self._calls(made), made.todo
        # The status tells what the record says, so neither it nor the actions wait for the other.
        await together(self._act(made, calls), self._report_and_supply(job, worker, made, calls, may_create=may_create))
        self._counts.note(job.fact.uid, todo.conditions[-1].type, todo.record.phase_times)
        if calls:  # what came of them is looked at soon: they may be needed again
            return min(todo.wake_at or datetime.max.replace(tzinfo=UTC), clock.now() + COMMAND_RETRY)
        return todo.wake_at

    async def _decide(self, job: Job, worker: Worker) -> Decision:
        """Decide, and have no calls for pods go on that are not wanted any more."""
        while True:
            began = asyncio.get_running_loop().time()
            with metrics.DECISION_SECONDS.time():
                todo = plan(self._observe(job, worker))
            worker.decided(began)
            # All at once: each call for pods that is answered from here on changes what this decision rests on.
            if worker.keep_only(todo):
                creations = worker.creation.missing(actions_of(CreatePod, todo))
                return Decision(copy.copy(job), todo, creations, worker.deletion.missing(actions_of(DeletePod, todo)))
            await together(worker.creation.calls.answered(), worker.deletion.calls.answered())

    # -- observe

    async def _list_pods(self, job: Job) -> None:
        bodies, version = await self._api.list_pods(job.fact.namespace, job.fact.uid)
        known = set(job.pods)
        self._store.replace_pods(job.fact.uid, bodies, version)
        for uid in known - set(job.pods):
            self._board.forget(uid)

    def _follow_agents(self, job: Job) -> None:
        port = job.fact.policy.agent_port if job.fact.policy else None
        for uid, pod in job.pods.items():
            restarts = pod.container.restart_count if pod.container is not None else 0
            if pod.ended or (pod.container is not None and pod.container.ended):
                self._board.retire(uid)
            elif pod.ip and pod.started and port is not None and not self._board.watches(uid, pod.ip, port, restarts):
                self._board.watch(uid, replace(self._address(job, pod, port), restarts=restarts))

    def _address(self, job: Job, pod: ObservedPod, port: int) -> Address:
        return Address(job.fact.uid, pod.ip, port, self._tokens.held_by(job.fact, pod))

    def _observe(self, job: Job, worker: Worker) -> Snapshot:
        pods, quota = tuple(job.pods.values()), self._queues.seen(job)
        return Snapshot(
            now=clock.now(),
            job=job.fact,
            pods=pods,
            agents={pod.name: self._board.fact(pod.uid) for pod in pods},
            nodes=self._store.nodes_of(job),
            operator_error=worker.operator_error,
            refusal=worker.creation.refusal.why,
            refused_until=worker.creation.refusal.until,
            pod_deletion_trouble=worker.deletion.why_kept,
            pods_listed_at=job.pods_listed_at,
            capacity_freed_at=self._store.capacity_freed_at,
            workloads=quota.workloads,
            default_queue=quota.default_queue,
            queue_trouble=quota.trouble,
            queue_fact=quota.queue,
            quota_return_trouble=quota.quota_return_trouble,
        )

    # -- write the record first

    async def _write_record(self, made: Decision) -> None:
        """Write the record over the version that the decision saw, and no other."""
        job, todo = made.job, made.todo
        metadata = metadata_changes(job, todo)
        # Who is about to stop what is newer than its record must know that its record is the newest: another operator may
        # have gone on. A patch that changes nothing is refused just so when it rests on an old version.
        is_doubtful = any(isinstance(a, StopWorkers) and a.generation > todo.record.generation for a in todo.actions)
        if not metadata and not is_doubtful:
            return
        version = str(job.body["metadata"]["resourceVersion"])
        before = job.fact.record or Record()
        call = self._api.patch_metadata(job.fact, version, metadata)
        body = await self._job_writes.written("record", job.fact, call)
        self._store.put_job(body)
        self._counts.written(before, todo)
        for entry in todo.history:
            log.info(
                "generation allocated",
                extra={**about(job.fact), "generation": entry.generation, "from": entry.from_size, "to": entry.to_size,
                       "cause": entry.cause},
            )  # fmt: skip

    # -- act

    def _calls(self, made: Decision) -> list[Command]:
        """Give the calls to agents that a decision asks for."""
        orders = self._orders(made.job, made.todo.record)
        return [call for action in made.todo.actions if orders and (call := orders.of(action)) is not None]

    async def _act(self, made: Decision, calls: list[Command]) -> None:
        """Carry out what a decision wants, but for pods."""
        job, todo = made.job, made.todo
        await self._send(job, [call for call in calls if call.path != "/shutdown"])
        goes = {action.uid for action in actions_of(DeletePod, todo)}
        for call in calls:
            if call.path == "/shutdown" and call.pod_uid not in goes:
                self._bid_farewell(job, call)
        # Quota that Kueue waits for does not wait for what is asked for.
        await self._queues.give_back(job, todo)
        await self._verify_and_end(job, todo)
        await self._queues.ask(job, todo)

    async def _supply(self, worker: Worker, made: Decision, calls: list[Command], *, may_create: bool) -> None:
        """Begin what a decision wants of pods. Who has to go comes first.

        An agent is told to leave after its pod was deleted: a pod that ends before anybody knows that it was sent away would
        look like one that failed, and who refuses its deletion may mean to protect its work.
        """
        job = made.job
        farewells = {call.pod_uid: call for call in calls if call.path == "/shutdown"}
        worker.deletion.begin(job, made.deletions, lambda action: self._bid_farewell(job, farewells.get(action.uid)))
        self._tell(job, deletion_notes(made.deletions))
        if may_create:
            await worker.creation.begin(job, made.creations)

    def _bid_farewell(self, job: Job, call: Command | None) -> None:
        """Tell an agent to leave, beside all else: the kubelet tells it too, and nodes that are gone answer nobody for seconds."""
        if call is None:
            return
        task = asyncio.create_task(self._send(job, [call]), name="farewell")
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _verify_and_end(self, job: Job, todo: Plan) -> None:
        for action in todo.actions:
            if isinstance(action, ListPods):
                await self._list_pods(job)
            elif isinstance(action, DeleteJob):
                await self._job_writes.written("job", job.fact, self._api.delete_job(job.fact))

    async def _send(self, job: Job, calls: list[Command]) -> None:
        for problem in await self._commander.send(calls):
            metrics.AGENT_FAILURES.inc()
            log.warning(problem, extra=about(job.fact))

    def _orders(self, job: Job, record: Record) -> Orders | None:
        policy = job.fact.policy
        if policy is None:
            return None
        pods = {pod.name: pod for pod in job.pods.values()}
        return Orders(
            effective_spec(job.body), pods, record, self._board, lambda pod: self._address(job, pod, policy.agent_port)
        )

    # -- report

    async def _report_and_supply(
        self, job: Job, worker: Worker, made: Decision, calls: list[Command], *, may_create: bool
    ) -> None:
        """Begin with the pods once the status is written, or cannot be: many calls at once would only keep that one waiting."""
        (error,) = await asyncio.gather(self._report(job, made.todo), return_exceptions=True)
        await self._supply(worker, made, calls, may_create=may_create)
        if error is not None:
            raise error

    async def _report(self, job: Job, todo: Plan) -> None:
        """Write the status, then have Events written: those of conditions come with the next status where this one fails."""
        await self._write_status(job, todo)
        self._tell(job, todo.events)

    async def _write_status(self, job: Job, todo: Plan) -> None:
        status = status_change(job, todo)
        if status is None:
            return
        before = job.fact
        call = self._api.apply_status(job.fact, status)
        self._store.put_job(await self._job_writes.written("status", job.fact, call))
        if replace(job.fact, conditions=before.conditions, scaling=before.scaling) != before:
            self.wake(job.fact.uid)  # the answer carried somebody's edit, which the watch will not tell as new

    def _tell(self, job: Job, events: Sequence[JobEvent]) -> None:
        for event in events:
            level = logging.WARNING if event.warning else logging.INFO
            log.log(level, event.message, extra={**about(job.fact), "reason": event.reason})
        self._events.tell(job.fact, tuple(events))
