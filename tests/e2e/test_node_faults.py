"""Nodes that announce trouble, or their end, below a job that trains: on real kubelets, with the commands of the local cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.pasted import shell_environment
from tests.e2e.recoveries import one_of_its_nodes, steps_of, until_in_memory
from tests.e2e.slow_disk import SlowDisk, slow_disk
from tests.long_runs import LongRun
from tests.objects import get_object, list_objects
from tests.patience import PATIENCE_S
from tests.unit.docs.blocks import manifests
from tests.unit.docs.pages import page

from elastipod import cli as user_cli
from elastipod_local import cli
from elastipod_local.cli import SPOT_TAINTS
from elastipod_local.cluster import Cluster

QUICK = {"minStableSeconds": 0, "payback": "Off"}
SLOT = "elastipod.io/slot"
HEALTH = "label sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReplacement"


def local(cluster: Cluster, *arguments: str) -> None:
    """What a user types after `elastipod local node`."""
    assert cli.main(["node", *arguments, "--name", cluster.name]) == 0


def train(job: JobRun, *, checkpoint_every: int = 20, **resources: dict[str, str]) -> None:
    """Begin to train on every node. resources: of the container, beside its requests of CPU and memory."""
    train = ("--steps=3000", "--epochs=3", "--min-step-time=0.2", f"--checkpoint-every={checkpoint_every}")
    requests = {"requests": {"cpu": "600m", "memory": "256Mi"}}
    container = {"resources": {**requests, **resources}}
    job.apply(*train, script="train.py", start=4, step=1, minimum=1, elastipod=QUICK, container=container)
    job.until_training(4, beyond_step=5)


def offered(cluster: Cluster, node: str) -> list[str]:
    """Give how many units of the accelerator a node has, and how many of them kubelet offers."""
    status = get_object(cluster, "nodes", node)["status"]
    return [status[part][SLOT] for part in ("capacity", "allocatable")]


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
    """Its label keeps no scheduler away, so the pod that follows must do so itself; its kubelet offers the sick unit to nobody."""
    train(job, limits={SLOT: "1"})
    sick = one_of_its_nodes(job, cluster)
    before, generation = training_processes(job.name), job.history()[-1]["generation"]
    assert offered(cluster, sick) == ["1", "1"]
    local(cluster, "sicken", sick)
    job.until_training(3)
    until_in_memory(job, before, generation, staying=3)
    assert (job.history()[-1]["cause"], sick in nodes_of(job)) == ("NodeDrained", False)
    told = job.until("the node to be named", lambda: job.told("Scaling", "WaitingForCapacity"))
    assert f"(new pods avoid {sick}: {HEALTH})" in told
    (waiting,) = job.until("a pod to wait", lambda: [p for p in job.pods() if "nodeName" not in p["spec"]])
    assert waiting["metadata"]["annotations"]["elastipod.io/avoids"] == sick
    assert int(waiting["metadata"]["labels"]["elastipod.io/incarnation"]) <= 2, "they do not come and go"
    job.until("kubelet to take the unit off what it offers", lambda: offered(cluster, sick) == ["1", "0"])
    for name, value in shell_environment(cluster).items():
        monkeypatch.setenv(name, value)
    user_cli.main(["why", job.name])
    assert f"new pods avoid {sick}" in " ".join(capsys.readouterr().out.split())
    local(cluster, "cure", sick)
    job.until_training(4, beyond_step=job.step())
    assert sick in nodes_of(job)
    assert offered(cluster, sick) == ["1", "1"]
    assert_nothing_is_repeated(job)


def names_of_nodes(cluster: Cluster) -> list[str]:
    return [node["metadata"]["name"] for node in list_objects(cluster, "nodes")]


@contextmanager
def with_as_many_nodes(cluster: Cluster) -> Iterator[None]:
    """Afterwards the cluster has as many nodes as before."""
    count = len(names_of_nodes(cluster))
    try:
        yield
    finally:
        if missing := count - len(names_of_nodes(cluster)):
            cluster.add_nodes(missing)


@pytest.mark.long("announcements")
@pytest.mark.parametrize("seconds", [30, 120])
def test_a_spot_machine_goes_and_the_others_repeat_nothing(job: JobRun, cluster: Cluster, seconds: int) -> None:
    """The notice as a cloud gives it; when its time is over, the machine is gone without a word."""
    job.name = f"spot-{seconds}"
    train(job)
    goes = one_of_its_nodes(job, cluster)
    before, generation = training_processes(job.name), job.history()[-1]["generation"]
    announce = ["local", "node", "spot-notice", goes, f"--seconds={seconds}", f"--name={cluster.name}"]
    with with_as_many_nodes(cluster):
        notice = subprocess.Popen([sys.executable, "-m", "elastipod.cli", *announce], cwd=ROOT)
        try:
            job.until_training(3)
            until_in_memory(job, before, generation, staying=3)
            assert notice.poll() is None, "they go on without it before it is gone"
            assert (job.history()[-1]["cause"], goes in nodes_of(job)) == ("NodeDrained", False)
            assert notice.wait(timeout=seconds + PATIENCE_S) == 0
        finally:
            notice.kill()
            notice.wait()
        assert goes not in names_of_nodes(cluster)
        at = job.step()
        job.until("steps without it", lambda: job.step() > at + 5)
        changes = [entry["kind"] for entry in job.history() if entry["generation"] > generation]
        assert (job.size(), changes) == (3, ["resize"]), "its end is no fault"
        assert_nothing_is_repeated(job)
    job.until_training(4, beyond_step=job.step())
    assert_nothing_is_repeated(job)


EVERY = 10  # steps between two checkpoints
SLOW_BYTES_PER_S = 256  # a rank writes some ten thousand bytes for a checkpoint: minutes


@contextmanager
def announced_to_end(cluster: Cluster, node: str) -> Iterator[None]:
    """Give a node the taint of a Spot notice of 30 s, and take it back at the end: the machine stays after all."""
    cluster.kubectl("taint", "node", node, f"{SPOT_TAINTS[30]}=:NoSchedule")
    try:
        yield
    finally:
        cluster.kubectl("taint", "node", node, f"{SPOT_TAINTS[30]}-")


def assert_no_newer(disk: SlowDisk, step: int) -> None:
    """The disk is slow for those who train: no checkpoint of a later step is complete, though several were due."""
    assert disk.complete(), "there were checkpoints before"
    assert max(disk.complete()) <= step, disk.seconds_of_saves()


@pytest.mark.long("announcements")
def test_a_slow_disk_holds_up_checkpoints_and_neither_steps_nor_a_drain(
    job: JobRun, cluster: Cluster, long_run: LongRun
) -> None:
    """No save ends while the disk is slow; the Spot notice of 30 s comes in the middle of one."""
    job.name = "slow-disk"
    with slow_disk(job, cluster) as disk:
        train(job, checkpoint_every=EVERY)
        job.until("checkpoints", lambda: len(disk.seconds_of_saves()) > 2)
        quick_s = max(disk.seconds_of_saves().values())
        goes = one_of_its_nodes(job, cluster)
        before, generation = training_processes(job.name), job.history()[-1]["generation"]

        disk.slow_down(SLOW_BYTES_PER_S)
        slow_from, began = job.step(), time.monotonic()
        job.until("steps while several checkpoints are due", lambda: job.step() > slow_from + 4 * EVERY)
        assert_no_newer(disk, slow_from)
        assert (job.history()[-1]["generation"], training_processes(job.name)) == (generation, before), "it is no hang"

        with announced_to_end(cluster, goes):
            job.until(
                "a step without it", lambda: any(at > generation and steps for at, steps in steps_of(job).items())
            )
            assert_no_newer(disk, slow_from)
            slow_until = max(step for steps in steps_of(job).values() for step in steps)
            slow_s = round(time.monotonic() - began, 1)
            disk.quicken()
            until_in_memory(job, before, generation, staying=3)
            job.until("a newer checkpoint", lambda: max(disk.complete(), default=0) > slow_until)
            assert (job.size(), job.history()[-1]["cause"], goes in nodes_of(job)) == (3, "NodeDrained", False)
        job.until_training(4, beyond_step=job.step())
        changes = [(entry["kind"], entry["depth"]) for entry in job.history() if entry["generation"] > generation]
        assert changes == [("resize", "memory")] * 2, "one left and came back, and there was no fault"
        containers = [each for pod in job.running_pods() for each in pod["status"]["containerStatuses"]]
        assert [each["restartCount"] for each in containers] == [0] * 4
        assert_nothing_is_repeated(job)
        seconds = {"seconds_of_quick_save": quick_s, "seconds_of_slow_disk": slow_s}
        long_run.count(steps_on_slow_disk=slow_until - slow_from, **seconds)


def until_placed(job: JobRun, pools: dict[str, str], **wanted: int) -> None:
    """Wait until so many pods of each spec run, and see that each is in the pool of its spec."""
    job.until_training(sum(wanted.values()), beyond_step=job.step())
    found = [
        (pod["metadata"]["labels"]["elastipod.io/spec"], pools[pod["spec"]["nodeName"]]) for pod in job.running_pods()
    ]
    expected = {"base": "on-demand", "spot": "spot"}
    assert sorted(found) == sorted((spec, expected[spec]) for spec, count in wanted.items() for _ in range(count))


@pytest.mark.long("announcements")
def test_the_job_of_the_page_on_spot_keeps_its_base(job: JobRun, cluster: Cluster) -> None:
    """The manifest of the page, with an image that is here. Both Spot machines are taken back at once."""
    (body,) = [one for one in manifests(page("docs/aws.md")) if one["kind"] == "HyperPodPyTorchJob"]
    train = ("--steps=3000", "--epochs=3", "--min-step-time=0.2", "--checkpoint-every=1000")
    pools = dict(zip(names_of_nodes(cluster), ("on-demand", "on-demand", "spot", "spot"), strict=True))
    for name, pool in pools.items():
        cluster.kubectl("label", "node", name, f"pool={pool}")
    key = "cloud.google.com/impending-node-termination"
    spot = [name for name, pool in pools.items() if pool == "spot"]
    try:
        job.spec = {**body["spec"], "nprocPerNode": "1", "elastipod": QUICK}
        for spec in job.spec["replicaSpecs"]:
            spec["template"]["spec"]["containers"] = [job.container(*train, script="train.py")]
        job.spec["elasticPolicy"]["scalingTimeoutInSeconds"] = 1
        job.apply_again()
        until_placed(job, pools, base=2, spot=2)
        before, generation = training_processes(job.name), job.history()[-1]["generation"]
        cluster.kubectl("taint", "node", *spot, f"{key}=:NoSchedule")
        until_in_memory(job, before, generation, staying=2)
        until_placed(job, pools, base=2)
        assert_nothing_is_repeated(job)
    finally:
        cluster.kubectl("taint", "node", *spot, f"{key}-", check=False)
        for name in pools:
            cluster.kubectl("label", "node", name, "pool-")
