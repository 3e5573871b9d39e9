"""Growth that requests little before there is room: under all faults the job gets as large as the nodes allow, and never asks for more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.sim.cluster import Cluster
from tests.sim.events import Event
from tests.sim.failures import failure_of
from tests.sim.random_schedules import Schedule, draw
from tests.sim.scripted_jobs import PATIENT
from tests.sim.simulation import Simulation
from tests.slow import all_but_first

from elastipod_operator.api import JobSpec
from elastipod_operator.kube.job_policy import policy_of

MODES = ("NextIncrement", "SpareCapacityOnly")
SEEDS = range(500, 512)


def schedule(growth: str, *events: Event, nodes: int = 2, **ours: Any) -> Schedule:
    """A job of two to eight replicas in increments of two, with so many nodes at first."""
    return Schedule(
        seed=1, nodes=nodes,
        policy={"minReplicas": 2, "maxReplicas": 8, "replicaIncrementStep": 2, **PATIENT},
        specs=[{"name": "workers", "replicas": 2, "maxReplicas": 8}], run_policy={"cleanPodPolicy": "All"},
        heeds_events=True, collective_timeout_s=300.0, ours={"growth": growth, **ours}, events=events,
    )  # fmt: skip


class Watched:
    """Watches for how many pods the scheduler looks in vain, which is what an autoscaler would add nodes for."""

    def __init__(self, simulation: Simulation) -> None:
        self.most = 0
        self.restricted = 0
        self._cluster: Cluster = simulation.cluster
        look = self._cluster._schedule

        def look_and_count() -> None:
            look()
            waiting = [p for p in self._cluster.pods.values() if p.node is None and p.deleted_at is None]
            self.most = max(self.most, sum(not pod.only_on for pod in waiting))
            self.restricted += sum(bool(pod.only_on) for pod in waiting)

        self._cluster._schedule = look_and_count  # type: ignore[method-assign]  # the model is watched, not changed


NODES_COME = tuple(Event(at, "add_node") for at in (60, 61, 150, 151, 152))


@pytest.mark.parametrize(
    ("growth", "most"),
    [
        pytest.param("Maximum", 6, id="all at once"),
        pytest.param("NextIncrement", 2, id="one increment"),
        pytest.param("SpareCapacityOnly", 0, id="none"),
    ],
)
def test_so_many_pods_wait_for_nodes(growth: str, most: int) -> None:
    """The job starts on two nodes. Five more come; four of them make two increments."""
    simulation = Simulation(schedule(growth, *NODES_COME))
    watched = Watched(simulation)
    simulation.run()
    assert watched.most == most
    assert watched.restricted == 0
    assert simulation.met["told: Scaling NoSpareCapacity"] > 0 or growth != "SpareCapacityOnly"


@pytest.mark.parametrize("growth", MODES)
@pytest.mark.parametrize("seed", all_but_first(SEEDS, 2))
def test_every_schedule_ends_well(growth: str, seed: int) -> None:
    drawn = draw(seed, queued=False)
    failure = failure_of(replace(drawn, ours={**drawn.ours, "growth": growth}))
    assert failure is None, failure


def test_a_spare_that_has_a_node_takes_no_place_of_the_others() -> None:
    """Seed 501 found it: the spare was counted as one of the replicas, and nobody looked for the room of the last one."""
    drawn = draw(501, queued=False)
    assert drawn.specs[0]["spares"]
    assert failure_of(replace(drawn, ours={**drawn.ours, "growth": "SpareCapacityOnly"})) is None


def test_the_schedules_ask_for_the_mode() -> None:
    for growth in MODES:
        assert policy_of(JobSpec.model_validate(schedule(growth).spec())).growth == growth
