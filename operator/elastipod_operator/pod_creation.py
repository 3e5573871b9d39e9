"""Creates the pods of one job in the background, and keeps the reason when some are refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .core.actions import CreatePod
from .core.reasons import Reason
from .core.wording import counted
from .in_flight import InFlight
from .kube.api import CALL_ERRORS
from .kube.applied import effective_spec, needs_pods
from .kube.job_keys import secret_manifest
from .kube.placement import Placement
from .kube.pods import pod_manifest
from .kube.store import Job
from .kube.writes import is_conflict, is_name_taken, is_refusal, log_fields, timed_write
from .operator_errors import error_location
from .pod_control import PodControl, RetryBackoff

log = logging.getLogger(__name__)

CANNOT_AUTHENTICATE = (
    "the Secret with the key of the job was refused by the API server (give the operator the right to create Secrets, or set "
    "spec.elastipod.authentication to Off)"
)
RECHECK_S = 1.0


class PodCreation:
    """The creations of one job; its state can be lost without harm.

    A plan names all missing pods. Those that are being created in the same way are left alone. What the newest plan does not
    want is cancelled (`keep_only`), so that no pod appears after its quota was released or its job was deleted. Creation starts
    slowly: what refuses one pod of a job refuses all, and thousands of refused calls would load the API server.
    """

    def __init__(self, control: PodControl, uid: str) -> None:
        """uid: the job's."""
        self._control, self._uid = control, uid
        self.calls: InFlight[CreatePod] = InFlight(
            control.slots, self._settle, stops=lambda error: is_refusal(error) or not is_conflict(error)
        )
        self._problem = ""
        self.backoff = RetryBackoff()
        self._existing_secret = ""
        """The Secret that this operator has created or found."""
        self._is_secret_refusal_told = False

    def keep_only(self, wanted: Sequence[CreatePod]) -> bool:
        """Cancel all other creations. False if some were sent: then the caller awaits `calls.wait_unwanted()` and decides again."""
        return self.calls.keep_only(frozenset(wanted))

    def missing(self, wanted: Sequence[CreatePod]) -> list[CreatePod]:
        """Give those that are not being created yet."""
        return [action for action in wanted if action not in self.calls]

    async def create_secret(self, job: Job, actions: Sequence[CreatePod]) -> bool:
        """Create the Secret that new pods refer to, or pods that cannot start, if it is missing.

        False if no pods may be created now. A failure ends no pass: stops and drains do not need the Secret. A refusal stops no
        pods if the Secret is known to exist: rights and quotas are checked before the name.
        """
        if self.backoff.is_active():
            return False
        token = self._control.keys.of(job.fact)
        is_missed = any(pod.problem_reason == Reason.CONTAINER_CANNOT_START for pod in job.pods.values())
        if token is None or not (actions or is_missed):
            return True
        try:
            await timed_write("secret", self._control.api.create_secret(secret_manifest(job.fact, token)))
        except CALL_ERRORS as error:
            if not is_name_taken(error):
                return await self._may_go_on_without_secret(job, token.secret, error)
        self._existing_secret, self._is_secret_refusal_told = token.secret, False
        return True

    async def _may_go_on_without_secret(self, job: Job, secret: str, error: Exception) -> bool:
        """Handle an error of the creation of the Secret; gives whether pods may be created nevertheless."""
        if not is_refusal(error):
            await self._control.failed(job, error)
            self._control.wake_in(self.backoff.note_failure(self._uid), self._uid)
            return False
        if not self._secret_exists(job, secret):
            self._refused(f"{CANNOT_AUTHENTICATE}: {error}")
            return False
        if not self._is_secret_refusal_told:
            text = "Secret %s exists, so pods are created, but nobody will replace it if it is deleted: %s: %s"
            log.warning(text, secret, CANNOT_AUTHENTICATE, error, extra=log_fields(job.fact))
            self._is_secret_refusal_told = True
        return True

    def _secret_exists(self, job: Job, secret: str) -> bool:
        """Whether a Secret, which the operator may not read, was created or shows in a container that has run, and none misses it."""
        pods = [pod for pod in job.pods.values() if pod.key_secret == secret]
        if any(secret in pod.problem for pod in pods if pod.problem_reason == Reason.CONTAINER_CANNOT_START):
            return False
        has_shown = any(pod.container is not None and pod.container.has_run for pod in pods)
        return has_shown or self._existing_secret == secret

    async def begin(self, job: Job, actions: Sequence[CreatePod]) -> None:
        """Begin to create the `missing` pods; without any, an earlier refusal is cleared. Raises as Api does.

        job: as the decision saw it.
        """
        placed, problem = await self._control.place(job, actions) if actions else ([], "")
        self._problem = problem or self._problem
        if placed:
            token = self._control.keys.of(job.fact)
            secret = token.secret if token is not None else ""
            spec = await self._spec_for_pods(job)
            self.calls.begin(
                {action: partial(self._create, job, spec, action, place, secret) for action, place in placed}
            )
        elif self._problem and self.calls.is_idle:
            await self._settle({})
        elif self.calls.is_idle and self.backoff.reset():
            self._control.wake(self._uid)  # to remove the refusal from the status
        if len(placed) < len(actions) and not problem:
            # The others have lost their quota.
            self._control.wake_in(RECHECK_S, self._uid)

    async def _spec_for_pods(self, job: Job) -> dict[str, Any]:
        """Give the spec from which pods are created. Values that only existing pods still have are read from these."""
        if not needs_pods(job.body):
            return effective_spec(job.body)
        bodies, _ = await self._control.api.list_pods(job.fact.namespace, job.fact.uid)
        return effective_spec(job.body, bodies)

    async def _create(
        self, job: Job, spec: Mapping[str, Any], order: CreatePod, placed: Placement | None, key_secret: str
    ) -> None:
        assert job.fact.policy is not None
        manifest = pod_manifest(
            job.fact, spec, job.fact.policy, order.pod, order.nnodes, key_secret,
            generation=order.generation, avoids=order.avoids, only_on=order.only_on,
            failures_before=order.failures_before, placed=placed,
        )  # fmt: skip
        self._control.store.put_pod(await timed_write("pod", self._control.api.create_pod(manifest)))

    async def _settle(self, failed: Mapping[CreatePod, Exception]) -> None:
        job = self._control.store.jobs.get(self._uid)
        if job is None:
            return
        taken = [action for action, error in failed.items() if is_name_taken(error)]
        broken = [error for error in failed.values() if not (is_refusal(error) or is_name_taken(error))]
        refusals = [str(error) for error in failed.values() if is_refusal(error)]
        if taken:
            try:
                refusals += await self._report_foreign_pods(job, taken)
            except Exception as error:  # reported below, after the refusals of the other pods
                broken.append(error)
        problem, self._problem = self._problem, ""
        if self.calls.num_succeeded:
            self.backoff.note_progress()
        if refusals:
            were = counted(len(refusals), "pod was", "pods were")
            skipped = f", and {self.calls.num_skipped} more not tried" if self.calls.num_skipped else ""
            problem = f"{were} refused by the API server{skipped}: {refusals[0]}"
        mistakes = [error for error in broken if not isinstance(error, CALL_ERRORS)]
        if mistakes and not problem:
            number = len(mistakes) + self.calls.num_skipped
            problem = f"{counted(number, 'pod')} could not be created: internal error of the operator ({error_location(mistakes[0])})"
        if broken:
            await self._control.failed(job, broken[0])
        if problem:
            self._refused(problem)
        elif broken:
            self._control.wake_in(self.backoff.note_failure(self._uid), self._uid)
        else:
            self.backoff.reset()
        self._control.wake(self._uid)  # to update the status

    def _refused(self, message: str) -> None:
        """Record why no pods are created now, and retry later."""
        self._control.wake_in(self.backoff.note_refusal(message, self._uid), self._uid)

    async def _report_foreign_pods(self, job: Job, actions: Sequence[CreatePod]) -> list[str]:
        """Give a sentence for each name that a foreign pod has. The job's own pods were only not in the store yet."""
        await self._control.list_pods(job)
        ours = {pod.id for pod in job.pods.values()}
        return [
            f"pod {a.pod.name(job.fact.name)} exists and does not belong to this job; delete it or rename the job"
            for a in actions
            if a.pod not in ours
        ]
