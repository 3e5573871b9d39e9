"""The shell around plan(): observe, decide, write the state record, act, report, supply pods. One task and one pass at a time per job."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

from . import clock, metrics
from .action_table import Step, has_actions
from .agents.agent_ports import ConnectAgents
from .agents.command_builder import CommandBuilder
from .agents.commands import Command
from .agents.status_cache import Address
from .core.actions import CreatePod, DeletePod, JobEvent, Plan, StopWorkers
from .core.ending import deletion_notes
from .core.plan import plan
from .core.record import Record
from .core.snapshot import ObservedPod, Snapshot
from .decision_limiter import DecisionLimiter
from .job_metrics import JobMetrics
from .job_task import Decision, JobTask, actions_of
from .job_writes import JobWrites
from .kube.api import CALL_ERRORS, ApiError
from .kube.api_ports import EventSink, JobCalls
from .kube.applied import effective_spec
from .kube.changes import is_released, metadata_changes, status_change
from .kube.job_keys import JobKeys
from .kube.queue_api import QueueApi
from .kube.store import Job, Store
from .kube.writes import gather_all, is_conflict, log_fields
from .operator_errors import log_operator_error, operator_error_text, report_operator_error
from .pod_control import PodControl
from .pod_creation import PodCreation
from .pod_deletion import PodDeletion
from .queueing import Queues

log = logging.getLogger(__name__)

# Delay before the retry of a failed pass; it doubles each time.
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 15.0
# Delay before a pass that repeats failed commands.
COMMAND_RETRY = timedelta(seconds=1)
NO_KEYS = JobKeys()


class Reconciler:
    """Runs a reconcile pass for a job whenever something about it changes or its next pass is due.

    All I/O goes through its arguments. Time comes from `clock` and from the running event loop.
    """

    def __init__(
        self, api: JobCalls, store: Store, agents: ConnectAgents, events: EventSink, keys: JobKeys = NO_KEYS
    ) -> None:
        self._api = api
        self._keys = keys
        self._store = store
        self._agent_statuses, self._command_sender = agents(self.wake)
        self._job_tasks: dict[str, JobTask] = {}
        self._metrics = JobMetrics()
        self._queues = Queues(QueueApi(api), store, self.wake, self._list_pods)
        self._control = PodControl(
            api, store, keys, place=self._queues.place_pods, list_pods=self._list_pods, forget=self._agent_statuses.forget,
            wake=self.wake, failed=self._after_failure,
        )  # fmt: skip
        self._events = events
        self._job_writes = JobWrites(events)
        self._shutdowns: set[asyncio.Task[None]] = set()
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
        """Drop everything about a job that was deleted."""
        job_task = self._job_tasks.pop(uid, None)
        job = self._store.jobs.get(uid)
        for pod_uid in job.pods if job else ():
            self._agent_statuses.forget(pod_uid)
        self._store.drop_job(uid)
        self._metrics.forget(uid)
        self._queues.forget(uid)
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

    def forget_pod(self, pod_uid: str) -> None:
        """Stop polling the agent of a pod that was deleted."""
        self._agent_statuses.forget(pod_uid)

    async def close(self) -> None:
        """End all tasks for good and write the Events that wait. Training continues."""
        self._closed = True
        tasks = [*(w.task for w in self._job_tasks.values() if w.task is not None), *self._shutdowns]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(
            *(part.calls.close() for w in self._job_tasks.values() for part in (w.creation, w.deletion))
        )
        await self._agent_statuses.close()
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
                    job_task.due = await self._pass(job, job_task)
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
                api=self._api, store=self._store, events=self._events, writes=self._job_writes,
            )  # fmt: skip
        except CALL_ERRORS as second:
            log.warning("a failure could not be told: %s %s", type(second).__name__, second, extra=log_fields(job.fact))
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
        # Somebody else wrote or deleted the job: the next pass decides on its present state.
        if job.fact.record is None:
            job.listed = False  # perhaps by another operator, which may have created pods
        try:
            body = await self._api.effective_job(job.fact.namespace, job.fact.name)
        except CALL_ERRORS as second:
            if isinstance(second, ApiError) and second.status == 404:
                self._is_gone(job)
            else:
                log.warning("cannot read the job: %s %s", type(second).__name__, second, extra=log_fields(job.fact))
            return
        self._store.put_job(body)
        uid = body["metadata"]["uid"]
        if uid != job.fact.uid:  # recreated under the same name, perhaps before the watch shows it
            self._is_gone(job)
            self.wake(uid)

    def _is_gone(self, job: Job) -> None:
        """Forget a job whose deletion the watch may have missed."""
        log.info("the job is gone", extra=log_fields(job.fact))
        self.forget(job.fact.uid)

    async def _pass(self, job: Job, job_task: JobTask) -> datetime | None:
        """Run one reconcile pass; gives when the next one is due at the latest. Raises as Api does."""
        # 1. Observe: read what the caches do not have yet.
        await self._fill_caches(job)
        # 2. Decide.
        made = await self._decide(job, job_task)
        # 3. Write the state record. The Secret does not depend on the decision, so it is created at the same time.
        _, may_create = await gather_all(
            self._write_record(made), job_task.creation.create_secret(made.job, made.creations)
        )
        if is_released(job):
            self._is_gone(job)
            return None
        calls, todo = self._calls(made), made.todo
        # 4. Act; beside that 5. report, then 6. supply pods. The status follows from the record, so it need not wait for the actions.
        await gather_all(
            self._act(made, calls), self._report_and_supply(job, job_task, made, calls, may_create=may_create)
        )
        self._metrics.update(job.fact.uid, todo.conditions[-1].type, todo.record.phase_times)
        if calls:  # one that failed is repeated soon
            return min(todo.wake_at or datetime.max.replace(tzinfo=UTC), clock.now() + COMMAND_RETRY)
        return todo.wake_at

    async def _decide(self, job: Job, job_task: JobTask) -> Decision:
        """Decide, and cancel the pod calls that the new plan does not want."""
        while True:
            began = asyncio.get_running_loop().time()
            with metrics.DECISION_SECONDS.time():
                todo = plan(self._observe(job, job_task))
            job_task.note_decision(began)
            # No await up to the return: a pod call that is answered meanwhile would change what the decision rests on.
            if job_task.keep_only(todo):
                creations = job_task.creation.missing(actions_of(CreatePod, todo))
                return Decision(copy.copy(job), todo, creations, job_task.deletion.missing(actions_of(DeletePod, todo)))
            await gather_all(job_task.creation.calls.wait_unwanted(), job_task.deletion.calls.wait_unwanted())

    # -- observe

    async def _fill_caches(self, job: Job) -> None:
        if not job.listed:
            self._store.expect_no_pods(job)
        if not job.listed:
            await self._list_pods(job)
        await self._queues.observe(job)
        self._follow_agents(job)

    async def _list_pods(self, job: Job) -> None:
        bodies, version = await self._api.list_pods(job.fact.namespace, job.fact.uid)
        known = set(job.pods)
        self._store.replace_pods(job.fact.uid, bodies, version)
        for uid in known - set(job.pods):
            self._agent_statuses.forget(uid)

    def _follow_agents(self, job: Job) -> None:
        port = job.fact.policy.agent_port if job.fact.policy else None
        for uid, pod in job.pods.items():
            restarts = pod.container.restart_count if pod.container is not None else 0
            if pod.ended or (pod.container is not None and pod.container.ended):
                self._agent_statuses.stop_polling(uid)
            elif (
                pod.ip
                and pod.started
                and port is not None
                and not self._agent_statuses.watches(uid, pod.ip, port, restarts)
            ):
                self._agent_statuses.watch(uid, replace(self._address(job, pod, port), restarts=restarts))

    def _address(self, job: Job, pod: ObservedPod, port: int) -> Address:
        return Address(job.fact.uid, pod.ip, port, self._keys.credentials_of(job.fact, pod))

    def _observe(self, job: Job, job_task: JobTask) -> Snapshot:
        pods, quota = tuple(job.pods.values()), self._queues.snapshot(job)
        return Snapshot(
            now=clock.now(),
            job=job.fact,
            pods=pods,
            agents={pod.name: self._agent_statuses.fact(pod.uid) for pod in pods},
            nodes=self._store.nodes_of(job),
            operator_error=job_task.operator_error,
            pod_creation_error=job_task.creation.backoff.refusal,
            pod_creation_retry_at=job_task.creation.backoff.retry_at,
            pod_deletion_error=job_task.deletion.why_kept,
            pods_listed_at=job.pods_listed_at,
            capacity_freed_at=self._store.capacity_freed_at,
            workloads=quota.workloads,
            default_queue=quota.default_queue,
            queue_problem=quota.problem,
            queue_fact=quota.queue,
            quota_return_error=quota.quota_return_error,
        )

    # -- write the record first

    async def _write_record(self, made: Decision) -> None:
        """Write the record, provided that the job still has the version that the decision saw."""
        job, todo = made.job, made.todo
        metadata = metadata_changes(job, todo)
        # A plan that stops a generation newer than its record must know that the record is the newest: another operator may
        # have taken over. An empty patch is refused, too, when it carries an old resourceVersion.
        is_doubtful = any(isinstance(a, StopWorkers) and a.generation > todo.record.generation for a in todo.actions)
        if not metadata and not is_doubtful:
            return
        version = str(job.body["metadata"]["resourceVersion"])
        before = job.fact.record or Record()
        call = self._api.patch_metadata(job.fact, version, metadata)
        body = await self._job_writes.write("record", job.fact, call)
        self._store.put_job(body)
        self._metrics.record_written(before, todo)
        for entry in todo.history:
            log.info(
                "generation allocated",
                extra={**log_fields(job.fact), "generation": entry.generation, "from": entry.from_size, "to": entry.to_size,
                       "cause": entry.cause},
            )  # fmt: skip

    # -- act

    def _calls(self, made: Decision) -> list[Command]:
        """Give the calls to agents for a decision."""
        commands = self._command_builder(made.job, made.todo.record)
        return [call for action in made.todo.actions if commands and (call := commands.build(action)) is not None]

    async def _act(self, made: Decision, calls: list[Command]) -> None:
        """Carry out the actions of a decision, except those on pods."""
        job, todo = made.job, made.todo
        await self._send(job, [call for call in calls if call.path != "/shutdown"])
        goes = {action.uid for action in actions_of(DeletePod, todo)}
        for call in calls:
            if call.path == "/shutdown" and call.pod_uid not in goes:
                self._send_shutdown(job, call)
        # Kueue waits for quota that is to be released, so that comes before requests.
        carry_out: Mapping[Step, Callable[[Job, Plan], Awaitable[None]]] = {
            Step.RELEASE_QUOTA: self._queues.release_quota,
            Step.LIST_PODS: self._list_pods_if_asked,
            Step.DELETE_JOB: self._delete_job_if_asked,
            Step.REQUEST_QUOTA: self._queues.request_quota,
        }
        for handler in carry_out.values():
            await handler(job, todo)

    async def _supply(self, job_task: JobTask, made: Decision, calls: list[Command], *, may_create: bool) -> None:
        """Begin to delete and create pods, deletions first.

        An agent is shut down after its pod was deleted. A pod that ended before its deletion is known would look like a failed
        one, and whoever refuses the deletion may want to protect its work.
        """
        job = made.job
        shutdowns = {call.pod_uid: call for call in calls if call.path == "/shutdown"}
        job_task.deletion.begin(job, made.deletions, lambda action: self._send_shutdown(job, shutdowns.get(action.uid)))
        self._record_events(job, deletion_notes(made.deletions))
        if may_create:
            await job_task.creation.begin(job, made.creations)

    def _send_shutdown(self, job: Job, call: Command | None) -> None:
        """Shut an agent down in the background: a lost node takes seconds to time out, and the kubelet ends the pod anyway."""
        if call is None:
            return
        task = asyncio.create_task(self._send(job, [call]), name="farewell")
        self._shutdowns.add(task)
        task.add_done_callback(self._shutdowns.discard)

    async def _list_pods_if_asked(self, job: Job, todo: Plan) -> None:
        if has_actions(Step.LIST_PODS, todo):
            await self._list_pods(job)

    async def _delete_job_if_asked(self, job: Job, todo: Plan) -> None:
        if has_actions(Step.DELETE_JOB, todo):
            await self._job_writes.write("job", job.fact, self._api.delete_job(job.fact))

    async def _send(self, job: Job, calls: list[Command]) -> None:
        for problem in await self._command_sender.send(calls):
            metrics.AGENT_FAILURES.inc()
            log.warning(problem, extra=log_fields(job.fact))

    def _command_builder(self, job: Job, record: Record) -> CommandBuilder | None:
        policy = job.fact.policy
        if policy is None:
            return None
        pods = {pod.name: pod for pod in job.pods.values()}
        return CommandBuilder(
            effective_spec(job.body),
            pods,
            record,
            self._agent_statuses,
            lambda pod: self._address(job, pod, policy.agent_port),
        )

    # -- report

    async def _report_and_supply(
        self, job: Job, job_task: JobTask, made: Decision, calls: list[Command], *, may_create: bool
    ) -> None:
        """Report, then supply pods, even if the report failed. Many pod calls at once would delay the status."""
        (error,) = await asyncio.gather(self._report(job, made.todo), return_exceptions=True)
        await self._supply(job_task, made, calls, may_create=may_create)
        if error is not None:
            raise error

    async def _report(self, job: Job, todo: Plan) -> None:
        """Write the status, then the Events. If the status cannot be written, the Events of conditions come with the next one."""
        await self._write_status(job, todo)
        self._record_events(job, todo.events)

    async def _write_status(self, job: Job, todo: Plan) -> None:
        status = status_change(job, todo)
        if status is None:
            return
        before = job.fact
        call = self._api.apply_status(job.fact, status)
        self._store.put_job(await self._job_writes.write("status", job.fact, call))
        if replace(job.fact, conditions=before.conditions, scaling=before.scaling) != before:
            self.wake(job.fact.uid)  # the response contains somebody's edit, which the watch will not show as new

    def _record_events(self, job: Job, events: Sequence[JobEvent]) -> None:
        for event in events:
            level = logging.WARNING if event.warning else logging.INFO
            log.log(level, event.message, extra={**log_fields(job.fact), "reason": event.reason})
        self._events.record(job.fact, tuple(events))
