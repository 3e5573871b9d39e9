"""A schedule: a job, a cluster, perhaps queues with other jobs, and the faults that they meet; scripted, or drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random
from typing import Any

from tests.sim import faults, queue_faults
from tests.sim.copied_annotations import Copied
from tests.sim.events import Event, Make, Preparing
from tests.sim.fault_targets import OF_OPERATORS, UNFENCED
from tests.sim.kueue_server import RESOURCE, QueueSettings
from tests.sim.plain_workloads import PlainGang

CHAOS_S = 420.0
# The share of schedules that have queues.
QUEUED_SHARE = 0.12
CONTAINER_WEIGHTS = (6, 1, 1)
# So many jobs are applied with the annotations of another one.
COPIED_SHARE = 0.05
# The share of schedules whose training ends while faults go on.
COMPLETING_SHARE = 0.2
# The share of schedules whose storage fails, is full, or is slow.
STORAGE_SHARE = 0.15
WORKERS = (1, 1, 2, 8)
# The share of schedules in which the operator and the agents have keys.
KEYS_SHARE = 0.15
# The share of schedules with other jobs of the same operator, and how much happens to each of those at most.
NEIGHBOURS_SHARE = 0.15
MOST_EVENTS = 4
# The share of schedules with an API server whose clock differs from the operator's by one of these.
SKEWED_SHARE = 0.3
CLOCKS_S = (-3600.0, -240.0, -20.0, 20.0, 240.0, 3600.0)


@dataclass(frozen=True, slots=True)
class InQueue:
    """That a job is in a queue. at: which of them; rivals: other elastic jobs there; gangs: jobs that come and go."""

    settings: QueueSettings
    priority: int = 0
    at: int = 0
    rivals: tuple[Schedule, ...] = ()
    plain_gangs: tuple[PlainGang, ...] = ()


class Containers(Enum):
    """What a pod has beside the container of its agent, and what becomes of that one."""

    PLAIN = "the agent's container alone"
    SIDECAR = "a sidecar that never ends"
    RESTARTED = "a container that is started again when it fails"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that a simulation depends on."""

    seed: int
    nodes: int
    policy: dict[str, Any] | None
    specs: list[dict[str, Any]]
    run_policy: dict[str, Any]
    heeds_events: bool
    collective_timeout_s: float
    make: Make = Make.OURS
    ours: dict[str, Any] = field(default_factory=dict)
    """What is in spec.elastipod beside its back-off."""
    events: tuple[Event, ...] = ()
    queue: InQueue | None = None
    containers: Containers = Containers.PLAIN
    api_clock_s: float = 0.0
    """So many seconds the API server's clock is ahead of the true time."""
    agents_tell_of_others: bool = True
    """Whether agents can be asked if they reach another one; those of the version before cannot."""
    preparing: Preparing | None = None
    """What becomes of workers that agents start ahead of their first generation; None for agents of the version before."""
    completes_at: float | None = None
    """When the training is almost at its last step; None for after all faults."""
    nproc: int = 1
    """Workers in each pod."""
    has_keys: bool = False
    """Whether the operator and the agents sign what they tell each other."""
    neighbours: tuple[Schedule, ...] = ()
    """Other jobs of the same operator, each with nodes of its own."""
    copied: Copied | None = None
    """What another job was doing when this one's manifest was exported from it, with the operator's annotations."""

    def spec(self) -> dict[str, Any]:
        """Give the job's spec."""
        asked = {"resources": {"requests": {RESOURCE: "1"}}} if self.queue is not None else {}
        restarted = {"restartPolicy": "OnFailure"} if self.containers is Containers.RESTARTED else {}
        containers = [{"name": "train", "image": "train", **asked, **restarted}]
        if self.containers is Containers.SIDECAR:
            containers.append({"name": "a-sidecar", "image": "proxy"})
        template = {"spec": {"containers": containers}}
        spec = {
            "nprocPerNode": str(self.nproc),
            "replicaSpecs": [{**spec, "template": template} for spec in self.specs],
            "elasticPolicy": self.policy, "runPolicy": self.run_policy,
            # All pods at once meet the most troubles; test_growth_modes.py has the other modes.
            "elastipod": {"backoff": self._backoff(), "minStableSeconds": 10, "growth": "Maximum", **self.ours},
        }  # fmt: skip
        return {name: value for name, value in spec.items() if value is not None}

    def _backoff(self) -> dict[str, int]:
        """Quota for which there are no nodes is given back and asked for again: for it to be quiet in between, later and later."""
        return {"baseSeconds": 5, "maxSeconds": 40 if self.queue is None else 400}

    def __str__(self) -> str:
        make = "" if self.make is Make.OURS else f", agents {self.make.value}"
        make += f", the API server's clock {self.api_clock_s:+g} s" if self.api_clock_s else ""
        lines = [
            f"seed {self.seed}: {self.nodes} nodes, policy {self.policy}, specs {self.specs}, run {self.run_policy}, "
            f"heeds events: {self.heeds_events}, collective time-out {self.collective_timeout_s:g} s, {self.ours}{make}"
        ]
        if self.containers is not Containers.PLAIN:
            lines.append(f"  pods: {self.containers.value}")
        if self.copied is not None:
            lines.append(f"  a manifest with the annotations of a job that was {self.copied.value}")
        if self.preparing is not None:
            lines.append(f"  workers that are prepared: {self.preparing.value}")
        if self.completes_at is not None:
            lines.append(f"  the training ends soon after {self.completes_at:g}")
        if not self.agents_tell_of_others:
            lines.append("  agents do not tell of others")
        lines += [f"  {self.nproc} workers in each pod"] * (self.nproc > 1)
        lines += ["  calls are signed"] * self.has_keys
        lines += [f"  neighbour: {one}" for one in self.neighbours]
        if self.queue is not None:
            lines += [f"  {self.queue.settings}, priority {self.queue.priority}, queue {self.queue.at}"]
            lines += [f"  {gang}" for gang in self.queue.plain_gangs]
            lines += [f"  rival: {rival}" for rival in self.queue.rivals]
        return "\n".join([*lines, *(f"  {event}" for event in self.events)])


def draw(seed: int, *, queued: bool | None = None) -> Schedule:
    """Draw a schedule from a seed. queued: whether it has queues; None for now and then."""
    containers = Random(f"containers of {seed}").choices(list(Containers), CONTAINER_WEIGHTS)[0]
    clock_s = _draw_clock(Random(f"clocks of {seed}"))
    tells = Random(f"agents of {seed}").random() < 0.8
    schedule = replace(
        _draw_plain(seed), containers=containers, api_clock_s=clock_s, agents_tell_of_others=tells,
        copied=_draw_copied(Random(f"annotations of {seed}")), completes_at=_draw_end(Random(f"end of {seed}")),
        nproc=Random(f"workers of {seed}").choice(WORKERS),
    )  # fmt: skip
    schedule = _with_keys(Random(f"keys of {seed}"), schedule)
    schedule = _with_storage_troubles(Random(f"storage of {seed}"), schedule)
    rng = Random(f"queues of {seed}")
    is_queued = rng.random() < QUEUED_SHARE
    if is_queued if queued is None else queued:
        return _draw_queued(rng, schedule)
    return _with_neighbours(Random(f"neighbours of {seed}"), schedule)


def _with_keys(rng: Random, schedule: Schedule) -> Schedule:
    if rng.random() >= KEYS_SHARE:
        return schedule
    more = [faults.draw_of_keys(rng, CHAOS_S) for _ in range(rng.choice((1, 2, 3)))]
    more = [event for event in more if schedule.make is not Make.FOREIGN or event.what not in UNFENCED]
    return replace(schedule, has_keys=True, events=tuple(sorted([*schedule.events, *more], key=lambda e: e.at)))


def _with_neighbours(rng: Random, schedule: Schedule) -> Schedule:
    if rng.random() >= NEIGHBOURS_SHARE:
        return schedule
    return replace(
        schedule, neighbours=tuple(_draw_neighbour(rng, schedule, at) for at in range(rng.choice((1, 1, 2))))
    )


def _draw_neighbour(rng: Random, schedule: Schedule, at: int) -> Schedule:
    """Draw another job of the operator. What happens to the operator happens to both (Simulation._invite), the rest to one of them."""
    own = _draw_plain(schedule.seed * 37 + at + 1)
    events = tuple(event for event in own.events if event.what not in OF_OPERATORS)[:MOST_EVENTS]
    is_unfenced = any(event.what in UNFENCED for event in schedule.events)
    make = Make.OURS if own.make is Make.FOREIGN and is_unfenced else own.make
    return replace(own, make=make, events=events, completes_at=_draw_end(rng), api_clock_s=schedule.api_clock_s)


def _draw_end(rng: Random) -> float | None:
    return round(rng.uniform(20.0, CHAOS_S), 1) if rng.random() < COMPLETING_SHARE else None


def _with_storage_troubles(rng: Random, schedule: Schedule) -> Schedule:
    if rng.random() >= STORAGE_SHARE:
        return schedule
    more = [faults.draw_of_storage(rng, CHAOS_S) for _ in range(rng.choice((1, 1, 2)))]
    return replace(schedule, events=tuple(sorted([*schedule.events, *more], key=lambda e: e.at)))


def _draw_copied(rng: Random) -> Copied | None:
    return rng.choice(list(Copied)) if rng.random() < COPIED_SHARE else None


def _draw_clock(rng: Random) -> float:
    return rng.choice(CLOCKS_S) if rng.random() < SKEWED_SHARE else 0.0


def _draw_queued(rng: Random, schedule: Schedule) -> Schedule:
    """Put a job into queues, with others beside it."""
    sizes_of = schedule.policy["maxReplicas"] if schedule.policy is not None else schedule.specs[0]["replicas"]
    most = sizes_of + sum(spec.get("spares", 0) for spec in schedule.specs)
    queues = rng.choice((1, 1, 2))
    quota = tuple(max(5, rng.randint(most - 2, most + 3)) if at == 0 else rng.randint(2, 5) for at in range(queues))
    settings = QueueSettings(
        quota,
        flavors=rng.choice((1, 1, 1, 2)),
        strategy=rng.choice(("BestEffortFIFO", "BestEffortFIFO", "BestEffortFIFO", "StrictFIFO")),
        borrow=rng.choice(("Never", "LowerPriority")) if queues > 1 else "Never",
    )
    if settings.flavors > 1:
        settings = replace(settings, quota=tuple(2 * one for one in quota))
    rivals = tuple(_draw_rival(rng, schedule, settings, at) for at in range(rng.choice((0, 1, 1, 2))))
    plain_gangs = tuple(
        PlainGang(round(rng.uniform(0, CHAOS_S), 1), rng.randint(1, min(quota[0], 4)), rng.choice(queue_faults.PRIORITIES),
             rng.randrange(queues), float(rng.choice((20, 60, 150))), float(rng.choice((0, 2, 10))))
        for _ in range(rng.choice((0, 1, 2, 3)))
    )  # fmt: skip
    more = [queue_faults.draw_one(rng, CHAOS_S) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    events = [event for event in schedule.events if rng.random() < 0.6]
    queue = InQueue(settings, rng.choice(queue_faults.PRIORITIES), 0, rivals, plain_gangs)
    return replace(schedule, queue=queue, events=tuple(sorted([*events, *more], key=lambda e: e.at)))


def _draw_rival(rng: Random, schedule: Schedule, settings: QueueSettings, at: int) -> Schedule:
    low = rng.choice((1, 2))
    high = low + rng.choice((1, 2, 3))
    queue = InQueue(settings, rng.choice(queue_faults.PRIORITIES), rng.randrange(len(settings.quota)))
    patience = {"gracefulShutdownTimeoutInSeconds": 60, "faultyScaleDownTimeoutInSeconds": 20}
    return Schedule(
        seed=schedule.seed * 31 + at + 1,
        nodes=high,
        policy={"minReplicas": low, "maxReplicas": high, "scalingTimeoutInSeconds": rng.choice((0, 10)), **patience},
        specs=[{"name": "workers", "replicas": low, "maxReplicas": high}],
        run_policy={"cleanPodPolicy": "All", "restartPolicy": {"evalPeriodSeconds": 300}},
        heeds_events=True,
        collective_timeout_s=20.0,
        queue=queue,
    )


def _draw_plain(seed: int) -> Schedule:
    rng = Random(seed)
    low = rng.choice((1, 1, 2, 2, 3))
    high = low + rng.choice((1, 2, 3, 4))
    make = rng.choices((Make.OURS, Make.IN_PROCESS, Make.FOREIGN), (6, 3, 1))[0]
    is_fixed = rng.random() < 0.06
    events = (faults.draw(rng, CHAOS_S) for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 10))))
    happens = (e for e in events if make is not Make.FOREIGN or e.what not in UNFENCED)
    return Schedule(
        seed=seed,
        nodes=rng.randint(low, high + 1),
        policy=None if is_fixed else _draw_policy(rng, low, high),
        specs=[{"name": "workers", "replicas": low}] if is_fixed else _draw_specs(rng, low, high),
        run_policy=_draw_run_policy(rng),
        heeds_events=rng.random() < 0.9,
        collective_timeout_s=rng.choice((20.0, 20.0, 300.0)),
        make=make,
        ours={"minStableSeconds": rng.choice((0, 10, 40)), "payback": rng.choice(("Auto", "Auto", "Off"))},
        events=tuple(sorted(happens, key=lambda e: e.at)),
    )


def _draw_policy(rng: Random, low: int, high: int) -> dict[str, Any]:
    policy: dict[str, Any] = {
        "minReplicas": low, "maxReplicas": high, "scalingTimeoutInSeconds": rng.choice((0, 10, 30)),
        "gracefulShutdownTimeoutInSeconds": rng.choice((40, 90)),
        "faultyScaleDownTimeoutInSeconds": rng.choice((5, 20, 30)),
    }  # fmt: skip
    if rng.random() < 0.2:
        policy["replicaDiscreteValues"] = sorted({low, rng.randint(low, high), high})
    elif rng.random() < 0.3:
        policy["replicaIncrementStep"] = 2
    return policy


def _draw_specs(rng: Random, low: int, high: int) -> list[dict[str, Any]]:
    spares = rng.choice((0, 0, 0, 1))
    if rng.random() < 0.25:
        return [
            {"name": "base", "replicas": low, "spares": spares},
            {"name": "extra", "replicas": 0, "maxReplicas": high - low},
        ]
    return [{"name": "workers", "replicas": rng.randint(low, high), "maxReplicas": high, "spares": spares}]


def _draw_run_policy(rng: Random) -> dict[str, Any]:
    may_be_late = rng.random() < 0.85
    return {
        "cleanPodPolicy": rng.choice(("All", "None", "Running", "OnlyComplete")),
        "jobMaxRetryCount": rng.choice((None, None, None, 0, 1)),
        "activeDeadlineSeconds": None if may_be_late else rng.choice((300, 900)),
        "startupDeadlineSeconds": None if may_be_late else rng.choice((20, 200)),
        "faultDeadlineSeconds": None if may_be_late else rng.choice((10, 15, 120)),
        "ttlSecondsAfterFinished": rng.choice((None, 0, 20, 90)),
        "restartPolicy": {
            "evalPeriodSeconds": rng.choice((60, 300, 3600)),
            "numRestartBeforeFullJobRestart": rng.choice((None, None, 0, 1)),
            "maxFullJobRestarts": rng.choice((None, None, 0, 1)),
            "maxNumRepeatOffendersToAvoid": rng.choice((0, 0, 1)),
            "scaleUpSnoozeTimeInSeconds": rng.choice((0, 0, 45)),
        },
    }
