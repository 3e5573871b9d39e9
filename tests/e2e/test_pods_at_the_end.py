"""What is left of a job's pods when it has ended, by cleanPodPolicy, on real kubelets.

They report that a container has ended some time before the phase of its pod says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.e2e.job_run import JobRun

from elastipod_local.cluster import Cluster

SCRIPTS = {"Completed": "echo the last line of the log", "Failed": "echo the last line of the log; exit 3"}
POLICIES = ("All", "Running", "OnlyComplete", "None")
KEPT = {("Running", "Completed"), ("OnlyComplete", "Failed"), ("None", "Completed"), ("None", "Failed")}
CASES = [(policy, outcome) for policy in POLICIES for outcome in SCRIPTS]


def has_state(job: JobRun, state: str) -> bool:
    return job.state() == state


@pytest.fixture(scope="module")
def ended(cluster: Cluster) -> Iterator[dict[tuple[str, str], JobRun]]:
    """A job of one replica for each policy and outcome, all of which have ended."""
    jobs = {case: JobRun(cluster, f"end-{case[0]}-{case[1]}".lower()) for case in CASES}
    try:
        for (policy, outcome), job in jobs.items():
            job.apply(
                minimum=1, maximum=1, step=1, cpu="50m",
                command=["hyperpodrun", "--no-python", "sh", "-c", SCRIPTS[outcome]],
                runPolicy={"cleanPodPolicy": policy, "jobMaxRetryCount": 0},
            )  # fmt: skip
        for (_, outcome), job in jobs.items():
            job.until(f"{job.name} to end", partial(has_state, job, outcome))
        yield jobs
    finally:
        for job in jobs.values():
            job.delete()


def at_rest(job: JobRun) -> bool:
    """Whether every pod of a job that is left has ended and stays."""
    return all(_phase(pod) in ("Succeeded", "Failed") and not _is_deleting(pod) for pod in job.pods())


def _phase(pod: dict[str, Any]) -> str:
    return str(pod["status"]["phase"])


def _is_deleting(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "outcome"), CASES, ids=lambda part: part)
def test_what_is_left(ended: dict[tuple[str, str], JobRun], cluster: Cluster, policy: str, outcome: str) -> None:
    job = ended[policy, outcome]
    expected = int((policy, outcome) in KEPT)
    job.until(f"{expected} of its pods to be at rest", lambda: at_rest(job) and len(job.pods()) == expected)
    names = [pod["metadata"]["name"] for pod in job.pods()]
    assert len(names) == expected, job.story()
    for name in names:
        assert "the last line of the log" in cluster.kubectl("logs", name)
