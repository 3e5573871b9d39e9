"""Situations of jobs for tests of what users are told: a schedule runs up to a moment, and the objects of that moment are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.sim.kueue_server import LOCAL_QUEUE
from tests.sim.objects import SimPod
from tests.sim.random_schedules import Schedule
from tests.sim.simulation import Simulation

from elastipod_client.situation import Situation
from elastipod_operator.kube.node_signals import CONFIGURED, parse_signals

Body = dict[str, Any]
Play = Callable[[SimPod, Body], None]
NO_ROOM = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
PATIENCE_S = 60.0
AGO = "2026-01-01T00:00:10Z"


def stage(
    schedule: Schedule,
    at: float,
    play: Play | None = None,
    total_steps: int | None = None,
    until: str = "",
    signals: str = "",
) -> Situation:
    """Give the objects of a job at a virtual time, as the operator left them.

    until: the reason of the state that the job is to have by then; for what passes soon, it waits for it.
    signals: what the operator, but nobody who explains the job later, is told about announcements of nodes.
    play: changes what the API server shows of each pod, for parts of a kubelet or scheduler that the model lacks.
    """
    with pytest.MonkeyPatch.context() as patch:
        if play is not None:
            patch.setattr(SimPod, "body", _played(SimPod.body, play))
        for signal, effect in parse_signals(signals).items():
            patch.setitem(CONFIGURED, signal, effect)
        sim = Simulation(schedule)
        if total_steps is not None:
            sim.kernel.at(50.0, lambda: setattr(sim.training, "total", total_steps))
        for event in schedule.events:
            sim.kernel.at(event.at, partial(sim._inject, event))
        sim.kernel.run(at)
        if until and not sim.kernel.run(at + PATIENCE_S, lambda: _reason(sim) == until):
            raise AssertionError(f"the job is never {until}, but {_reason(sim)}")
        found = _situation(sim)
        for shell in sim.shells:
            shell.die()
        return found


def _reason(sim: Simulation) -> str:
    """Give the reason of the job's present state; empty before an operator has seen it."""
    conditions = sim.cluster.job.status.get("conditions") if sim.cluster.job is not None else None
    return str(conditions[-1]["reason"]) if conditions else ""


def _played(body: Callable[[SimPod], Body], play: Play) -> Callable[[SimPod], Body]:
    def played(pod: SimPod) -> Body:
        found = body(pod)
        play(pod, found)
        return found

    return played


def _situation(sim: Simulation) -> Situation:
    server = sim.server
    return Situation(
        now=sim.kernel.utc(),
        job=sim.cluster.job_body(),
        pods=[pod.body() for pod in sim.cluster.pods.values()],
        nodes={node.name: node.body() for node in sim.cluster.nodes.values()},
        events=list(sim.cluster.events),
        workloads=[one.body() for one in server.kueue.of(sim.name)] if server is not None else [],
        local_queue={"metadata": {"name": LOCAL_QUEUE}} if server is not None else None,
    )


def no_room(pod: SimPod, body: Body) -> None:
    """The scheduler has considered the pod, and found no node."""
    if pod.node is None and pod.deleted_at is None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_ROOM}
        body["status"]["conditions"] = [{**condition, "lastTransitionTime": AGO}]


def no_image(pod: SimPod, body: Body) -> None:
    """The kubelet cannot pull the image."""
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "train:1"'}
    body["status"] |= {"phase": "Pending", "podIP": ""}
    body["status"]["containerStatuses"] = [
        {"name": "train", "image": "train:1", "restartCount": 0, "state": {"waiting": waiting}}
    ]


def too_much_memory(pod: SimPod, body: Body) -> None:
    """The kernel killed a container that ended."""
    for status in body["status"].get("containerStatuses", []):
        if ended := status["state"].get("terminated"):
            ended |= {"reason": "OOMKilled", "exitCode": 137}
