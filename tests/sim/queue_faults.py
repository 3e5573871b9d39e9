"""The faults of Kueue and its queues, and what users and administrators do there."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from tests.sim import plain_workloads
from tests.sim.events import Event
from tests.sim.fault_targets import Fault
from tests.sim.kueue_server import KueueServer, priority_label
from tests.sim.kueue_workload import Workload
from tests.sim.plain_workloads import PlainGang

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

PRIORITIES = (-10, 0, 10, 1000)


def draw_one(rng: Random, until: float) -> Event:
    """Draw one event of the queues."""
    what = rng.choices(list(QUEUE_FAULTS), [weight for weight, _ in QUEUE_FAULTS.values()])[0]
    return Event(round(rng.uniform(0.0, until), 1), what, rng.randrange(1000), float(rng.choice((3, 12, 25, 60, 100))))


def _server(sim: Simulation) -> KueueServer:
    assert sim.server is not None
    return sim.server


def kueue_away(sim: Simulation, event: Event) -> str:
    """Kueue is gone for a while: nobody can read or write its objects. With an odd number calls hang."""
    _server(sim).go_away(event.seconds, hangs=bool(event.number % 2))
    return f"{event.seconds:g} s, {'calls hang' if event.number % 2 else 'calls are refused'}"


def kueue_restarts(sim: Simulation, event: Event) -> str:
    _server(sim).go_away(2.0, hangs=False)
    return "2 s"


def kueue_slow(sim: Simulation, event: Event) -> str:
    """What Kueue does takes seconds."""
    _server(sim).slow_until = sim.kernel.now + event.seconds
    return f"{event.seconds:g} s"


def lists_hang(sim: Simulation, event: Event) -> str:
    """An overloaded API server answers no list of Workloads, because its watch cache is late, and all other calls at once."""
    _server(sim).lists_hang_until = sim.kernel.now + event.seconds
    return f"{event.seconds:g} s"


def edit_quota(sim: Simulation, event: Event) -> str:
    """An administrator gives a queue another quota, and its own again after a while."""
    server = _server(sim)
    if server.is_away:
        return ""
    names = list(server.kueue.queues)
    name = names[event.number % len(names)]
    place, allowance = next(iter(server.kueue.queues[name].allowances.items()))
    nominal = event.number // 7 % (allowance.nominal + 3)
    server.kueue.set_allowance(name, place, replace(allowance, nominal=nominal))
    server.kick()
    return f"{name} has {nominal}"


def stop_queue(sim: Simulation, event: Event) -> str:
    server = _server(sim)
    names = list(server.kueue.queues)
    name, policy = names[event.number % len(names)], ("Hold", "HoldAndDrain")[event.number // 7 % 2]
    if server.is_away:
        return ""
    server.kueue.set_stop(name, policy)
    server.kick()
    sim.kernel.after(event.seconds, lambda: _start_queue(server, name))
    return f"{name}: {policy} for {event.seconds:g} s"


def _start_queue(server: KueueServer, name: str) -> None:
    if server.is_away:
        server.kernel.at(server.away_until + 1.0, lambda: _start_queue(server, name))
    else:
        server.kueue.set_stop(name, "None")
        server.kick()


def stop_local_queue(sim: Simulation, event: Event) -> str:
    """The same with the queue of one namespace."""
    server = _server(sim)
    (tenant, name), policy = (sim.name, "training"), ("Hold", "HoldAndDrain")[event.number // 7 % 2]
    if server.is_away:
        return ""
    server.kueue.set_local_stop(tenant, name, policy)
    server.kick()
    sim.kernel.after(event.seconds, lambda: _start_local_queue(server, tenant, name))
    return f"{policy} for {event.seconds:g} s"


def _start_local_queue(server: KueueServer, tenant: str, name: str) -> None:
    if server.is_away:
        server.kernel.at(server.away_until + 1.0, lambda: _start_local_queue(server, tenant, name))
    else:
        server.kueue.set_local_stop(tenant, name, "None")
        server.kick()


def _a_workload(sim: Simulation, event: Event) -> Workload | None:
    found = sorted(_server(sim).kueue.of(sim.name), key=lambda one: one.name)
    found = [] if _server(sim).is_away else [one for one in found if not one.has("Finished")]
    return found[event.number % len(found)] if found else None


def deactivate(sim: Simulation, event: Event) -> str:
    """A user deactivates a Workload of the job for a while; Kueue books it out at once."""
    server, one = _server(sim), _a_workload(sim, event)
    if one is None:
        return ""
    server.watch.taken_away(one)
    server.kueue.set_active(one, False)
    sim.kernel.after(event.seconds, lambda: _reactivate(server, one))
    return f"{one.name} for {event.seconds:g} s"


def _reactivate(server: KueueServer, one: Workload) -> None:
    if server.is_away:
        server.kernel.at(server.away_until + 1.0, lambda: _reactivate(server, one))
    elif one.uid in server.kueue.workloads:
        server.kueue.set_active(one, True)


def delete_workload(sim: Simulation, event: Event) -> str:
    """A user deletes a Workload of the job; its quota is free while pods still live on it."""
    server, one = _server(sim), _a_workload(sim, event)
    if one is None:
        return ""
    server.watch.taken_away(one)
    server.tenants[sim.name].vanished_at[one.name] = sim.kernel.now
    server.kueue.delete(one)
    return one.name


def gang_comes(sim: Simulation, event: Event) -> str:
    """A job of somebody else comes, of some priority, and stays for a while."""
    server = _server(sim)
    queues = server.settings.queues()
    queue = event.number // 3 % len(queues)
    most = max(allowance.nominal for allowance in queues[queue].allowances.values())
    gang = PlainGang(
        sim.kernel.now,
        1 + event.number // 5 % most,  # one that can never fit would stand in everybody's way under StrictFIFO
        PRIORITIES[event.number % len(PRIORITIES)],
        queue,
        event.seconds,
        float(event.number % 7),
    )
    name = f"gang-{event.number}-{len(server.tenants)}"
    sim.kernel.spawn(plain_workloads.live(server, gang, name))
    return f"{gang}"


def edit_priority(sim: Simulation, event: Event) -> str:
    """The user gives the job another class."""
    value = PRIORITIES[event.number % len(PRIORITIES)]
    sim.cluster.labels = {**sim.cluster.labels, **priority_label(value)}
    sim.cluster.edit_job(lambda spec: None)
    return f"{value}"


QUEUE_FAULTS: dict[str, tuple[float, Fault]] = {
    "gang_comes": (10, gang_comes),
    "kueue_away": (4, kueue_away),
    "kueue_restarts": (3, kueue_restarts),
    "kueue_slow": (3, kueue_slow),
    "edit_quota": (4, edit_quota),
    "stop_queue": (3, stop_queue),
    "stop_local_queue": (2, stop_local_queue),
    "deactivate": (2, deactivate),
    "delete_workload": (2, delete_workload),
    "edit_priority": (2, edit_priority),
    "lists_hang": (0, lists_hang),  # in scripted schedules only
}
"""Weight and deed of each fault of jobs in queues."""
