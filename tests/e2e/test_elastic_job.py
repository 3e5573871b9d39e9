"""Whole jobs on a real cluster: resizes, the operator killed, power loss, what users type and see."""

from __future__ import annotations

import os
import signal
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.e2e.conftest import OPERATOR_NAMESPACE
from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.recoveries import (
    detected_at,
    kill_operator,
    lost_to_kubernetes_at,
    one_of_its_nodes,
    recovery_after,
    standing_still,
    steps_of,
    until_in_memory,
    without_power,
)
from tests.long_runs import LongRun
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster

DETECTION_LIMIT_S = 15.0
LOSSES = 5


def test_helm_test_reaches_the_leader(cluster: Cluster) -> None:
    """Through the Service, as Prometheus does."""
    shown = cluster.helm("test", "elastipod", "-n", OPERATOR_NAMESPACE, "--logs")
    assert "Phase:          Succeeded" in shown
    assert "\nleading\n" in shown


@pytest.mark.slow
def test_user_scales_and_the_operator_dies(job: JobRun, cluster: Cluster) -> None:
    assert "created" in job.apply("--steps=3000", "--epochs=3", "--min-step-time=0.2", "--checkpoint-every=50")
    job.until_training(4)
    assert "unchanged" in job.apply_again()

    # The operator is killed while training: nobody notices.
    workers, generations, step = training_processes(job.name), job.generations(), job.step()
    assert [len(of_pod) for of_pod in workers.values()] == [1] * 4
    kill_operator(cluster)
    job.until("training to go on", lambda: job.step() > step + 3)
    assert training_processes(job.name) == workers
    assert job.generations() == generations

    # Killed in the middle of a resize: exactly one more generation, same result.
    before, pods = job.history()[-1]["generation"], job.running_pods()
    for pod in pods:
        job.credentials(pod)  # asking for it would take longer than the drain
    job.scale(2)
    job.until_draining(pods)
    job.until("the Event of the drain", lambda: "Draining" in job.events(), every_s=0.02)
    kill_operator(cluster)
    job.until_training(2, beyond_step=job.step())
    assert [e["generation"] for e in job.history() if e["generation"] > before] == [before + 1]
    assert job.history()[-1]["cause"] == "ScaledByUser"
    job.until("the new generation alone to run", lambda: job.generations() == {before + 1})
    steps = steps_of(job)
    assert steps[before + 1][0] == steps[before][-1] + 1, "a planned resize repeats no step and skips none"

    # What users type.
    def shows(words: tuple[str, ...], *command: str) -> bool:
        text = cluster.kubectl(*command, "hpjob", job.name)
        return all(word in text for word in words)

    job.until("the whole size", lambda: shows(("2/2/2", "Running"), "get"))
    told_of = ("Started", "Draining", "Resized", "2 replicas train in generation")
    job.until(f"all of {told_of} in what describe tells", lambda: shows(told_of, "describe"))
    for pod in job.running_pods():
        name = pod["metadata"]["name"]
        assert "group_rank=" in cluster.kubectl("logs", name)
        assert cluster.kubectl("exec", name, "--", "printenv", "NPROC_PER_NODE").strip() == "1"
        told = cluster.kubectl("exec", name, "--", "elastipod", "agent", "status")
        assert f"pod {name}" in told
        assert "running for" in told
        with pytest.raises(HTTPError, match="401") as stranger:
            urlopen(f"http://{pod['status']['podIP']}:8080/status", timeout=PATIENCE_S)
        stranger.value.close()
        assert job.credentials(pod).key
        assert job.credentials(pod).key not in cluster.kubectl("logs", name)

    # All pods are deleted, and the checkpoints in their memory with them: the job resumes from a durable one.
    job.until("a durable checkpoint", lambda: [*job.samples().parent.glob("checkpoints/step-*")])
    generation = job.history()[-1]["generation"]
    cluster.kubectl("delete", "pod", *(pod["metadata"]["name"] for pod in job.pods()), "--grace-period=1")
    resumed = job.until(
        "steps of a later generation",
        lambda: [step for number, steps in steps_of(job).items() if number > generation for step in steps],
    )
    assert min(resumed) > 50
    job.delete()
    assert not job.pods()
    job.until(
        "the key to go with its job",
        lambda: not list_objects(cluster, "secrets", "default", labelSelector=f"HPJob%3D{job.name}"),
    )


def test_workers_keep_their_processes_over_resizes_and_crashes_of_others(job: JobRun, cluster: Cluster) -> None:
    job.apply(
        "--steps=3000", "--epochs=3", "--min-step-time=0.3", "--checkpoint-every=3000", script="train.py", start=4
    )
    job.until_training(4, beyond_step=3)
    for size in (2, 4):
        before, generation = training_processes(job.name), job.history()[-1]["generation"]
        job.scale(size)
        until_in_memory(job, before, generation, staying=2)
        job.until_training(size)
    before, generation = training_processes(job.name), job.history()[-1]["generation"]
    pod, (worker,) = next((pod, processes) for pod, processes in before.items() if processes)
    os.kill(worker.pid, signal.SIGKILL)
    until_in_memory(job, before, generation, staying=3)
    assert training_processes(job.name)[pod] != before[pod]
    with standing_still(job):  # no rank may log further steps while the logs of others are read
        audit = job.audit()  # of a job that goes on: it cannot have used all samples yet
    assert (audit["duplicates"], audit["foreign"]) == (0, 0), audit
    newest = audit["final_step"]  # which some ranks may not have logged yet
    assert 0 < 16 * (newest - 1) <= audit["samples_unique"] <= 16 * newest, "no sample before it is missing"
    assert sum(audit["steps_repeated"].values()) <= 1, audit
    assert not list(job.samples().parent.glob("checkpoints/step-*")), "no change has needed a checkpoint"


@pytest.mark.long("power-loss")
def test_power_loss(job: JobRun, cluster: Cluster) -> None:
    """`make test-long NAME=power-loss` says how long the detection takes."""
    job.apply("--steps=60", "--min-step-time=0.5", "--checkpoint-every=5", start=4)
    job.until_training(4, beyond_step=6)
    victim = one_of_its_nodes(job, cluster)
    with without_power(cluster, victim) as killed_at:
        entry = recovery_after(job, 1)
        print(f"power loss of {victim} detected after {detected_at(entry) - killed_at:.1f} s, cause {entry['cause']}")
        assert killed_at < detected_at(entry) < lost_to_kubernetes_at(cluster, victim), job.story()
        assert (entry["from"], entry["to"]) == (4, 2)
        job.until("completion", lambda: job.state() == "Completed")
    audit = job.audit()
    assert audit["exit_code"] == 0, audit
    assert job.body()["status"]["restartCount"] == 1


@pytest.mark.long("power-loss")
def test_power_loss_of_a_node_whose_workers_keep_their_state(job: JobRun, cluster: Cluster) -> None:
    """The others go on in their processes. No connection closes, so they are stuck until the operator calls them back."""
    job.apply("--steps=150", "--min-step-time=0.2", "--checkpoint-every=1000", script="train.py", start=4)
    job.until_training(4, beyond_step=10)
    before, generation = training_processes(job.name), job.history()[-1]["generation"]
    victim = one_of_its_nodes(job, cluster)
    with without_power(cluster, victim):
        entry = recovery_after(job, generation)
        assert (entry["from"], entry["to"], entry["depth"]) == (4, 2, "memory"), job.story()
        until_in_memory(job, before, generation, staying=2)
        assert not list(job.samples().parent.glob("checkpoints/step-*")), "nobody has read a checkpoint"
        job.until("completion", lambda: job.state() == "Completed")
    audit = job.audit()
    assert audit["exit_code"] == 0, audit
    assert sum(audit["steps_repeated"].values()) <= 1, audit


@pytest.mark.long("power-loss")
@pytest.mark.timeout(1200)
def test_power_is_lost_again_and_again(job: JobRun, cluster: Cluster, long_run: LongRun) -> None:
    """Runs alone, so that the time says something about the operator and not about the machine."""
    quick = {"minStableSeconds": 0, "payback": "Off"}
    job.apply("--steps=5000", "--epochs=5", "--min-step-time=0.2", "--checkpoint-every=20", elastipod=quick)
    for number in range(1, LOSSES + 1):
        job.until_training(4, beyond_step=job.step())
        before = job.history()[-1]["generation"]
        with without_power(cluster, one_of_its_nodes(job, cluster)) as killed_at:
            took = detected_at(recovery_after(job, before)) - killed_at
            long_run.count(**{f"loss {number}: detected after s": round(took, 1)})
            assert 0 < took <= DETECTION_LIMIT_S, job.story()
