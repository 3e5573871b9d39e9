"""A pod as the operator reads it from the API server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.unit.kube.bodies import CREATED, container, pod_body

from elastipod_operator.core.names import PodId
from elastipod_operator.kube.observed_pod import observe_pod


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


PORT = {"name": "ELASTIPOD_AGENT_PORT", "value": "7000"}


@pytest.mark.parametrize(
    ("containers", "port"),
    [
        pytest.param([{"name": "side"}, {"name": "train", "env": [PORT]}], 7000, id="the agent's container"),
        pytest.param(
            [{"name": "other", "env": [PORT]}, {"name": "side"}], 7000, id="of another template, the first one"
        ),
        pytest.param([{"name": "train", "env": [PORT, {**PORT, "value": "7001"}]}], 7001, id="the last one holds"),
        pytest.param([{"name": "side", "env": [PORT]}, {"name": "train"}], None, id="another one's"),
        pytest.param([{"name": "train", "env": [{**PORT, "value": "$(PORT)"}]}], None, id="a reference"),
        pytest.param([{"name": "train", "env": [{**PORT, "value": "70000"}]}], None, id="no port"),
        pytest.param(
            [{"name": "train", "env": [{"name": "ELASTIPOD_AGENT_PORT", "valueFrom": {}}]}], None, id="elsewhere"
        ),
        pytest.param([{"name": "train", "env": None}], None, id="without"),
        pytest.param(
            [
                {
                    "name": "train",
                    "env": [PORT],
                    "command": ["sh", "-c"],
                    "args": ["hyperpodrun --server-port=9000 t.py"],
                }
            ],
            None,
            id="its command names another",
        ),
        pytest.param([], None, id="no containers"),
    ],
)
def test_the_port_of_a_pods_agent_is_that_of_its_environment(
    containers: list[dict[str, Any]], port: int | None
) -> None:
    body = pod_body()
    body["spec"]["containers"] = containers
    fact = observe_pod(body, "train")
    assert fact is not None
    assert fact.agent_port == port


def made_for(name: str) -> dict[str, Any]:
    """Give a container with the variables that the operator gives to that of the agent."""
    names = ("NNODES", "ELASTIPOD_JOB", "ELASTIPOD_RUN_ID", "ELASTIPOD_POD")
    key = {"name": "ELASTIPOD_KEY", "valueFrom": {"secretKeyRef": {"name": f"key-of-{name}", "key": "key"}}}
    return {"name": name, "env": [*({"name": one, "value": "x"} for one in names), PORT, key]}


@pytest.mark.parametrize(
    ("containers", "agents"),
    [
        pytest.param([{"name": "side"}, made_for("train")], "train", id="the job names another now"),
        pytest.param([made_for("train"), {"name": "side", "env": [PORT]}], "train", id="another one has a variable"),
        pytest.param([made_for("train"), made_for("side")], "side", id="both have all, so the job decides"),
        pytest.param([{"name": "train"}, {"name": "side"}], "side", id="none has, so the job decides"),
        pytest.param([{"name": "train", "env": [7, {"name": ["x"]}]}], "train", id="of any shape"),
    ],
)
def test_the_agent_runs_in_the_container_that_the_pod_was_made_with(
    containers: list[dict[str, Any]], agents: str
) -> None:
    """An edit of spec.elastipod.container does not concern pods that exist."""
    runs, waits = {"running": {"startedAt": CREATED}}, {"waiting": {"reason": "ContainerCreating"}}
    listed = [container(one["name"], **(runs if one["name"] == agents else waits)) for one in containers]
    body = pod_body(status={"phase": "Running", "containerStatuses": listed})
    body["spec"]["containers"] = containers
    fact = observe_pod(body, "side")
    assert fact is not None
    has_key = any(one.get("name") == agents and len(one.get("env", ())) > 2 for one in containers)
    assert (fact.started, fact.agent_container, fact.key_secret) == (
        True,
        agents,
        f"key-of-{agents}" if has_key else "",
    )


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
