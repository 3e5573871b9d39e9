"""One task for each job, which runs a reconcile pass whenever something changes; what happens after a pass fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from . import clock, metrics
from .agents.agent_ports import ConnectAgents
from .core.snapshot import ObservedJob
from .decision_limiter import DecisionLimiter
from .job_agents import JobAgents
from .job_intake import Body, JobIntake
from .job_metrics import JobMetrics
from .job_task import JobTask
from .job_writes import JobWrites
from .kube.api import CALL_ERRORS, ApiError
from .kube.api_ports import EventSink, JobCalls
from .kube.job_keys import JobKeys
from .kube.queue_api import QueueApi
from .kube.store import Job, Store
from .kube.writes import is_conflict, log_fields
from .operator_errors import log_operator_error, operator_error_text, report_operator_error
from .pod_control import PodControl
from .pod_creation import PodCreation
from .pod_deletion import PodDeletion
from .queueing import Queues
from .reconcile_pass import ReconcilePass
from .spare_capacity import SpareCapacityReader

log = logging.getLogger(__name__)

# Delay before the retry of a failed pass; it doubles each time.
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 15.0
NO_KEYS = JobKeys()


class Reconciler:
    """Runs a reconcile pass for a job whenever something about it changes or its next pass is due.

    All I/O goes through its arguments. Time comes from `clock` and from the running event loop. runs, hand_over: as in `JobIntake`.
    """

    def __init__(
        self,
        api: JobCalls,
        store: Store,
        agents: ConnectAgents,
        events: EventSink,
        keys: JobKeys = NO_KEYS,
        *,
        runs: Callable[[Body], bool] = lambda _job: True,
        hand_over: Callable[[ObservedJob, Body], None] = lambda _job, _body: None,
    ) -> None:
        self._api = api
        self._store = store
        self.jobs = JobIntake(store, self.forget, runs, hand_over)
        self._events = events
        self._agents = JobAgents(agents, self.wake, keys)
        self._job_tasks: dict[str, JobTask] = {}
        self._metrics = JobMetrics(self._newest_step)
        self._queues = Queues(QueueApi(api), store, self.wake, self._list_pods)
        self._control = PodControl(
            api, store, keys, place=self._queues.place_pods, list_pods=self._list_pods, forget=self._agents.forget,
            wake=self.wake, failed=self._after_failure,
        )  # fmt: skip
        self._job_writes = JobWrites(events)
        self._spare_capacity = SpareCapacityReader(api, self.wake)
        self._reconcile = ReconcilePass(
            api=api, store=store, jobs=self.jobs, agents=self._agents, queues=self._queues, events=events, writes=self._job_writes,
            spare_capacity=self._spare_capacity, metrics=self._metrics, list_pods=self._list_pods, wake=self.wake,
            forget_job=self._forget_deleted,
        )  # fmt: skip
        self._passes = 0
        self.no_pass_running = asyncio.Event()  # set while no decision is being made or carried out
        self.no_pass_running.set()
        self._decision_limiter = DecisionLimiter(self.no_pass_running)
        self._closed = False

    def wake(self, uid: str) -> None:
        """Request a pass for a job. Cheap: several requests before the next pass count as one."""
        if uid not in self._store.jobs or self._closed:
            return
        job_task = self._job_tasks.get(uid)
        if job_task is None:
            job_task = self._job_tasks[uid] = JobTask(PodCreation(self._control, uid), PodDeletion(self._control, uid))
        if job_task.task is None or job_task.task.done():
            job_task.task = asyncio.create_task(self._run(uid, job_task), name=f"job {uid}")
            job_task.task.add_done_callback(partial(self._task_ended, uid))
        job_task.wake.set()

    def _task_ended(self, uid: str, task: asyncio.Task[None]) -> None:
        """Start the task of a job again if it ended while the job exists."""
        job_task = self._job_tasks.get(uid)
        if self._closed or job_task is None or job_task.task is not task:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        log_operator_error("task", error or RuntimeError("the task of a job ended"), self._store.jobs.get(uid))
        asyncio.get_running_loop().call_later(LAST_RETRY_S, self.wake, uid)

    def forget(self, uid: str) -> None:
        """Drop everything about a job that was deleted, or that another controller runs."""
        job_task = self._job_tasks.pop(uid, None)
        job = self._store.jobs.get(uid)
        for pod_uid in job.pods if job else ():
            self._agents.forget(pod_uid)
        self._store.drop_job(uid)
        self.jobs.drop(uid)
        self._metrics.forget(uid)
        self._queues.forget(uid)
        self._spare_capacity.forget(uid)
        self._job_writes.forget(uid)
        if job_task is not None and job_task.task is not None:
            job_task.task.cancel()
            job_task.cancel_waiting()

    @property
    def queues_needed(self) -> asyncio.Event:
        """Set once there is a job with a queue."""
        return self._queues.needed

    async def poll_queues(self, namespaces: Sequence[str]) -> None:
        """Keep what is known of queues up to date, in these namespaces or in all, until cancelled."""
        await self._queues.poll(namespaces)

    def retry_queues(self) -> None:
        """Retry what waits for Kueue, because its objects can be read again."""
        self._queues.retry_all()

    def _newest_step(self, uid: str) -> int | None:
        """Give the newest step that the agents of a job reported."""
        job = self._store.jobs.get(uid)
        steps = [self._agents.fact(pod_uid).step for pod_uid in job.pods] if job is not None else []
        return max((step for step in steps if step is not None), default=None)

    def forget_pod(self, pod_uid: str) -> None:
        """Stop polling the agent of a pod that was deleted."""
        self._agents.forget(pod_uid)

    async def close(self) -> None:
        """End all tasks for good and write the Events that wait. Training continues."""
        self._closed = True
        tasks = [w.task for w in self._job_tasks.values() if w.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._spare_capacity.close()
        await asyncio.gather(
            *(part.calls.close() for w in self._job_tasks.values() for part in (w.creation, w.deletion))
        )
        await self._agents.close()
        await self._events.close()

    async def _run(self, uid: str, job_task: JobTask) -> None:
        retry_s = FIRST_RETRY_S
        while uid in self._store.jobs:
            await clock.wait(job_task.wake, job_task.due)
            await job_task.wait_for_pod_calls()
            await self._decision_limiter.wait(job_task.decision_s)
            job_task.wake.clear()
            job = self._store.jobs.get(uid)
            if job is None:
                return
            try:
                with self._pass_running(), metrics.RECONCILE_SECONDS.time():
                    job_task.due = await self._reconcile.run(job, job_task)
                retry_s = FIRST_RETRY_S
                if job_task.operator_error:
                    job_task.operator_error = ""
                    job_task.wake.set()  # to remove the error from the status
                continue
            except Exception as error:
                # The outer edge of one job's task: no error of one job may affect other jobs.
                if is_conflict(error):
                    job_task.cancel_waiting()  # another operator may have taken over
                await self._report_failed_pass(job, job_task, error)
                if not isinstance(error, CALL_ERRORS):
                    retry_s = LAST_RETRY_S
            job_task.due = clock.now() + timedelta(seconds=retry_s)
            retry_s = min(LAST_RETRY_S, retry_s * 2)

    @contextmanager
    def _pass_running(self) -> Iterator[None]:
        self._passes += 1
        self.no_pass_running.clear()
        try:
            yield
        finally:
            self._passes -= 1
            if not self._passes:
                self.no_pass_running.set()

    async def _report_failed_pass(self, job: Job, job_task: JobTask, error: Exception) -> None:
        """Report a failed pass. Raises nothing, so that a failure here does not end the job's task."""
        try:
            if isinstance(error, CALL_ERRORS):
                await self._after_failure(job, error)
                return
            log_operator_error("pass", error, job)
            job_task.operator_error = operator_error_text(error)
            await report_operator_error(
                job_task.operator_error, job, clock.now(),
                api=self._api, jobs=self.jobs, events=self._events, writes=self._job_writes,
            )  # fmt: skip
        except CALL_ERRORS as second:
            log.warning(
                "a failure could not be reported: %s %s", type(second).__name__, second, extra=log_fields(job.fact)
            )
        except Exception as second:  # the outer edge of one job's task, as above
            log_operator_error("handling", second, job)

    async def _after_failure(self, job: Job, error: Exception) -> None:
        """Report a failure about a job; after a conflict, read the job again."""
        if not isinstance(error, CALL_ERRORS):
            log_operator_error("pods", error, job)
            return
        if not isinstance(error, ApiError) or error.status not in (404, 409):
            log.warning(
                "a call to the API server failed: %s %s", type(error).__name__, error, extra=log_fields(job.fact)
            )
            return
        # Another client wrote or deleted the job: the next pass decides on its present state.
        if job.fact.record is None:
            job.listed = False  # perhaps by another operator, which may have created pods
        try:
            body = await self._api.effective_job(job.fact.namespace, job.fact.name)
        except CALL_ERRORS as second:
            if isinstance(second, ApiError) and second.status == 404:
                self._forget_deleted(job)
            else:
                log.warning("cannot read the job: %s %s", type(second).__name__, second, extra=log_fields(job.fact))
            return
        uid = body["metadata"]["uid"]
        if uid != job.fact.uid:  # recreated under the same name, perhaps before the watch shows it
            self._forget_deleted(job)
            self.jobs.take(body)
            self.wake(uid)
        elif uid in self._store.jobs:  # the watch may have shown meanwhile that it is gone, or given away
            self.jobs.take(body)

    def _forget_deleted(self, job: Job) -> None:
        """Forget a job whose deletion the watch may have missed."""
        log.info("the job is gone", extra=log_fields(job.fact))
        self.forget(job.fact.uid)

    async def _list_pods(self, job: Job) -> None:
        bodies, version = await self._api.list_pods(job.fact.namespace, job.fact.uid)
        known = set(job.pods)
        self._store.replace_pods(job.fact.uid, bodies, version)
        for uid in known - set(job.pods):
            self._agents.forget(uid)
