"""The API server away, etcd slow, watches cut: training goes on as if nothing was, and afterwards so does the operator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.host_view import generations, overlaps, steps_between, training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.outages import OUTAGES
from tests.long_runs import LongRun
from tests.nonempty import every

from elastipod_local.cluster import Cluster
from elastipod_local.errors import LocalClusterError

Outage = Callable[[Cluster, float], None]

OUTAGE_S = 30.0
LEAST_SPEED = 0.9
ARGUMENTS = ("--min-step-time=0.2", "--checkpoint-every=50", "--epochs=10")


@dataclass(frozen=True)
class Speed:
    """How a job trained before and during an outage: seconds and steps of both spans."""

    outage: str
    before_s: float
    before_steps: int
    during_s: float
    during_steps: int

    @property
    def ratio(self) -> float:
        """Steps per second during the outage as a part of those before."""
        return (self.during_steps / self.during_s) / (self.before_steps / self.before_s)


def while_training(job: JobRun, name: str, outage: Outage, before_s: float, seconds: float, least: float) -> Speed:
    """Have an outage while the job trains; nothing of it may change, nor may it be slower than so much of before."""
    pods, began = job.running_pods(), time.time()
    workers, history, restarts = training_processes(job.name), job.history(), job.body()["status"]["restartCount"]
    assert len(workers) == job.size()
    assert every(len(of_pod) == 1 for of_pod in workers.values())
    time.sleep(max(0.0, before_s - (time.time() - began)))
    cut = time.time()
    outage(job.cluster, seconds)
    back = time.time()
    speed = Speed(
        name,
        before_s=cut - began,
        before_steps=steps_between(job.samples(), began, cut),
        during_s=back - cut,
        during_steps=steps_between(job.samples(), cut, back),
    )
    assert training_processes(job.name) == workers
    assert {job.agent(pod)["generation"] for pod in pods} == {history[-1]["generation"]}
    assert job.history() == history
    assert job.body()["status"]["restartCount"] == restarts
    assert speed.ratio >= least, speed
    return speed


def while_resizing(job: JobRun, outage: Outage, size: int, seconds: float) -> float:
    """Have an outage from the drain of a resize on; afterwards the operator completes it. Gives the seconds that took."""
    before = job.history()[-1]["generation"]
    pods = job.running_pods()
    for pod in pods:
        job.credentials(pod)  # cannot be asked for later
    job.scale(size)
    job.until_draining(pods)
    outage(job.cluster, seconds)
    back = time.time()
    job.until_training(size)
    took = time.time() - back
    assert [(e["generation"], e["kind"], e["to"]) for e in job.history() if e["generation"] > before] == [
        (before + 1, "resize", size)
    ]
    assert job.generations() == {before + 1}
    # The operator may count the replicas before their first step is in the log.
    job.until(
        "a step of the new generation", lambda: any(g.number > before and g.steps for g in generations(job.samples()))
    )
    old, new = (g for g in generations(job.samples()) if g.number >= before)
    assert min(new.steps) == max(old.steps) + 1, "a planned resize repeats no step and skips none"
    return took


def is_exact(job: JobRun) -> bool:
    """Whether the completed job trained on every sample once, one generation at a time, and never restarted."""
    audit = job.audit()
    assert audit["exit_code"] == 0, audit
    assert not overlaps(job.samples())
    numbers = [entry["generation"] for entry in job.history()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [entry["kind"] for entry in job.history()] == ["start"] + ["resize"] * (len(numbers) - 1)
    return bool(job.body()["status"]["restartCount"] == 0)


@pytest.fixture
def calm(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with all nodes Ready again at the end."""
    yield cluster
    cluster.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=240s")


@pytest.mark.long("outage")
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("calm")
def test_every_outage(job: JobRun, long_run: LongRun) -> None:
    job.apply("--steps=4500", *ARGUMENTS)
    job.until_training(4)
    told: list[dict[str, object]] = []
    for number, (name, outage) in enumerate(OUTAGES.items()):
        speed = while_training(job, name, outage, before_s=OUTAGE_S, seconds=OUTAGE_S, least=LEAST_SPEED)
        print(f"{name} while training: {speed.ratio:.2f} of the speed before", flush=True)
        took = while_resizing(job, outage, 4 if number % 2 else 2, OUTAGE_S)
        print(f"{name} during a resize: completed {took:.1f} s after its end", flush=True)
        told.append({**asdict(speed), "ratio": speed.ratio, "resize_completed_s": round(took, 1)})
        long_run.count(**{f"{name}: speed": round(speed.ratio, 3), f"{name}: resize completed s": round(took, 1)})
        report(job.name, told)
    job.until("completion", lambda: job.state() == "Completed", 900)
    assert is_exact(job)


def report(name: str, outages: list[dict[str, object]]) -> None:
    """Write what was measured to .run/outage/<name>.json."""
    folder = ROOT / ".run" / "outage"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(outages, indent=1) + "\n")


def test_roles_freeze_die_and_return(cluster: Cluster) -> None:
    with pytest.raises(LocalClusterError, match="there is no role"):
        cluster.freeze_role("kubelet")
    with pytest.raises(LocalClusterError, match="runs already"):
        cluster.start_role("kube-scheduler")
    before = cluster.state().control_plane["kube-scheduler"]
    cluster.freeze_role("kube-scheduler")
    assert before.is_stopped()
    cluster.thaw_role("kube-scheduler")
    assert not before.is_stopped()
    cluster.freeze_role("kube-scheduler")
    cluster.kill_role("kube-scheduler")
    assert not before.is_alive()
    with pytest.raises(LocalClusterError, match="does not run"):
        cluster.thaw_role("kube-scheduler")
    cluster.start_role("kube-scheduler")
    assert cluster.state().control_plane["kube-scheduler"].is_alive()
