"""The jobs of the scripted schedules."""

from __future__ import annotations

from typing import Any

from tests.sim.copied_annotations import Copied
from tests.sim.events import Event, Make, Preparing
from tests.sim.random_schedules import Containers, Schedule

PATIENT = {
    "scalingTimeoutInSeconds": 5,
    "gracefulShutdownTimeoutInSeconds": 60,
    "faultyScaleDownTimeoutInSeconds": 20,
}
TWO = [{"name": "base", "replicas": 2}, {"name": "extra", "replicas": 0, "maxReplicas": 2}]


def scripted_job(
    *events: Event,
    low: int = 2,
    high: int = 4,
    nodes: int = 4,
    timeout_s: float = 300.0,
    retries: int | None = None,
    specs: list[dict[str, Any]] | None = None,
    step: int = 1,
    make: Make = Make.OURS,
    ours: dict[str, Any] | None = None,
    seed: int = 1,
    containers: Containers = Containers.PLAIN,
    api_clock_s: float = 0.0,
    deadlines: dict[str, int] | None = None,
    tells: bool = True,
    copied: Copied | None = None,
    preparing: Preparing | None = None,
    completes_at: float | None = None,
    has_keys: bool = False,
    nproc: int = 1,
    **restarts: int,
) -> Schedule:
    return Schedule(
        seed=seed,
        nodes=nodes,
        policy={"minReplicas": low, "maxReplicas": high, "replicaIncrementStep": step, **PATIENT},
        specs=specs or [{"name": "workers", "replicas": low, "maxReplicas": high}],
        run_policy={
            "cleanPodPolicy": "All",
            "jobMaxRetryCount": retries,
            "restartPolicy": restarts,
            **(deadlines or {}),
        },
        heeds_events=True,
        collective_timeout_s=timeout_s,
        make=make,
        ours=ours or {},
        events=events,
        containers=containers,
        api_clock_s=api_clock_s,
        agents_tell_of_others=tells,
        copied=copied,
        preparing=preparing,
        completes_at=completes_at,
        has_keys=has_keys,
        nproc=nproc,
    )
