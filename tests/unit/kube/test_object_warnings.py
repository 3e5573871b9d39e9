"""What a user wrote and does not get is said: in the spec, in templates, and in the object beside them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.nonempty import every
from tests.unit.core.builders import job, observed, policy, running, seconds, trains
from tests.unit.core.builders import pod as pod_of
from tests.unit.kube.bodies import JOB_UID, job_body, pod_body

from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.snapshot import NOT_CONSIDERED, ObservedPod
from elastipod_operator.kube.object_warnings import object_warnings
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.observed_pod import observe_pod
from elastipod_operator.kube.store import Store

TOPOLOGY = {"kueue.x-k8s.io/podset-required-topology": "rack"}


def spec_of(command: list[str] | None = None, meta: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    template = {
        "metadata": meta or {},
        "spec": {"containers": [{"name": "train", "image": "i", "command": command or []}]},
    }
    return {"replicaSpecs": [{"name": "workers", "replicas": 2, "template": template}], **spec}


def warnings_of(spec: dict[str, Any]) -> str:
    policy = observe_job(job_body(spec)).policy
    assert policy is not None
    return " | ".join((*policy.sizes.warnings, *policy.warnings))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param(spec_of(["hyperpodrun", "--nproc-per-node=4", "t.py"], nprocPerNode="8"),
                     ("--nproc-per-node 4", "overrides spec.nprocPerNode 8"), id="two worker counts"),
        pytest.param(spec_of(["sh", "-c", "hyperpodrun --nproc_per_node 4 t.py"], nprocPerNode="8"),
                     ("--nproc-per-node 4",), id="within a shell's line"),
        pytest.param(spec_of(meta={"finalizers": ["example.com/mine"]}), ("template has metadata.finalizers",), id="finalizers"),
        pytest.param(spec_of(elasticPolicy=None, runPolicy={"restartPolicy": {"scaleUpSnoozeTimeInSeconds": 60}}),
                     ("scaleUpSnoozeTimeInSeconds 60 has no effect", "only one size"), id="a snooze of a job that cannot grow"),
        pytest.param(spec_of(replicas=5), ("spec.replicas is 5", "largest size 2"), id="scaled above the maximum"),
    ],
)  # fmt: skip
def test_what_does_nothing_is_said(spec: dict[str, Any], words: tuple[str, ...]) -> None:
    told = warnings_of(spec)
    assert every(word in told for word in words), told


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec_of(["hyperpodrun", "--nproc-per-node=8", "t.py"], nprocPerNode="8"), id="the same count twice"),
        pytest.param(spec_of(["hyperpodrun", "--nproc-per-node=8", "t.py"], nprocPerNode="auto"), id="auto and a count"),
        pytest.param(spec_of(["hyperpodrun", "--nproc-per-node=$NPROC_PER_NODE", "t.py"], nprocPerNode="8"), id="our variable"),
        pytest.param(spec_of(["hyperpodrun", "--nproc-per-node=gpu", "t.py"], nprocPerNode="8"), id="a count that is none"),
        pytest.param(spec_of(elasticPolicy={"maxReplicas": 4}, runPolicy={"restartPolicy": {"scaleUpSnoozeTimeInSeconds": 60}}),
                     id="a snooze of a job that grows"),
        pytest.param(spec_of(runPolicy={"restartPolicy": {"evalPeriodSeconds": 60}}), id="no snooze"),
        pytest.param(spec_of(replicas=2), id="a ceiling at the maximum"),
    ],
)  # fmt: skip
def test_what_documents_and_clients_write_is_not_warned_of(spec: dict[str, Any]) -> None:
    assert warnings_of(spec) == ""


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        pytest.param(job_body(annotations=TOPOLOGY), ["TopologyIgnored"], id="a topology on the job only"),
        pytest.param(job_body(spec_of(meta={"annotations": TOPOLOGY}), annotations=TOPOLOGY), [], id="on both, as hyp writes it"),
        pytest.param(job_body(annotations={"kueue.x-k8s.io/other": "x"}), [], id="another annotation"),
    ],
)  # fmt: skip
def test_what_the_object_says_beside_its_spec(body: dict[str, Any], reasons: list[str]) -> None:
    assert [reason for reason, _ in object_warnings(body)] == reasons
    assert observe_job(body).warnings == object_warnings(body)


def test_such_warnings_are_conditions_and_events() -> None:
    fact = job(trains(2), policy(2, 2), warnings=((Reason.TOPOLOGY_IGNORED, "put it there"),))
    told = plan(observed(fact, [(pod_of(n), running()) for n in range(2)]))
    warning = next(c for c in told.conditions if c.type == "Warning")
    assert (warning.reason, warning.message) == ("TopologyIgnored", "put it there")
    assert {note.reason for note in told.events} >= {"TopologyIgnored"}


# ---- pods that no scheduler looks at


def pending(version: int = 20, **spec: Any) -> dict[str, Any]:
    conditions = spec.pop("conditions", [])
    body = pod_body(version=version, status={"phase": "Pending", "conditions": conditions})
    return {**body, "spec": spec}


def read(body: dict[str, Any]) -> ObservedPod:
    fact = observe_pod(body, "train")
    assert fact is not None
    return fact


def test_a_pod_that_no_scheduler_has_looked_at_names_its_scheduler() -> None:
    fact = read(pending(schedulerName="gang-scheduler"))
    assert fact.problem_reason == NOT_CONSIDERED
    words = (
        "no scheduler has considered pod job-workers-0: gang-scheduler, which its schedulerName names, does not exist, "
    )
    assert words + "does not run or is slow" in fact.problem
    assert "default-scheduler, which its schedulerName names" in read(pending()).problem


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            pending(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/3"}]), id="no place"
        ),
        pytest.param(
            pending(conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]), id="gated"
        ),
        pytest.param(pending(conditions=[{"type": "PodScheduled", "status": "True"}], nodeName="n"), id="placed"),
        pytest.param(pending(nodeName="n"), id="placed by hand"),
        pytest.param(pod_body(), id="runs"),
    ],
)
def test_other_pods_were_looked_at(body: dict[str, Any]) -> None:
    assert read(body).problem_reason != NOT_CONSIDERED


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0], ids=["their clock behind", "alike", "their clock ahead"])
def test_it_is_told_once_it_lasted_by_our_own_clock(skew_s: float) -> None:
    """creationTimestamp, 12:00:00, is the API server's."""
    began = datetime(2026, 3, 1, 12, 0, tzinfo=UTC) - timedelta(seconds=skew_s)
    clock = [began]
    store = Store(lambda: clock[0])
    store.put_job(job_body(spec_of()))
    store.put_pod(pending(schedulerName="gang-scheduler"))
    told = {}
    for after in (1, 29, 30, 31):
        clock[0] = began + seconds(after)
        held = store.jobs[JOB_UID]
        seen = observed(held.fact, [(p, None) for p in held.pods.values()], now=clock[0])
        conditions = plan(seen).conditions
        told[after] = [c.reason for c in conditions if c.type == "PodsReady"]
        assert ("schedulerName" in str([c.message for c in conditions if c.type != "PodsReady"])) is False
    assert told == {1: [], 29: [], 30: [NOT_CONSIDERED], 31: [NOT_CONSIDERED]}
