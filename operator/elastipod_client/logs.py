"""`elastipod logs JOB`: the logs of its pods, or with --first-failure what the first failing worker printed."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from datetime import UTC, datetime

from elastipod_operator.core.names import LABEL_JOB
from elastipod_operator.kube.containers import agent_container_of_pod
from elastipod_operator.kube.reading import Body, mapping, mappings, name_of, text

from .failure_log import ended_first, excerpt, first_failure
from .kubectl import Kubectl, KubectlError
from .observing import JOBS
from .options import ATTENTION, OK, UNREACHABLE, UsageError, add_job, kubectl_of, parser_of, run
from .situation import job_facts

MAX_PODS = 64
FAILURE_LINES = 5000
READER_GONE = -13  # kubectl was ended by SIGPIPE


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = parser_of("logs", "Print the logs of a job's pods, each line with its pod.")
    add_job(found)
    found.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    found.add_argument("--tail", type=int, default=20, metavar="N", help="last lines of each pod (default: 20)")
    found.add_argument(
        "--first-failure",
        action="store_true",
        help="print the traceback of the worker that failed first in the newest fault",
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code: 1 if there was a failure to show."""
    args = parser().parse_args(argv)
    return run("logs", lambda: _first_failure(args) if args.first_failure else _all(args))


def _all(args: Namespace) -> int:
    kubectl = kubectl_of(args)
    kubectl.get(JOBS, args.job)
    options = [
        f"--selector={LABEL_JOB}={args.job}",
        "--prefix",
        f"--tail={args.tail}",
        f"--max-log-requests={MAX_PODS}",
    ]
    follow = ["--follow"] if args.follow else []
    done = subprocess.run(kubectl.command("logs", *options, *follow), stdout=sys.stdout, stderr=sys.stderr)
    return OK if done.returncode in (0, READER_GONE) else UNREACHABLE


def _first_failure(args: Namespace) -> int:
    if args.follow:
        raise UsageError("--follow and --first-failure exclude each other")
    kubectl = kubectl_of(args)
    job = kubectl.get(JOBS, args.job)
    pods = {name_of(pod): pod for pod in kubectl.items("pods", f"--selector={LABEL_JOB}={args.job}")}
    found = first_failure(job, job_facts(job, datetime.now(UTC)))
    pod = found.pod if found is not None and found.pod else ended_first(list(pods.values()))
    if found is None and not pod:
        print(f"job {args.job} has had no fault")
        return OK
    if found is not None and found.message:
        print(f"{found.message}\n")
    if pod not in pods:
        where = f"pod {pod} is gone, and its log with it" if pod else "no pod is named"
        print(f"{where}; your log collection may have it")
        return ATTENTION
    print(f"pod {pod}:")
    print(
        "\n".join(excerpt(_log(kubectl, job, pods[pod]), _local_rank(job, found.rank if found is not None else None)))
    )
    return ATTENTION


def _log(kubectl: Kubectl, job: Body, pod: Body) -> str:
    """Give the newest lines of a pod's agent; of the run before if its container was restarted."""
    container = text(mapping(mapping(job.get("spec")).get("elastipod")).get("container"))
    runs_agent = agent_container_of_pod(mappings(mapping(pod.get("spec")).get("containers")), container) or {}
    chosen = text(runs_agent.get("name"))
    statuses = mappings(mapping(pod.get("status")).get("containerStatuses"))
    restarts = next((one.get("restartCount") for one in statuses if one.get("name") == chosen), 0)
    command = ["logs", name_of(pod), *(["-c", chosen] if chosen else []), f"--tail={FAILURE_LINES}"]
    if restarts:
        try:
            return kubectl.run(*command, "--previous")
        except KubectlError:
            pass  # the kubelet has removed it; the present log is better than none
    return kubectl.run(*command)


def _local_rank(job: Body, rank: int | None) -> int | None:
    """Give the local rank of a global one; None if the number of workers in a pod is not a number."""
    workers = text(mapping(job.get("spec")).get("nprocPerNode"))
    return rank % int(workers) if rank is not None and workers.isdecimal() and int(workers) else None
