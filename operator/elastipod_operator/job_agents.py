"""The agents of jobs: their polls, and the calls that carry out decisions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from . import metrics
from .agents.agent_ports import ConnectAgents
from .agents.command_builder import CommandBuilder
from .agents.commands import Command
from .agents.polled_agent import Address
from .agents.told_checkpoints import checkpoint_step
from .core.record import Record
from .core.snapshot import ObservedAgent, ObservedPod, pod_agent_port
from .job_task import Decision
from .kube.applied import effective_spec
from .kube.job_keys import JobKeys
from .kube.store import Job
from .kube.writes import log_fields

log = logging.getLogger(__name__)


class JobAgents:
    """Polls the agents of all jobs and calls them. wake: requests a pass for the job of an agent with news."""

    def __init__(self, connect: ConnectAgents, wake: Callable[[str], None], keys: JobKeys) -> None:
        self._statuses, self._sender = connect(wake)
        self._keys = keys
        self._shutdowns: set[asyncio.Task[None]] = set()

    def follow(self, job: Job) -> None:
        """Poll the agents of a job's running pods, and stop polling those that have ended."""
        policy = job.fact.policy
        for uid, pod in job.pods.items():
            restarts = pod.container.restart_count if pod.container is not None else 0
            if pod.ended or (pod.container is not None and pod.container.ended):
                self._statuses.stop_polling(uid)
            elif pod.ip and pod.started and policy is not None:
                port = pod_agent_port(pod, policy)
                if not self._statuses.watches(uid, pod.ip, port, restarts):
                    self._statuses.watch(uid, replace(self._address(job, pod, port), restarts=restarts))

    def fact(self, pod_uid: str) -> ObservedAgent:
        """Give what is known of the agent of a pod."""
        return self._statuses.fact(pod_uid)

    def newest_checkpoint(self, pod_uids: Iterable[str]) -> int | None:
        """Give the step of the newest durable checkpoint that these agents know of; None if they know of none."""
        newest = max(map(checkpoint_step, self._statuses.progress(pod_uids).values()), default=-1)
        return newest if newest >= 0 else None

    def forget(self, pod_uid: str) -> None:
        """Stop polling the agent of a pod that was deleted."""
        self._statuses.forget(pod_uid)

    def calls(self, made: Decision) -> list[Command]:
        """Give the calls for a decision; none without a usable spec."""
        builder = self.command_builder(made.job, made.todo.record)
        return [call for action in made.todo.actions if builder and (call := builder.build(action)) is not None]

    def command_builder(self, job: Job, record: Record) -> CommandBuilder | None:
        """Give what builds the calls to the agents of a job; None without a usable spec."""
        policy = job.fact.policy
        if policy is None:
            return None
        pods = {pod.name: pod for pod in job.pods.values()}
        return CommandBuilder(
            effective_spec(job.body),
            pods,
            record,
            self._statuses,
            lambda pod: self._address(job, pod, pod_agent_port(pod, policy)),
        )

    async def send(self, job: Job, calls: list[Command]) -> None:
        """Make calls. Failures are logged and counted; a later pass repeats them."""
        for problem in await self._sender.send(calls):
            metrics.AGENT_FAILURES.inc()
            log.warning(problem, extra=log_fields(job.fact))

    def send_shutdown(self, job: Job, call: Command | None) -> None:
        """Shut an agent down in the background: a lost node takes seconds to time out, and the kubelet ends the pod anyway."""
        if call is None:
            return
        task = asyncio.create_task(self.send(job, [call]), name="shutdown")
        self._shutdowns.add(task)
        task.add_done_callback(self._shutdowns.discard)

    async def close(self) -> None:
        """Stop all polls, and the calls that run in the background."""
        for task in self._shutdowns:
            task.cancel()
        await asyncio.gather(*self._shutdowns, return_exceptions=True)
        await self._statuses.close()

    def _address(self, job: Job, pod: ObservedPod, port: int) -> Address:
        return Address(job.fact.uid, pod.ip, port, self._keys.credentials_of(job.fact, pod))
