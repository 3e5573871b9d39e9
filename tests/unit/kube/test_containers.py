"""From the container statuses of a pod to one fact about the container that runs the agent."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.kube.bodies import CREATED, Body, container, pod_body

from elastipod_operator.core.snapshot import ContainerState, ObservedContainer, ObservedPod
from elastipod_operator.kube.observed_pod import observe_pod

RUNNING = {"running": {"startedAt": CREATED}}
CRASHED = {"terminated": {"exitCode": 1, "reason": "Error"}}
FINISHED = {"terminated": {"exitCode": 0, "reason": "Completed"}}


def read(*statuses: Body, phase: str = "Running", named: tuple[Body, ...] = (), **spec: Any) -> ObservedPod:
    """Give the fact of a pod whose containers are `named`, in the order of its spec, and have these statuses."""
    body = pod_body(status={"phase": phase, "containerStatuses": list(statuses)})
    body["spec"] |= {"containers": list(named) or [{"name": s["name"]} for s in statuses], **spec}
    fact = observe_pod(body, "train")
    assert fact is not None
    return fact


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param(container(waiting={"reason": "ContainerCreating"}),
                     ObservedContainer(ContainerState.WAITING, reason="ContainerCreating"), id="not started"),
        pytest.param(container(**RUNNING), ObservedContainer(ContainerState.RUNNING), id="running"),
        pytest.param(container(**CRASHED), ObservedContainer(ContainerState.TERMINATED, 1, "Error"), id="crashed"),
        pytest.param(container(**FINISHED), ObservedContainer(ContainerState.TERMINATED, 0, "Completed"), id="exit code 0"),
        pytest.param(
            {**container(**RUNNING), "restartCount": 2, "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}}},
            ObservedContainer(ContainerState.RUNNING, 3, "", 2), id="restarted",
        ),
        pytest.param(
            {**container(waiting={"reason": "CrashLoopBackOff"}), "restartCount": 2, "lastState": CRASHED},
            ObservedContainer(ContainerState.WAITING, 1, "CrashLoopBackOff", 2), id="held back after it crashed",
        ),
        pytest.param({"name": "train"}, None, id="a status without a state"),
        pytest.param({"name": "train", "state": {"terminated": {"exitCode": "x"}}, "restartCount": "y"},
                     ObservedContainer(ContainerState.TERMINATED), id="numbers that are none"),
    ],
)  # fmt: skip
def test_the_state_of_the_agent_container(status: Body, expected: ObservedContainer | None) -> None:
    assert read(status).container == expected


@pytest.mark.parametrize(
    ("status", "has_run"),
    [
        pytest.param(container(waiting={"reason": "ContainerCreating"}), False, id="not started"),
        pytest.param(container(**RUNNING), True, id="running"),
        pytest.param(container(**FINISHED), True, id="ended, which the phase does not tell yet"),
        pytest.param({**container(waiting={}), "restartCount": 1}, True, id="it waits for its next start"),
    ],
)
def test_a_container_that_ran_has_logs(status: Body, has_run: bool) -> None:
    fact = read(status).container
    assert fact is not None
    assert fact.has_run is has_run


@pytest.mark.parametrize(
    ("statuses", "ended"),
    [
        pytest.param([container(**CRASHED), container("sidecar", **RUNNING)], False, id="a sidecar runs"),
        pytest.param([container(**CRASHED), container("sidecar", **FINISHED)], True, id="all have ended, the phase follows later"),
        pytest.param([container(**RUNNING)], False, id="running"),
        pytest.param([], False, id="not reported yet"),
    ],
)  # fmt: skip
def test_whether_all_containers_have_ended(statuses: list[Body], ended: bool) -> None:
    fact = read(*statuses, named=({"name": "train"}, {"name": "sidecar"}) if len(statuses) != 1 else ())
    assert fact.containers_ended is ended


def test_a_status_that_is_missing_is_of_a_container_that_has_not_ended() -> None:
    assert not read(container(**CRASHED), named=({"name": "train"}, {"name": "sidecar"})).containers_ended


def test_kubelets_sort_statuses_by_name_so_the_first_container_is_the_one_of_the_spec() -> None:
    fact = read(
        container("a-sidecar", **RUNNING),
        container("worker", **CRASHED),
        named=({"name": "worker"}, {"name": "a-sidecar"}),
    )
    assert fact.container == ObservedContainer(ContainerState.TERMINATED, 1, "Error")
    assert not fact.started


@pytest.mark.parametrize(
    ("ended", "pod", "own", "restarts"),
    [
        pytest.param(CRASHED, "Never", None, False, id="the operator's pods are not restarted"),
        pytest.param(CRASHED, "Always", None, True, id="Always"),
        pytest.param(FINISHED, "Always", None, True, id="Always, after exit code 0"),
        pytest.param(CRASHED, "OnFailure", None, True, id="OnFailure"),
        pytest.param(FINISHED, "OnFailure", None, False, id="OnFailure, after exit code 0"),
        pytest.param(CRASHED, "Never", "Always", True, id="the container's own policy wins"),
        pytest.param(CRASHED, "Always", "Never", False, id="the container's own policy wins, both ways"),
        pytest.param(RUNNING, "Always", None, False, id="who runs needs no restart"),
    ],
)  # fmt: skip
def test_whether_the_kubelet_starts_a_container_again(ended: Body, pod: str, own: str | None, restarts: bool) -> None:
    named = {"name": "train"} | ({"restartPolicy": own} if own else {})
    fact = read(container(**ended), named=(named,), restartPolicy=pod)
    assert fact.container is not None
    assert fact.container.is_restarting is restarts


def test_a_container_that_is_held_back_is_restarting() -> None:
    held_back = {**container(waiting={"reason": "CrashLoopBackOff"}), "restartCount": 1, "lastState": CRASHED}
    fact = read(held_back, restartPolicy="Always")
    assert fact.container is not None
    assert fact.container.is_restarting


def test_a_container_that_ended_beside_a_sidecar_is_told_of() -> None:
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": "no such file: train.py"}}
    fact = read(container(**ended), container("sidecar", **RUNNING))
    assert fact.problem_reason == "ContainerEnded"
    assert "container train of pod job-workers-0 ended with exit code 3: “no such file: train.py”" in fact.problem


def test_a_container_that_is_started_again_is_told_of() -> None:
    held_back = {**container(waiting={"reason": "CrashLoopBackOff"}), "restartCount": 1, "lastState": CRASHED}
    fact = read(held_back, restartPolicy="Always")
    assert fact.problem_reason == "ContainerEnded"
    assert fact.problem == "container train of pod job-workers-0 ended with exit code 1; its kubelet restarts it"
