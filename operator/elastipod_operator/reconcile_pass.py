"""One reconcile pass over a job: observe, decide, write the state record, act, report, supply pods."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from . import clock, metrics
from .action_table import Step, has_actions
from .agents.commands import Command
from .core.actions import CreatePod, DeletePod, JobEvent, Plan, StopWorkers
from .core.ending import deletion_notes
from .core.plan import plan
from .core.progress import next_progress, progress_changes, progress_interval
from .core.record import Record
from .core.snapshot import Snapshot
from .core.time_order import earliest
from .job_agents import JobAgents
from .job_intake import JobIntake
from .job_metrics import JobMetrics
from .job_task import Decision, JobTask, actions_of
from .job_writes import JobWrites
from .kube.api import CALL_ERRORS
from .kube.api_ports import EventSink, JobCalls
from .kube.changes import is_released, metadata_changes, status_change
from .kube.reading import annotations_of
from .kube.store import Job, Store
from .kube.writes import gather_all, log_fields, timed_write
from .queueing import Queues
from .spare_capacity import SpareCapacityReader

log = logging.getLogger(__name__)

# Delay before a pass that repeats failed commands.
COMMAND_RETRY = timedelta(seconds=1)


@dataclass(kw_only=True, eq=False)
class ReconcilePass:
    """What every pass uses. wake: requests a pass for a job. forget_job: drops a job that no longer exists."""

    api: JobCalls
    store: Store
    jobs: JobIntake
    agents: JobAgents
    queues: Queues
    spare_capacity: SpareCapacityReader
    events: EventSink
    writes: JobWrites
    metrics: JobMetrics
    list_pods: Callable[[Job], Awaitable[None]]
    wake: Callable[[str], None]
    forget_job: Callable[[Job], None]

    async def run(self, job: Job, job_task: JobTask) -> datetime | None:
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
            self.forget_job(job)
            return None
        calls, todo = self.agents.calls(made), made.todo
        # 4. Act. Meanwhile 5. report, then 6. supply pods. The status follows from the record, so it need not wait for 4.
        await gather_all(
            self._act(made, calls), self._report_and_supply(job, job_task, made, calls, may_create=may_create)
        )
        self.metrics.update(job.fact, todo, map(self.agents.fact, [pod.uid for pod in job.pods.values()]))
        retry_at = clock.now() + COMMAND_RETRY if calls else None  # a call that failed is repeated soon
        return earliest(todo.wake_at, await self._write_progress(job, todo), retry_at)

    # -- 1. observe

    async def _fill_caches(self, job: Job) -> None:
        if not job.listed:
            self.store.expect_no_pods(job)
        if not job.listed:
            await self.list_pods(job)
        await self.queues.observe(job)
        await self.spare_capacity.observe(job, self.store.capacity_freed_at)
        self.agents.follow(job)

    def observe(self, job: Job, job_task: JobTask) -> Snapshot:
        """Give the snapshot for a decision, from the caches alone."""
        pods, quota = tuple(job.pods.values()), self.queues.snapshot(job)
        return Snapshot(
            now=clock.now(),
            job=job.fact,
            pods=pods,
            agents={pod.name: self.agents.fact(pod.uid) for pod in pods},
            nodes=self.store.nodes_of(job),
            closed_nodes=self.store.closed_nodes(),
            operator_error=job_task.operator_error,
            pod_creation_error=job_task.creation.backoff.refusal,
            pod_creation_retry_at=job_task.creation.backoff.retry_at,
            pod_deletion_error=job_task.deletion.why_kept,
            pods_listed_at=job.pods_listed_at,
            capacity_freed_at=self.store.capacity_freed_at,
            spare_capacity=self.spare_capacity.of(job),
            workloads=quota.workloads,
            default_queue=quota.default_queue,
            queue_problem=quota.problem,
            queue_fact=quota.queue,
            quota_return_error=quota.quota_return_error,
        )

    # -- 2. decide

    async def _decide(self, job: Job, job_task: JobTask) -> Decision:
        """Decide, and cancel the pod calls that the new plan does not want."""
        while True:
            began = asyncio.get_running_loop().time()
            with metrics.DECISION_SECONDS.time():
                snapshot = self.observe(job, job_task)
                todo = plan(snapshot)
            job_task.note_decision(began)
            # No await up to the return: the answer of a pod call would change what the decision rests on.
            if job_task.keep_only(todo):
                creations = job_task.creation.missing(actions_of(CreatePod, todo))
                deletions = job_task.deletion.missing(actions_of(DeletePod, todo))
                is_delayed = snapshot.pod_creation_retry_at is not None
                return Decision(copy.copy(job), todo, creations, deletions, is_delayed)
            await gather_all(job_task.creation.calls.wait_unwanted(), job_task.deletion.calls.wait_unwanted())

    # -- 3. write the record

    async def _write_record(self, made: Decision) -> None:
        """Write the record, provided that the job still has the version that the decision saw."""
        job, todo = made.job, made.todo
        metadata = metadata_changes(job, todo)
        if metadata and job.fact.deleting_since is None and not todo.skips_record:
            metadata["annotations"] = {**metadata.get("annotations", {}), **self._progress(job, todo)}
        # A stop of a generation newer than the record is only right if the record is current: another operator may have taken
        # over. The API server rejects an old resourceVersion even in an empty patch.
        is_doubtful = any(isinstance(a, StopWorkers) and a.generation > todo.record.generation for a in todo.actions)
        if not metadata and not is_doubtful:
            return
        version = str(job.body["metadata"]["resourceVersion"])
        before = job.fact.record or Record()
        call = self.api.patch_metadata(job.fact, version, metadata)
        body = await self.writes.write("record", job.fact, call)
        self.jobs.take(body)
        self.metrics.record_written(job.fact.uid, before, todo)
        for entry in todo.history:
            log.info(
                "generation allocated",
                extra={**log_fields(job.fact), "generation": entry.generation, "from": entry.from_size, "to": entry.to_size,
                       "cause": entry.cause},
            )  # fmt: skip

    def _progress(self, job: Job, todo: Plan) -> dict[str, str | None]:
        """Give the annotations of the progress that change."""
        ids = set(todo.record.members)
        members = [pod.uid for pod in job.pods.values() if pod.id in ids]
        checkpoint, agents = self.agents.newest_checkpoint(members), map(self.agents.fact, members)
        return progress_changes(todo.record, annotations_of(job.body), agents, checkpoint, clock.now())

    async def _write_progress(self, job: Job, todo: Plan) -> datetime | None:
        """Write the progress by itself if it is due; gives when to look again. A failure is no news: a later pass tries again."""
        now = clock.now()
        interval = progress_interval(todo.record, now)
        if interval is None or todo.skips_record or job.fact.deleting_since is not None:
            return None
        due_at = next_progress(todo.record, annotations_of(job.body), now)
        if now < due_at:
            return due_at
        if changes := self._progress(job, todo):
            version = str(job.body["metadata"]["resourceVersion"])
            with suppress(*CALL_ERRORS):
                call = self.api.patch_metadata(job.fact, version, {"annotations": changes})
                self.jobs.take(await timed_write("progress", call))
        return now + interval

    # -- 4. act

    async def _act(self, made: Decision, calls: list[Command]) -> None:
        """Carry out the actions of a decision, except those on pods."""
        job, todo = made.job, made.todo
        await self.agents.send(job, [call for call in calls if call.path != "/shutdown"])
        deleted = {action.uid for action in actions_of(DeletePod, todo)}
        for call in calls:
            if call.path == "/shutdown" and call.pod_uid not in deleted:
                self.agents.send_shutdown(job, call)
        # Kueue waits for quota that is to be released, so that comes before requests.
        carry_out: Mapping[Step, Callable[[Job, Plan], Awaitable[None]]] = {
            Step.RELEASE_QUOTA: self.queues.release_quota,
            Step.LIST_PODS: self._list_pods_if_asked,
            Step.DELETE_JOB: self._delete_job_if_asked,
            Step.REQUEST_QUOTA: self.queues.request_quota,
        }
        for handler in carry_out.values():
            await handler(job, todo)

    async def _list_pods_if_asked(self, job: Job, todo: Plan) -> None:
        if has_actions(Step.LIST_PODS, todo):
            await self.list_pods(job)

    async def _delete_job_if_asked(self, job: Job, todo: Plan) -> None:
        if has_actions(Step.DELETE_JOB, todo):
            await self.writes.write("job", job.fact, self.api.delete_job(job.fact))

    # -- 5. report, 6. supply pods

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
        if not todo.status_waits:
            await self._write_status(job, todo)
        self._record_events(job, todo.events)

    async def _write_status(self, job: Job, todo: Plan) -> None:
        status = status_change(job, todo)
        if status is None:
            return
        before = job.fact
        call = self.api.apply_status(job.fact, status)
        self.jobs.take(await self.writes.write("status", job.fact, call))
        if replace(job.fact, conditions=before.conditions, scaling=before.scaling) != before:
            self.wake(job.fact.uid)  # the response contains an edit, which the watch will not show as new

    async def _supply(self, job_task: JobTask, made: Decision, calls: list[Command], *, may_create: bool) -> None:
        """Begin to delete and create pods, deletions first.

        An agent is shut down after its pod was deleted. A pod that ended before its deletion is known would look like a failed
        one, and an admission webhook that refuses the deletion may want to protect its work.
        """
        job = made.job
        shutdowns = {call.pod_uid: call for call in calls if call.path == "/shutdown"}
        job_task.deletion.begin(
            job, made.deletions, lambda action: self.agents.send_shutdown(job, shutdowns.get(action.uid))
        )
        self._record_events(job, deletion_notes(made.deletions))
        if may_create and (made.creations or not made.is_creation_delayed):
            if not made.creations:
                self.queues.forget_placement(job)
            await job_task.creation.begin(job, made.creations)

    def _record_events(self, job: Job, events: Sequence[JobEvent]) -> None:
        for event in events:
            level = logging.WARNING if event.is_warning else logging.INFO
            log.log(level, event.message, extra={**log_fields(job.fact), "reason": event.reason})
        self.events.record(job.fact, tuple(events))
