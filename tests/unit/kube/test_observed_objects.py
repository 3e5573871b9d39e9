"""From the API server's objects to facts: plain words for people, small records for the core."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.kube.bodies import CREATED, container, job_body, node_body, pod_body

from elastipod_operator.core.names import ANNOTATION_APPLIED, FINALIZER, PodId
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.kube.applied import encode_applied
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.observed_node import disruption_of, observe_node, tolerations_of
from elastipod_operator.kube.observed_pod import observe_pod

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def test_a_job_is_read_with_all_that_the_core_needs() -> None:
    record = Record(generation=3, members=(PodId("workers", 0, 0),))
    body = job_body(
        annotations={"elastipod.io/state": encode(record), "elastipod.io/drain-on-delete": "true"}, finalizers=[FINALIZER],
        deletionTimestamp="2026-03-01T12:10:00Z",
    )  # fmt: skip
    body["status"] = {"conditions": [
        {"type": "Running", "status": "True", "reason": "Training", "message": "m", "lastTransitionTime": CREATED}
    ], "elasticScalingStatus": {"podsScaled": True}}  # fmt: skip
    fact = observe_job(body)
    assert fact.scaling == {"podsScaled": True}
    assert (fact.namespace, fact.name, fact.record, fact.spec_error) == ("team", "job", record, "")
    assert (fact.has_finalizer, fact.drain_on_delete) == (True, True)
    assert fact.deleting_since == datetime(2026, 3, 1, 12, 10, tzinfo=UTC)
    assert [(c.type, c.status, c.reason, c.message) for c in fact.conditions] == [("Running", True, "Training", "m")]


@pytest.mark.parametrize("text", ["", "{", '{"v":0}', "7", "z:nonsense"])
def test_a_damaged_record_counts_as_lost(text: str) -> None:
    fact = observe_job(job_body(annotations={"elastipod.io/state": text}))
    assert (fact.record, fact.unmanaged) == (None, "")


def test_a_record_of_a_later_version_is_none_of_ours() -> None:
    fact = observe_job(job_body(annotations={"elastipod.io/state": '{"v":99}'}))
    assert fact.record is None
    assert "version 99" in fact.unmanaged


def test_the_history_tells_of_the_newest_generation() -> None:
    entry = (
        '{"generation":%d,"from":0,"to":2,"kind":"start","cause":"C","at":"2026-03-01T12:00:00Z",'
        '"detected_at":"2026-03-01T12:00:00Z","running_at":null}'
    )
    text = f"[{entry % 3},{entry % 12}]"
    assert observe_job(job_body(annotations={"elastipod.io/history": text})).history_generation == 12
    assert observe_job(job_body(annotations={"elastipod.io/history": "nonsense"})).history_generation == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param({"elasticPolicy": {"minReplicas": 6, "maxReplicas": 4}}, "minReplicas", id="bounds that cross"),
        pytest.param({"replicas": 1, "elasticPolicy": {"minReplicas": 2}}, "spec.replicas is 1", id="a ceiling below the minimum"),
        pytest.param({"elasticPolicy": {"minReplicas": 0, "maxReplicas": 0}, "replicaSpecs": [
            {"name": "workers", "maxReplicas": 0, "template": {}}]}, "maximum is 0", id="a maximum of nothing"),
        pytest.param({"nprocPerNode": "many"}, "nprocPerNode", id="workers that cannot be counted"),
        pytest.param({"replicaSpecs": []}, "replicaSpecs", id="no pods at all"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_used_says_why_and_never_raises(spec: dict[str, Any], words: str) -> None:
    fact = observe_job(job_body(spec))
    assert fact.policy is None
    assert words in fact.spec_error


def test_the_defaults_are_filled_in() -> None:
    policy = observe_job(job_body()).policy
    assert policy is not None
    assert (policy.scaling_timeout, policy.graceful_timeout, policy.faulty_timeout) == (
        seconds(60),
        seconds(600),
        seconds(30),
    )
    assert (policy.max_retries, policy.ttl, policy.active_deadline, policy.suspend) == (None, None, None, False)
    assert (policy.agent_port, policy.container, policy.min_stable) == (8080, "train", seconds(30))


@pytest.mark.parametrize("ttl", [None, 0, -1])
def test_no_time_to_live_means_never(ttl: int | None) -> None:
    policy = observe_job(job_body({"runPolicy": {"ttlSecondsAfterFinished": ttl}})).policy
    assert policy is not None
    assert policy.ttl is None


@pytest.mark.parametrize(
    ("specs", "elastic", "limits"),
    [
        pytest.param([{"name": "a", "replicas": 2, "maxReplicas": 4}], {}, [4], id="one spec with its own maximum"),
        pytest.param([{"name": "a", "replicas": 2}], {"maxReplicas": 6}, [6], id="one spec under the policy's maximum"),
        pytest.param([{"name": "a", "replicas": 2}, {"name": "b", "maxReplicas": 3}], {}, [2, 3], id="base and extra"),
        pytest.param([{"name": "a", "replicas": 2}, {"name": "b"}], {"maxReplicas": 6}, [2, 4], id="what is left goes to the last"),
        pytest.param([{"name": "a"}], {}, [1], id="at least one"),
    ],
)  # fmt: skip
def test_how_many_pods_each_spec_may_hold(
    specs: list[dict[str, Any]], elastic: dict[str, Any], limits: list[int]
) -> None:
    spec = {"replicaSpecs": [{**s, "template": {}} for s in specs], "elasticPolicy": elastic}
    policy = observe_job(job_body(spec)).policy
    assert policy is not None
    assert [shape.limit for shape in policy.specs] == limits


@pytest.mark.parametrize(
    ("containers", "ours", "port"),
    [
        pytest.param([{"name": "x"}], {}, 8080, id="8080 when nothing is said"),
        pytest.param([{"name": "x"}], {"agentPort": 9000}, 9000, id="the job's own setting"),
        pytest.param([{"name": "x", "ports": [{"name": "agent", "containerPort": 7000}]}], {"agentPort": 9000}, 7000,
                     id="a port named agent wins"),
        pytest.param([{"name": "x", "ports": [{"containerPort": 7000}]}], {}, 8080, id="a nameless port says nothing"),
    ],
)  # fmt: skip
def test_the_port_of_the_agent(containers: list[dict[str, Any]], ours: dict[str, Any], port: int) -> None:
    spec = {
        "replicaSpecs": [{"name": "w", "replicas": 1, "template": {"spec": {"containers": containers}}}],
        "elastipod": ours,
    }
    policy = observe_job(job_body(spec)).policy
    assert policy is not None
    assert policy.agent_port == port


@pytest.mark.parametrize(
    ("elastic", "ours", "seconds"),
    [
        pytest.param(None, {}, 600, id="ten minutes where nothing is said"),
        pytest.param(None, {"gracefulShutdownTimeoutInSeconds": 40}, 40, id="a job of one size"),
        pytest.param({"gracefulShutdownTimeoutInSeconds": 50}, {}, 50, id="the elastic policy's own"),
        pytest.param({"gracefulShutdownTimeoutInSeconds": 50}, {"gracefulShutdownTimeoutInSeconds": 40}, 40, id="ours counts before it"),
        pytest.param({"gracefulShutdownTimeoutInSeconds": 50}, {"gracefulShutdownTimeoutInSeconds": None}, 50, id="null is absent"),
        pytest.param(None, {"gracefulShutdownTimeoutInSeconds": 0}, 0, id="none at all"),
    ],
)  # fmt: skip
def test_the_time_of_a_drain(elastic: dict[str, Any] | None, ours: dict[str, Any], seconds: int) -> None:
    policy = observe_job(job_body({"elasticPolicy": elastic, "elastipod": ours})).policy
    assert policy is not None
    assert policy.graceful_timeout == timedelta(seconds=seconds)


def test_a_pod_is_read() -> None:
    status = {"phase": "Running", "podIP": "10.0.0.7", "containerStatuses": [
        container("sidecar", running={"startedAt": CREATED}), container(running={"startedAt": CREATED})]}  # fmt: skip
    fact = observe_pod(pod_body(3, status=status), "train")
    assert fact is not None
    assert (fact.id, fact.ip, fact.node, fact.started, fact.ended) == (
        PodId("workers", 3, 0),
        "10.0.0.7",
        "node-1",
        True,
        False,
    )
    assert (fact.problem, fact.disruption, fact.deletion_grace) == ("", "", None)


def test_a_pod_starts_with_the_container_of_its_agent() -> None:
    status = {
        "phase": "Running",
        "containerStatuses": [container("sidecar", running={"startedAt": CREATED}), container(waiting={})],
    }
    fact = observe_pod(pod_body(status=status), "train")
    assert fact is not None
    assert not fact.started


def test_a_pod_of_somebody_else_is_none_of_ours() -> None:
    assert observe_pod(pod_body(labels={"app": "other"}), "train") is None


def test_a_pod_that_is_about_to_go_says_so() -> None:
    status = {"phase": "Running", "conditions": [
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}  # fmt: skip
    deletion: dict[str, Any] = {"deletionTimestamp": "2026-03-01T12:40:00Z", "deletionGracePeriodSeconds": 90}
    fact = observe_pod(pod_body(status=status, **deletion), "train")
    assert fact is not None
    assert (fact.disruption, fact.deletion_grace) == ("EvictionByEvictionAPI", timedelta(seconds=90))


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        pytest.param({"containerStatuses": [container(waiting={"reason": "ImagePullBackOff", "message": "back-off\n pulling"})]},
                     "ImagePullFailed", ("image train:1", "cannot be pulled", "back-off pulling", "pull secret"), id="an image"),
        pytest.param({"containerStatuses": [container(running={}), container("side", waiting={"reason": "ErrImagePull"})]},
                     "ImagePullFailed", ("cannot be pulled",), id="an image of a sidecar"),
        pytest.param({"containerStatuses": [container(waiting={"reason": "CreateContainerConfigError", "message": "no secret x"})]},
                     "ContainerCannotStart", ("container train", "no secret x"), id="a missing secret"),
        pytest.param({"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
                     "Unschedulable", ("0/3 nodes are available",), id="no node"),
        pytest.param({"phase": "Failed", "containerStatuses": [container(terminated={"exitCode": 137, "reason": "OOMKilled"})]},
                     "ContainerEnded", ("more memory than its limit", "resources.limits.memory"), id="out of memory"),
        pytest.param({"phase": "Failed", "containerStatuses": [container(terminated={"exitCode": 2, "message": "no such file"})]},
                     "ContainerEnded", ("exit code 2", "no such file", "hyperpodrun"), id="an exit code"),
        pytest.param({"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
                     "ContainerEnded", ("low on memory",), id="evicted by its kubelet"),
        pytest.param({"phase": "Failed", "reason": "Evicted", "message": "low on disk",
                      "containerStatuses": [container(terminated={"exitCode": 137, "reason": "Error"})]},
                     "ContainerEnded", ("pod job-workers-0 ended: Evicted: low on disk",), id="evicted while it trained"),
        pytest.param({"initContainerStatuses": [container("fetch", waiting={"reason": "ErrImagePull", "message": "no such tag"})],
                      "containerStatuses": [container(waiting={"reason": "PodInitializing"})]},
                     "ImagePullFailed", ("image train:1", "no such tag"), id="an image of an init container"),
        pytest.param({"initContainerStatuses": [container("fetch", waiting={"reason": "CreateContainerError", "message": "no dir"})]},
                     "ContainerCannotStart", ("container fetch", "no dir"), id="an init container that cannot be made"),
        pytest.param({"phase": "Failed", "initContainerStatuses": [
                          container("first", terminated={"exitCode": 0}),
                          container("fetch", terminated={"exitCode": 7, "message": "no data"})],
                      "containerStatuses": [container(waiting={"reason": "PodInitializing"})]},
                     "ContainerEnded", ("init container fetch of pod job-workers-0 ended with exit code 7: “no data”",),
                     id="an init container that failed"),
        pytest.param({"containerStatuses": [container(waiting={"reason": "ContainerCreating"})]}, "", (), id="nothing is wrong"),
    ],
)  # fmt: skip
def test_troubles_are_told_in_plain_words(status: dict[str, Any], reason: str, words: tuple[str, ...]) -> None:
    fact = observe_pod(pod_body(status={"phase": "Pending", **status}), "train")
    assert fact is not None
    assert fact.problem_reason == reason
    assert [word for word in words if word not in fact.problem] == [], fact.problem
    assert bool(fact.problem) is bool(reason)
    assert "\n" not in fact.problem
    is_about_launching = reason == "ContainerEnded" and "hyperpodrun" in fact.problem
    assert is_about_launching is ("hyperpodrun" in words), "who was ended by others need not change its command"


def test_endless_messages_are_cut() -> None:
    status = {"phase": "Failed", "message": "x" * 5000}
    fact = observe_pod(pod_body(status=status), "train")
    assert fact is not None
    assert len(fact.problem) < 400


@pytest.mark.parametrize(
    ("body", "disrupted"),
    [
        pytest.param(node_body(), "", id="a healthy node"),
        pytest.param(node_body(unschedulable=True), "", id="a cordoned one"),
        pytest.param(node_body(taints=[{"key": "team", "effect": "NoSchedule"}]), "", id="a taint that keeps newcomers off"),
        pytest.param(node_body(taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]), "",
                     id="the node controller's own taint is judged by the agents"),
        pytest.param(node_body(taints=[{"key": "maintenance", "effect": "NoExecute"}]), "taint maintenance:NoExecute", id="NoExecute"),
        pytest.param(node_body(taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]),
                     "taint karpenter.sh/disrupted:NoSchedule", id="an announced end"),
        pytest.param(node_body(taints=[{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]),
                     "taint aws-node-termination-handler/spot-itn:NoSchedule", id="a Spot notice"),
        pytest.param(node_body(labels={"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReplacement"}),
                     "label sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReplacement", id="a health label"),
        pytest.param(node_body(labels={"sagemaker.amazonaws.com/node-health-status": "Schedulable"}), "", id="a good health label"),
    ],
)  # fmt: skip
def test_what_drives_pods_off_a_node(body: dict[str, Any], disrupted: str) -> None:
    assert observe_node(body, None, NOW).disruption == disrupted


def test_a_notice_of_spot_counts_from_its_first_sight() -> None:
    """Whatever clock dated the taint."""
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    notice = {
        "key": "aws-node-termination-handler/spot-itn",
        "effect": "NoSchedule",
        "timeAdded": "2026-03-01T09:00:00Z",
    }
    first = observe_node(node_body(taints=[notice]), None, now)
    assert first.leaves_at == now + timedelta(seconds=120)
    later = observe_node(node_body(taints=[notice], unschedulable=True), first, now + timedelta(seconds=50))
    assert later.leaves_at == first.leaves_at
    assert observe_node(node_body(), later, now).leaves_at is None
    other = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
    assert observe_node(node_body(taints=[other]), None, now).leaves_at is None


def test_a_node_is_not_ready_since_it_was_first_seen_so() -> None:
    first = observe_node(node_body(ready="Unknown"), None, NOW)
    assert (first.ready, first.not_ready_since) == (False, NOW)
    assert observe_node(node_body(ready="False"), first, NOW + seconds(60)).not_ready_since == NOW
    back = observe_node(node_body(), first, NOW + seconds(60))
    assert (back.ready, back.not_ready_since) == (True, None)
    assert observe_node(node_body(ready="Unknown"), back, NOW + seconds(90)).not_ready_since == NOW + seconds(90)


def test_out_of_service_is_read_and_is_no_drain() -> None:
    fact = observe_node(
        node_body(taints=[{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]), None, NOW
    )
    assert (fact.out_of_service, fact.disruption) == (True, "")


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        pytest.param({"operator": "Exists"}, True, id="everything"),
        pytest.param({"key": "maintenance", "operator": "Exists"}, True, id="the key"),
        pytest.param({"key": "maintenance", "value": "x"}, True, id="key and value"),
        pytest.param({"key": "maintenance", "value": "y"}, False, id="another value"),
        pytest.param({"key": "other", "operator": "Exists"}, False, id="another key"),
        pytest.param({"operator": "Exists", "effect": "NoSchedule"}, False, id="another effect"),
        pytest.param({"operator": "Exists", "tolerationSeconds": 300}, False, id="for a while only"),
    ],
)
def test_who_tolerates_a_taint_may_stay(toleration: dict[str, Any], stays: bool) -> None:
    disruption = disruption_of(node_body(taints=[{"key": "maintenance", "value": "x", "effect": "NoExecute"}]))
    assert (disruption.reason_for([toleration]) == "") is stays


def test_only_what_every_template_tolerates_counts() -> None:
    always, never = {"operator": "Exists"}, {"key": "x"}
    templates = [{"spec": {"tolerations": [always, never]}}, {"spec": {"tolerations": [always]}}]
    spec = {"replicaSpecs": [{"name": f"s{n}", "template": template} for n, template in enumerate(templates)]}
    assert tolerations_of(job_body(spec)) == [always]
    assert tolerations_of({"metadata": {}, "spec": {"replicaSpecs": []}}) == []


def test_a_toleration_that_was_edited_in_or_out_is_none_of_the_pods_that_run() -> None:
    """They were made from the template as it was taken up."""
    always = {"operator": "Exists"}
    before = {
        "replicaSpecs": [{"name": "workers", "template": {"spec": {"tolerations": [always]}}}],
        "nprocPerNode": "auto",
    }
    after = {**before, "replicaSpecs": [{"name": "workers", "template": {"spec": {}}}]}
    for taken_up, edited, counts in ((before, after, [always]), (after, before, [])):
        body = job_body(edited, annotations={ANNOTATION_APPLIED: encode_applied(taken_up)})
        assert tolerations_of(body) == counts
