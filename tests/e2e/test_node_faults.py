"""Nodes that announce trouble below a job that trains: on real kubelets, with the commands of the local cluster."""

from __future__ import annotations

import pytest
from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.pasted import shell_environment
from tests.e2e.test_elastic_job import one_of_its_nodes, until_in_memory

from elastipod import cli as user_cli
from elastipod_local import cli
from elastipod_local.cluster import Cluster

QUICK = {"minStableSeconds": 0, "payback": "Off"}
HEALTH = "label sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReplacement"


def local(cluster: Cluster, *arguments: str) -> None:
    """What a user types after `elastipod local node`."""
    assert cli.main(["node", *arguments, "--name", cluster.name]) == 0


def train(job: JobRun) -> None:
    """Begin to train on every node."""
    train = ("--steps=1000", "--min-step-time=0.2", "--checkpoint-every=20")
    job.apply(*train, script="train.py", start=4, step=1, minimum=1, elastipod=QUICK)
    job.until_training(4, beyond_step=5)


def nodes_of(job: JobRun) -> list[str]:
    return [pod["spec"]["nodeName"] for pod in job.running_pods()]


def assert_nothing_is_repeated(job: JobRun) -> None:
    audit = job.audit()  # of a job that goes on
    assert (audit["duplicates"], audit["foreign"]) == (0, 0), audit
    assert not any(audit["steps_repeated"].values()), audit


@pytest.mark.long("announcements")
def test_a_sick_node_is_left_and_used_again_when_it_is_cured(
    job: JobRun, cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its label keeps no scheduler away, so the pod that follows must do so itself."""
    train(job)
    sick = one_of_its_nodes(job, cluster)
    before, generation = training_processes(job.name), job.history()[-1]["generation"]
    local(cluster, "sicken", sick)
    job.until_training(3)
    until_in_memory(job, before, generation, staying=3)
    assert (job.history()[-1]["cause"], sick in nodes_of(job)) == ("NodeDrained", False)
    told = job.until("the node to be named", lambda: job.told("Scaling", "WaitingForCapacity"))
    assert f"(new pods avoid {sick}: {HEALTH})" in told
    (waiting,) = job.until("a pod to wait", lambda: [p for p in job.pods() if "nodeName" not in p["spec"]])
    assert waiting["metadata"]["annotations"]["elastipod.io/avoids"] == sick
    assert int(waiting["metadata"]["labels"]["elastipod.io/incarnation"]) <= 2, "they do not come and go"
    for name, value in shell_environment(cluster).items():
        monkeypatch.setenv(name, value)
    user_cli.main(["why", job.name])
    assert f"new pods avoid {sick}" in " ".join(capsys.readouterr().out.split())
    local(cluster, "cure", sick)
    job.until_training(4, beyond_step=job.step())
    assert sick in nodes_of(job)
    assert_nothing_is_repeated(job)
