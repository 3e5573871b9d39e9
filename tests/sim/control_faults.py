"""The faults of the API server, of watches and calls, and of the operator itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.sim.events import Event
from tests.sim.fault_targets import Fault
from tests.sim.kernel import Script

if TYPE_CHECKING:
    from tests.sim.shell import Shell
    from tests.sim.simulation import Simulation

JUMPS_S = (-3600.0, -240.0, -20.0, 20.0, 240.0, 3600.0)


def temporary_fault(name: str) -> Fault:
    """Give a trouble of the API server or of calls that lasts for some seconds (Cluster.goes_on)."""

    def fault(sim: Simulation, event: Event) -> str:
        sim.cluster.faults_until[name] = sim.kernel.now + event.seconds
        return f"{event.seconds:g} s"

    return fault


def broken_watch(sim: Simulation, event: Event) -> str:
    """Nothing is told for a while; then the version to go on from is gone."""
    sim.cluster.faults_until["broken_watch"] = sim.kernel.now + event.seconds
    sim.kernel.after(event.seconds + 0.1, sim.cluster.relist)
    return f"{event.seconds:g} s"


def repeated_watch(sim: Simulation, event: Event) -> str:
    return f"{told} events" if (told := sim.cluster.repeat_events()) else ""


def clock_jumps(sim: Simulation, event: Event) -> str:
    """The clock of the operator's machine is set; with an odd number the operator dies then, and begins with it."""
    jump = JUMPS_S[event.number // 2 % len(JUMPS_S)]
    for one in (sim, *sim.neighbours):
        one.checker.has_true_time = False
        one.cluster.clock_offset_s += jump
        one.checker.clock_error_s += abs(jump)
    if event.number % 2 and sim.shell is not None:
        sim.shell.die()
        sim.start_operator()
    return f"{jump:+g} s"


def second_operator(sim: Simulation, event: Event) -> str:
    """Two operators act at once, each with watches of its own."""
    other = sim.another_operator()
    sim.kernel.after(event.seconds, other.die)
    return f"for {event.seconds:g} s"


def operator_stands_still(sim: Simulation, event: Event) -> str:
    """The process stops in the middle of what it does; another one takes over; then the first goes on where it was.

    Until it looks at its lease, which is soon.
    """
    old = sim.shell
    if old is None or not old.alive:
        return ""
    old.held_until = sim.kernel.now + event.seconds
    sim.shell = None
    sim.kernel.after(min(event.seconds, 15.0) / 2, sim.start_operator)
    sim.kernel.after(event.seconds + 1.5, old.die)
    return f"for {event.seconds:g} s"


def operator_dies(sim: Simulation, event: Event) -> str:
    if sim.shell is not None:
        sim.shell.die()
    sim.kernel.after(event.seconds if event.number % 2 else 2.0, sim.start_operator)
    return f"{event.seconds:g} s"


def operator_dies_soon(sim: Simulation, event: Event) -> str:
    return operator_dies_after(sim, replace(event, number=event.number % 7))


def operator_dies_after(sim: Simulation, event: Event) -> str:
    """It dies after so many more calls; scripted schedules name each of them."""
    shell = sim.shell
    if shell is None or not shell.alive:
        return ""
    shell.die_after = event.number
    sim.kernel.spawn(_restart_operator(sim, shell, event.seconds))
    return f"after {event.number} more calls"


def _restart_operator(sim: Simulation, shell: Shell, seconds: float) -> Script:
    while shell.alive and shell.die_after is not None:
        if sim.server is not None:
            sim.server.watch.hinder(seconds)
        yield 1.0
    yield seconds
    sim.start_operator()
