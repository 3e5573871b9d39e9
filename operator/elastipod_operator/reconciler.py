"""The shell around plan(): observe, decide, write the record, act, report. One task per job, one decision at a time."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp

from . import clock, metrics
from .agents.board import Address, Board
from .agents.commands import Command, Commander
from .agents.orders import Orders
from .core.actions import CreatePod, DeleteJob, DeletePod, Plan, StopWorkers, VerifyPods
from .core.backoff import backoff
from .core.facts import Observed, PodFact
from .core.plan import plan
from .core.record import Record
from .counts import JobCounts
from .kube.api import CALL_ERRORS, Api, ApiError
from .kube.applied import effective_spec
from .kube.changes import is_released, metadata_changes, status_change
from .kube.placement import Placement
from .kube.pods import pod_manifest
from .kube.queue_api import QueueApi
from .kube.store import Job, Store
from .kube.tokens import JobToken, Tokens, secret_manifest
from .queueing import Queues

log = logging.getLogger(__name__)

# After a failed pass: first quickly, then with patience.
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 15.0
# Create calls that the API server refused (quota, admission) are repeated with this back-off.
REFUSAL_FIRST_S, REFUSAL_LAST_S = 5.0, 120.0
# Commands that failed are looked at again so soon.
COMMAND_RETRY = timedelta(seconds=1)
NO_TOKENS = Tokens()
CANNOT_AUTHENTICATE = (
    "the Secret with the token of the job was refused by the API server (give the operator the right to create Secrets, or set "
    "spec.elastipod.authentication to Off)"
)
WRITE_PARALLEL = 16
# A job whose time has always come must not keep the event loop from the others.
MIN_PAUSE_S = 0.01


@dataclass(slots=True)
class Worker:
    """The task of one job and what it remembers between two passes; all of it may be lost without harm."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    refusal: str = ""
    refused_until: datetime | None = None
    refusals: int = 0


class Reconciler:
    """Runs a decision for a job whenever something about it changed or a time has come."""

    def __init__(self, api: Api, store: Store, session: aiohttp.ClientSession, tokens: Tokens = NO_TOKENS) -> None:
        self._api = api
        self._tokens = tokens
        self._store = store
        self._board = Board(session, self.wake)
        self._commander = Commander(session)
        self._workers: dict[str, Worker] = {}
        self._counts = JobCounts()
        self._queues = Queues(QueueApi(api), store, self.wake, self._list_pods)
        self._writing = asyncio.Semaphore(WRITE_PARALLEL)
        self._closed = False

    def wake(self, uid: str) -> None:
        """Have a job looked at soon. Cheap; many wakes before the next pass are one."""
        if uid not in self._store.jobs or self._closed:
            return
        worker = self._workers.get(uid)
        if worker is None:
            worker = self._workers[uid] = Worker()
            worker.task = asyncio.create_task(self._run(uid, worker), name=f"job {uid}")
        worker.wake.set()

    def forget(self, uid: str) -> None:
        """Stop caring for a job that is gone."""
        worker = self._workers.pop(uid, None)
        job = self._store.jobs.get(uid)
        for pod_uid in job.pods if job else ():
            self._board.forget(pod_uid)
        self._store.drop_job(uid)
        self._counts.forget(uid)
        self._queues.forget(uid)
        if worker is not None and worker.task is not None:
            worker.task.cancel()

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
        """End all tasks, for good; training goes on."""
        self._closed = True
        tasks = [w.task for w in self._workers.values() if w.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._board.close()

    async def _run(self, uid: str, worker: Worker) -> None:
        retry_s = FIRST_RETRY_S
        due: datetime | None = None
        while uid in self._store.jobs:
            await _wait(worker.wake, due)
            worker.wake.clear()
            job = self._store.jobs.get(uid)
            if job is None:
                return
            try:
                with metrics.RECONCILE_SECONDS.time():
                    due = await self._pass(job, worker)
                retry_s = FIRST_RETRY_S
                continue
            except CALL_ERRORS as error:
                await self._after_failure(job, error)
            except Exception:
                # The outer edge of one job's task: whatever is wrong with it must not touch the others.
                log.exception("a decision failed", extra=_about(job))
                retry_s = LAST_RETRY_S
            due = clock.now() + timedelta(seconds=retry_s)
            retry_s = min(LAST_RETRY_S, retry_s * 2)

    async def _after_failure(self, job: Job, error: Exception) -> None:
        if not isinstance(error, ApiError) or error.status not in (404, 409):
            log.warning("a call to the API server failed: %s %s", type(error).__name__, error, extra=_about(job))
            return
        # Somebody wrote or removed the job before us: decide anew on what it is now.
        try:
            body = await self._api.read_job(job.fact.namespace, job.fact.name)
        except CALL_ERRORS as second:
            if isinstance(second, ApiError) and second.status == 404:
                self._is_gone(job)
            else:
                log.warning("cannot read the job: %s %s", type(second).__name__, second, extra=_about(job))
            return
        self._store.put_job(body)
        uid = body["metadata"]["uid"]
        if uid != job.fact.uid:  # made anew under the same name, perhaps before the watch tells
            self._is_gone(job)
            self.wake(uid)

    def _is_gone(self, job: Job) -> None:
        """The watch does not tell of what went while it was broken."""
        log.info("the job is gone", extra=_about(job))
        self.forget(job.fact.uid)

    async def _pass(self, job: Job, worker: Worker) -> datetime | None:
        if not job.listed:
            await self._list_pods(job)
        await self._queues.look(job)
        self._follow_agents(job)
        with metrics.DECISION_SECONDS.time():
            todo = plan(self._observe(job, worker))
        as_seen = copy.copy(job)  # what the watches show meanwhile is for the next decision
        await self._write_record(job, todo)
        if is_released(job):
            self._is_gone(job)
            return None
        is_called = await self._act(as_seen, worker, todo)
        await self._write_status(job, todo)
        await self._tell(job, todo)
        self._counts.note(job.fact.uid, todo.conditions[-1].type, todo.record.ledger)
        if is_called:
            return min(todo.wake_at or datetime.max.replace(tzinfo=UTC), clock.now() + COMMAND_RETRY)
        return todo.wake_at

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
            if pod.ended:
                self._board.forget(uid)
            elif pod.ip and pod.started and port is not None and not self._board.watches(uid, pod.ip, port):
                self._board.watch(uid, self._address(job, pod, port))

    def _address(self, job: Job, pod: PodFact, port: int) -> Address:
        return Address(job.fact.uid, pod.ip, port, self._tokens.held_by(job.fact, pod.token_secret))

    def _observe(self, job: Job, worker: Worker) -> Observed:
        pods, quota = tuple(job.pods.values()), self._queues.seen(job)
        return Observed(
            now=clock.now(),
            job=job.fact,
            pods=pods,
            agents={pod.name: self._board.fact(pod.uid) for pod in pods},
            nodes=self._store.nodes_of(job),
            refusal=worker.refusal,
            refused_until=worker.refused_until,
            listed_at=job.listed_at,
            room_at=self._store.room_at,
            workloads=quota.workloads,
            default_queue=quota.default_queue,
            queue_trouble=quota.trouble,
            queue_fact=quota.queue,
        )

    # -- write the record first

    async def _write_record(self, job: Job, todo: Plan) -> None:
        metadata = metadata_changes(job, todo)
        # Who is about to stop what is newer than its record must know that its record is the newest: another operator may
        # have gone on. A patch that changes nothing is refused just so when it rests on an old version.
        is_doubtful = any(isinstance(a, StopWorkers) and a.generation > todo.record.generation for a in todo.actions)
        if not metadata and not is_doubtful:
            return
        version = str(job.body["metadata"]["resourceVersion"])
        before = job.fact.record or Record()
        body = await self._written("record", self._api.patch_metadata(job.fact, version, metadata))
        self._store.put_job(body)
        self._counts.written(before, todo)
        for entry in todo.history:
            log.info(
                "generation allocated",
                extra={**_about(job), "generation": entry.generation, "from": entry.from_size, "to": entry.to_size,
                       "cause": entry.cause},
            )  # fmt: skip

    # -- act

    async def _act(self, job: Job, worker: Worker, todo: Plan) -> bool:
        """Carry out the actions on the job as the decision saw it; gives True when agents were called.

        What came of a call is looked at soon: it may be needed again. An agent is told to leave after its pod was deleted:
        a pod that ends before anybody knows that it was sent away would look like one that failed.
        """
        orders = self._orders(job, todo.record)
        calls = [call for action in todo.actions if orders and (call := orders.of(action)) is not None]
        await self._send(job, [call for call in calls if call.path != "/shutdown"])
        # Who has to go, and quota that Kueue waits for, do not wait for pods that cannot be made.
        await self._delete_pods(job, [a for a in todo.actions if isinstance(a, DeletePod)])
        await self._queues.give_back(job, todo)
        await self._create_pods(job, worker, [a for a in todo.actions if isinstance(a, CreatePod)])
        for action in todo.actions:
            if isinstance(action, VerifyPods):
                await self._list_pods(job)
            elif isinstance(action, DeleteJob):
                await self._written("job", self._api.delete_job(job.fact))
        await self._send(job, [call for call in calls if call.path == "/shutdown"])
        await self._queues.ask(job, todo)
        return bool(calls)

    async def _send(self, job: Job, calls: list[Command]) -> None:
        for problem in await self._commander.send(calls):
            metrics.AGENT_FAILURES.inc()
            log.warning(problem, extra=_about(job))

    def _orders(self, job: Job, record: Record) -> Orders | None:
        policy = job.fact.policy
        if policy is None:
            return None
        pods = {pod.name: pod for pod in job.pods.values()}
        return Orders(
            job.body["spec"], pods, record, self._board, lambda pod: self._address(job, pod, policy.agent_port)
        )

    async def _create_pods(self, job: Job, worker: Worker, actions: list[CreatePod]) -> None:
        if worker.refused_until is not None and clock.now() < worker.refused_until:
            return
        token = self._tokens.of(job.fact)
        try:
            if actions and token is not None:
                await self._create_secret(job, token)
        except ApiError as error:
            if not _is_refusal(error):
                raise
            self._refused(job, worker, f"{CANNOT_AUTHENTICATE}: {error}")
            return
        secret = token.secret if token is not None else ""
        placed, problem = await self._queues.placed(job, actions)
        results = await asyncio.gather(*(self._create_pod(job, *one, secret) for one in placed), return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        if failures := [error for error in errors if not _is_refusal(error)]:
            raise failures[0]
        refusals = [str(error) for error in errors if not _is_taken(error)]
        if len(refusals) < len(errors):
            refusals += await self._taken_by_others(job, actions)
        if problem and not refusals:
            self._refused(job, worker, problem)
            return
        if not refusals:
            if worker.refusal:
                worker.refusal, worker.refusals, worker.refused_until = "", 0, None
                worker.wake.set()  # the status must not tell of it any more
            return
        self._refused(job, worker, f"{len(refusals)} pods were refused by the API server: {refusals[0]}")

    def _refused(self, job: Job, worker: Worker, why: str) -> None:
        """Say why no pods are created for now, and when they are tried again."""
        worker.refusal = why
        worker.refusals += 1
        wait = backoff(
            timedelta(seconds=REFUSAL_FIRST_S), timedelta(seconds=REFUSAL_LAST_S), worker.refusals, job.fact.uid
        )
        worker.refused_until = clock.now() + wait
        asyncio.get_running_loop().call_later(wait.total_seconds(), worker.wake.set)

    async def _create_secret(self, job: Job, token: JobToken) -> None:
        """Create the Secret that new pods refer to; it is there already but for the first time, or when somebody took it away."""
        try:
            await self._written("secret", self._api.create_secret(secret_manifest(job.fact, token)))
        except ApiError as error:
            if not _is_taken(error):
                raise

    async def _create_pod(self, job: Job, order: CreatePod, placed: Placement | None, token_secret: str) -> None:
        assert job.fact.policy is not None
        manifest = pod_manifest(
            job.fact, effective_spec(job.body), job.fact.policy, order.pod, order.nnodes, token_secret,
            generation=order.generation, avoids=order.avoids, placed=placed,
        )  # fmt: skip
        async with self._writing:
            self._store.put_pod(await self._written("pod", self._api.create_pod(manifest)))

    async def _taken_by_others(self, job: Job, actions: list[CreatePod]) -> list[str]:
        """Tell of names that pods bear which are none of this job's; its own were only not known yet."""
        await self._list_pods(job)
        ours = {pod.id for pod in job.pods.values()}
        self.wake(job.fact.uid)
        return [
            f"pod {a.pod.name(job.fact.name)} exists and does not belong to this job; delete it or rename the job"
            for a in actions
            if a.pod not in ours
        ]

    async def _delete_pods(self, job: Job, actions: list[DeletePod]) -> None:
        results = await asyncio.gather(*(self._delete_pod(job, a) for a in actions), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _delete_pod(self, job: Job, action: DeletePod) -> None:
        log.info("pod deleted", extra={**_about(job), "pod": action.name, "reason": action.why, "force": action.force})
        try:
            async with self._writing:
                body = await self._written(
                    "pod", self._api.delete_pod(job.fact.namespace, action.name, action.uid, force=action.force)
                )
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            body = {}
        if body.get("kind") == "Pod" and not action.force:
            self._store.put_pod(body)
        else:
            self._store.drop_pod_uid(job.fact.uid, action.uid)
            self._board.forget(action.uid)
            self.wake(job.fact.uid)  # where the watch missed its end, nothing else tells

    # -- report

    async def _write_status(self, job: Job, todo: Plan) -> None:
        status = status_change(job, todo)
        if status is None:
            return
        before = job.fact
        self._store.put_job(await self._written("status", self._api.apply_status(job.fact, status)))
        if replace(job.fact, conditions=before.conditions, scaling=before.scaling) != before:
            self.wake(job.fact.uid)  # the answer carried somebody's edit, which the watch will not tell as new

    async def _tell(self, job: Job, todo: Plan) -> None:
        for note in todo.notes:
            level = logging.WARNING if note.warning else logging.INFO
            log.log(level, note.message, extra={**_about(job), "reason": note.reason})
            try:
                await self._written("event", self._api.emit(job.fact, note))
            except CALL_ERRORS as error:
                log.warning("an event could not be written: %s", error, extra=_about(job))

    async def _written(self, what: str, call: Any) -> Any:
        try:
            with metrics.API_SECONDS.time():
                answer = await call
        except Exception:
            metrics.API_CALLS.labels(what, "failed").inc()
            raise
        metrics.API_CALLS.labels(what, "ok").inc()
        return answer


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, ApiError) and error.status in (400, 403, 409, 422)


def _is_taken(error: BaseException) -> bool:
    return isinstance(error, ApiError) and error.status == 409 and "already exists" in str(error)


async def _wait(event: asyncio.Event, due: datetime | None) -> None:
    if due is None:
        await event.wait()
        return
    seconds = max((due - clock.now()).total_seconds(), MIN_PAUSE_S)
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _about(job: Job) -> dict[str, str]:
    return {"job": f"{job.fact.namespace}/{job.fact.name}"}
