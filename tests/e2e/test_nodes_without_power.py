"""The nodes below a job lose their power: that of rank 0, that of the operator, two at once, a rack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.recoveries import leader, recovery_after, steps_of, until_in_memory, without_power

from elastipod_local.cluster import Cluster

SIZE = 4
QUICK = {"minStableSeconds": 0, "payback": "Off"}
# Copies of a step go half-way round the ring of nodes, so without the racks they would be lost with the original.
RACKS = ((0, 2), (1, 3))
IN_RACKS = """
case "$POD" in *-worker-[02] | *-worker-[02]-*) rack=0 ;; *) rack=1 ;; esac
export ELASTIPOD_FAILURE_DOMAIN="rack-$rack"
exec "$@"
"""


def of_rank_zero(job: JobRun, cluster: Cluster) -> list[str]:
    master = job.body()["status"]["masterAddr"]
    return [pod["spec"]["nodeName"] for pod in job.running_pods() if pod["status"]["podIP"] == master]


def of_the_operator(job: JobRun, cluster: Cluster) -> list[str]:
    return [leader(cluster)["spec"]["nodeName"]]


def two_at_once(job: JobRun, cluster: Cluster) -> list[str]:
    safe = leader(cluster)["spec"]["nodeName"]
    return [name for pod in job.running_pods() if (name := pod["spec"]["nodeName"]) != safe][:2]


@pytest.mark.long("power-loss")
@pytest.mark.parametrize(
    ("name", "choose", "num_lost"),
    [("rank-0", of_rank_zero, 1), ("operator", of_the_operator, 1), ("two-at-once", two_at_once, 2)],
)
def test_whichever_nodes_lose_power_the_others_go_on(
    job: JobRun, cluster: Cluster, name: str, choose: Callable[[JobRun, Cluster], list[str]], num_lost: int
) -> None:
    job.name = f"power-of-{name}"
    train = ("--steps=200", "--min-step-time=0.2", "--checkpoint-every=1000")
    job.apply(*train, script="train.py", start=SIZE, step=1, minimum=1, elastipod=QUICK)
    job.until_training(SIZE, beyond_step=10)
    before, generation = training_processes(job.name), job.history()[-1]["generation"]
    victims, left = choose(job, cluster), SIZE - num_lost
    assert len(victims) == num_lost
    with ExitStack() as stack:
        for victim in victims:
            stack.enter_context(without_power(cluster, victim))
        entry = recovery_after(job, generation)
        assert (entry["from"], entry["to"], entry["depth"]) == (SIZE, left, "memory"), job.story()
        until_in_memory(job, before, generation, staying=left)
        job.until("completion", lambda: job.state() == "Completed")
    audit = job.audit()
    assert audit["exit_code"] == 0, audit
    assert sum(audit["steps_repeated"].values()) <= 1, audit
    assert job.body()["status"]["restartCount"] <= 1, "one incident"


@pytest.mark.long("power-loss")
def test_a_rack_loses_power_and_the_copies_of_its_shards_are_in_the_other(job: JobRun, cluster: Cluster) -> None:
    """No checkpoint is on storage: each step that survives is in the memory of the nodes that are left."""
    options = ["--steps=200", "--min-step-time=0.2", "--checkpoint-every=1000", "--memory-every=5", "--parallel=fsdp2"]
    train = job.container(*options, script="train_with_checkpoints.py")["command"]
    env = [
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    mounts = [{"name": "data", "mountPath": "/data"}, {"name": "memory", "mountPath": "/dev/shm"}]
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "training-data"}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
    ]
    job.apply(
        command=["sh", "-c", IN_RACKS, "sh", *train], start=SIZE, elastipod=QUICK,
        container={"env": env, "volumeMounts": mounts}, pod={"volumes": volumes},
    )  # fmt: skip
    job.until_training(SIZE, beyond_step=12)
    generation, safe = job.history()[-1]["generation"], leader(cluster)["spec"]["nodeName"]
    nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in job.running_pods()}
    racks = [[nodes[f"{job.name}-worker-{number}"] for number in rack] for rack in RACKS]
    with ExitStack() as stack:
        for name in next(rack for rack in racks if safe not in rack):
            stack.enter_context(without_power(cluster, name))
        entry = recovery_after(job, generation)
        assert (entry["from"], entry["to"]) == (SIZE, 2), job.story()
        job.until("steps after it", lambda: steps_of(job).get(entry["generation"]))
        assert steps_of(job)[entry["generation"]][0] > 5, "it did not begin anew"
        assert not list(job.samples().parent.glob("checkpoints/step-*")), "nobody has read a checkpoint"
        job.until("completion", lambda: job.state() == "Completed")
    audit = job.audit()
    assert audit["exit_code"] == 0, audit
    assert sum(audit["steps_repeated"].values()) <= 10, "two copies are no older"
    assert job.body()["status"]["restartCount"] == 1, "one incident"
