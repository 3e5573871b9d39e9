"""The operator is upgraded and rolled back while two jobs train: one must not notice, the other is resized in between."""

from __future__ import annotations

import pytest
from tests.e2e.conftest import OPERATOR_NAMESPACE, ROOT
from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.recoveries import leader

from elastipod_local.cluster import Cluster

UPGRADE = ("upgrade", "elastipod", str(ROOT / "charts" / "elastipod"), "--reuse-values", "--set", "logLevel=debug")
ROLLBACK = ("rollback", "elastipod")


def train(job: JobRun) -> None:
    quick = {"minStableSeconds": 0, "payback": "Off"}
    train = ("--steps=3000", "--epochs=3", "--min-step-time=0.2", "--checkpoint-every=1000")
    job.apply(*train, script="train.py", minimum=1, maximum=2, step=1, start=2, elastipod=quick)


def pods_of(job: JobRun) -> set[str]:
    return {pod["metadata"]["uid"] for pod in job.running_pods()}


@pytest.mark.long("upgrade")
def test_an_upgrade_and_a_rollback_disturb_no_job(job: JobRun, cluster: Cluster) -> None:
    quiet = JobRun(cluster, "upgrade-of-others")
    try:
        for each in (job, quiet):
            train(each)
        for each in (job, quiet):
            each.until_training(2, beyond_step=3)
        undisturbed = (training_processes(quiet.name), pods_of(quiet), quiet.history())
        for change, size in ((UPGRADE, 1), (ROLLBACK, 2)):
            operator, steps = leader(cluster)["metadata"]["uid"], quiet.step()
            before = (training_processes(job.name), pods_of(job), job.history())
            cluster.helm(*change, "-n", OPERATOR_NAMESPACE, "--wait", "--timeout", "180s")
            job.until("another operator to lead", lambda: leader(cluster)["metadata"]["uid"] != operator)  # noqa: B023  # called in this turn
            assert (training_processes(job.name), pods_of(job), job.history()) == before, job.story()
            job.scale(size)
            job.until_training(size, beyond_step=job.step())
            assert [entry["kind"] for entry in job.history()[len(before[2]) :]] == ["resize"], job.story()
            quiet.until("steps", lambda: quiet.step() > steps + 3)  # noqa: B023  # called in this turn
        assert (training_processes(quiet.name), pods_of(quiet), quiet.history()) == undisturbed, quiet.story()
        for each in (job, quiet):
            audit = each.audit()  # of a job that goes on
            assert (audit["duplicates"], audit["foreign"]) == (0, 0), audit
            assert not any(audit["steps_repeated"].values()), audit
    finally:
        quiet.delete()
