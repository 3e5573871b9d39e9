"""`elastipod logs JOB --first-failure`: what the operator says of the newest fault, and what the first failing worker printed."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

from elastipod_operator.core.names import LABEL_JOB
from elastipod_operator.kube.reading import Body, mapping, mappings, name_of, text

from .failure_log import ended_first, excerpt, first_failure, has_failure, workers_in
from .kubectl import Kubectl, KubectlError
from .log_reading import agent_of
from .observing import JOBS
from .options import ATTENTION, OK
from .situation import job_facts
from .terminal import say

FAILURE_LINES = 5000


def show_first_failure(kubectl: Kubectl, name: str) -> int:
    """Print the first failure of a job; gives the exit code. Raises KubectlError."""
    job = kubectl.get(JOBS, name)
    pods = {name_of(pod): pod for pod in kubectl.items("pods", f"--selector={LABEL_JOB}={name}")}
    found = first_failure(job, job_facts(job, datetime.now(UTC)))
    pod = found.pod if found is not None and found.pod else ended_first(list(pods.values()))
    if found is None and not pod:
        say(f"job {name} has had no fault")
        return OK
    if found is not None and found.message:
        say(f"{found.message}\n")
    if pod not in pods:
        where = f"pod {pod} is gone, and its log with it" if pod else "no pod is named"
        say(f"{where}; your log collection may have it")
        return ATTENTION
    log = _log(kubectl, job, pods[pod])
    say(f"pod {pod}:")
    if not has_failure(log):
        say(
            f"(no traceback in the last {FAILURE_LINES} lines of its log, which may begin after the failure; its last lines)"
        )
    say("\n".join(excerpt(log, _local_rank(job, log, found.rank if found is not None else None))))
    return ATTENTION


def _log(kubectl: Kubectl, job: Body, pod: Body) -> str:
    """Give the newest lines of a pod's agent; of the run before if its container was restarted and the present one shows no failure."""
    chosen = agent_of(job, pod)
    statuses = mappings(mapping(pod.get("status")).get("containerStatuses"))
    restarts = next((one.get("restartCount") for one in statuses if one.get("name") == chosen), 0)
    command = ["logs", name_of(pod), *(["-c", chosen] if chosen else []), f"--tail={FAILURE_LINES}"]
    log = kubectl.run(*command)
    if restarts and not has_failure(log):
        with suppress(KubectlError):  # the kubelet has removed it
            return kubectl.run(*command, "--previous")
    return log


def _local_rank(job: Body, log: str, rank: int | None) -> int | None:
    """Give the local rank of a global one; None if neither the job nor the log of its pod says how many workers a pod has."""
    written = text(mapping(job.get("spec")).get("nprocPerNode"))
    workers = int(written) if written.isdecimal() else workers_in(log)
    return rank % workers if rank is not None and workers else None
