"""How the logs of a job's pods are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastipod_operator.kube.containers import agent_container_of_pod
from elastipod_operator.kube.reading import Body, mapping, mappings, text

# Without --ignore-errors, kubectl stops at the first log that it cannot read, such as that of a pod that is being created.
# With it, kubectl prints a line that begins so; lines of logs begin with their prefix.
IGNORE_ERRORS, UNREADABLE = "--ignore-errors", "error: "
CONTAINERS = ("containers", "initContainers", "ephemeralContainers")


def container_named(job: Body) -> str:
    """Give the container that a job names for its agent; empty if it names none."""
    return text(mapping(mapping(job.get("spec")).get("elastipod")).get("container"))


def agent_of(job: Body, pod: Body) -> str:
    """Give the name of the container that runs a pod's agent; empty if that is unknown."""
    containers = mappings(mapping(pod.get("spec")).get("containers"))
    return text((agent_container_of_pod(containers, container_named(job)) or {}).get("name"))


def streams_of(job: Body, pods: Sequence[Body]) -> tuple[list[str], int]:
    """Give kubectl's options that choose containers, and how many logs that are.

    Pods of before and after an edit of the job may run their agents in containers of different names. kubectl takes one name for
    all pods, so all containers of such pods are read.
    """
    agents = {agent_of(job, pod) for pod in pods}
    if len(agents) == 1 and (agent := agents.pop()):
        return ["--container", agent], len(pods)
    count = sum(len(mappings(mapping(pod.get("spec")).get(kind))) for pod in pods for kind in CONTAINERS)
    return ["--all-containers"], count


def without_errors(printed: str) -> tuple[str, list[str]]:
    """Split what kubectl printed with --prefix and --ignore-errors into the lines of logs, and what it could not read."""
    # A line of a worker may have characters, such as \r of a progress bar, at which str.splitlines would begin a new one.
    lines = re.findall(r"[^\n]+\n?|\n", printed)
    return "".join(line for line in lines if not is_unreadable(line)), [
        line.removeprefix(UNREADABLE).strip() for line in lines if is_unreadable(line)
    ]


def is_unreadable(line: str) -> bool:
    """Whether a line of kubectl says that a log could not be read."""
    return line.startswith(UNREADABLE)
