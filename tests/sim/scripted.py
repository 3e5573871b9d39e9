"""Stories that were worth writing down: one trouble each, told exactly."""

from __future__ import annotations

from tests.sim.events import Event
from tests.sim.story import Story

PATIENT = {
    "scalingTimeoutInSeconds": 5,
    "gracefulShutdownTimeoutInSeconds": 60,
    "faultyScaleDownTimeoutInSeconds": 20,
}


def _story(
    *events: Event, low: int = 2, high: int = 4, nodes: int = 4, timeout_s: float = 300.0, retries: int | None = None
) -> Story:
    return Story(
        seed=1,
        nodes=nodes,
        policy={"minReplicas": low, "maxReplicas": high, **PATIENT},
        specs=[{"name": "workers", "replicas": low, "maxReplicas": high}],
        run_policy={"cleanPodPolicy": "All", "jobMaxRetryCount": retries},
        heeds_events=True,
        collective_timeout_s=timeout_s,
        events=events,
    )


STORIES: dict[str, Story] = {
    "nothing happens": _story(),
    "nodes come one after the other": _story(Event(60, "add_node"), Event(90, "add_node"), nodes=2),
    "a node loses power": _story(Event(100, "kill_node", 1)),
    "a worker crashes while a node loses power": _story(Event(100, "kill_node", 1), Event(100.1, "crash_worker", 2)),
    "a worker crashes in a drain": _story(Event(100, "drain_node", 0), Event(100.4, "crash_worker", 2)),
    "a node loses power in a drain": _story(Event(100, "drain_node", 0), Event(101, "kill_node", 2)),
    "a second node is drained during the first drain": _story(
        Event(100, "drain_node", 0), Event(100.9, "drain_node", 2)
    ),
    "no agent can be reached for minutes": _story(Event(100, "hide_all", 0, 200)),
    "the user scales down while no agent can be reached": _story(
        Event(100, "hide_all", 0, 200), Event(101, "scale", 1)
    ),
    "the operator is away for minutes": _story(Event(100, "operator_dies", 1, 250)),
    "the operator dies in a recovery": _story(Event(99, "operator_dies_soon", 3, 5), Event(100, "crash_worker", 0)),
    "the operator dies between the record and the first stop": _story(
        Event(99, "operator_dies_soon", 1, 5), Event(100, "drain_node", 0)
    ),
    "the user scales down and up again in a resize": _story(
        Event(100, "scale", 1), Event(101, "scale", 3), Event(130, "scale", 2)
    ),
    "the job is suspended in a recovery and in a drain": _story(
        Event(100, "crash_worker", 0), Event(100.2, "suspend", 0, 60), Event(200, "drain_node", 0),
        Event(200.7, "suspend", 0, 30),
    ),
    "containers end at once on every node": _story(*(Event(1, "sicken_node", at, 100) for at in range(4))),
    "the job is deleted before anything runs": _story(Event(0.05, "delete_job")),
    "the job is deleted in a drain": _story(Event(100, "drain_node", 0), Event(100.5, "delete_job")),
    "the job is deleted while no agent can be reached": _story(
        Event(100, "hide_all", 0, 200), Event(130, "delete_job")
    ),
    "a lost pod comes back before it is deleted": _story(
        Event(100, "freeze_node", 0, 30), Event(110, "operator_dies_soon", 1, 25)
    ),
    "workers fail over a dead node before it is known, and no retry is left": _story(
        Event(100, "kill_node", 1), timeout_s=5.0, retries=0
    ),
    "the quota refuses pods for a while": _story(Event(0, "creates_refused", 0, 60), Event(150, "delete_pod", 1)),
}  # fmt: skip
