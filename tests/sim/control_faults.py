"""What befalls the API server, the watches, calls, and the operator itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.sim.events import Event
from tests.sim.fault_targets import Fault
from tests.sim.kernel import Script

if TYPE_CHECKING:
    from tests.sim.shell import Shell
    from tests.sim.simulation import Play

JUMPS_S = (-3600.0, -240.0, -20.0, 20.0, 240.0, 3600.0)


def spell(name: str) -> Fault:
    """Give a trouble of the API server or of calls that lasts for some seconds (Cluster.goes_on)."""

    def fault(play: Play, event: Event) -> str:
        play.cluster.spells[name] = play.kernel.now + event.seconds
        return f"{event.seconds:g} s"

    return fault


def broken_watch(play: Play, event: Event) -> str:
    """Nothing is told for a while; then the version to go on from is gone."""
    play.cluster.spells["broken_watch"] = play.kernel.now + event.seconds
    play.kernel.after(event.seconds + 0.1, play.cluster.relist)
    return f"{event.seconds:g} s"


def repeated_watch(play: Play, event: Event) -> str:
    return f"{told} events" if (told := play.cluster.repeat_events()) else ""


def clock_jumps(play: Play, event: Event) -> str:
    """The clock of the operator's machine is set; with an odd number the operator dies then, and begins with it."""
    play.watchman.has_true_time = False
    play.cluster.clock_offset_s += (jump := JUMPS_S[event.number // 2 % len(JUMPS_S)])
    if event.number % 2 and play.shell is not None:
        play.shell.die()
        play.start_operator()
    return f"{jump:+g} s"


def second_operator(play: Play, event: Event) -> str:
    """Two operators act at once, each with watches of its own."""
    other = play.another_operator()
    play.kernel.after(event.seconds, other.die)
    return f"for {event.seconds:g} s"


def operator_stands_still(play: Play, event: Event) -> str:
    """The process stops in the middle of what it does; another one takes over; then the first goes on where it was.

    Until it looks at its lease, which is soon.
    """
    old = play.shell
    if old is None or not old.alive:
        return ""
    old.held_until = play.kernel.now + event.seconds
    play.shell = None
    play.kernel.after(min(event.seconds, 15.0) / 2, play.start_operator)
    play.kernel.after(event.seconds + 1.5, old.die)
    return f"for {event.seconds:g} s"


def operator_dies(play: Play, event: Event) -> str:
    if play.shell is not None:
        play.shell.die()
    play.kernel.after(event.seconds if event.number % 2 else 2.0, play.start_operator)
    return f"{event.seconds:g} s"


def operator_dies_soon(play: Play, event: Event) -> str:
    return operator_dies_after(play, replace(event, number=event.number % 7))


def operator_dies_after(play: Play, event: Event) -> str:
    """It dies after so many more calls; told stories name each of them."""
    shell = play.shell
    if shell is None or not shell.alive:
        return ""
    shell.die_after = event.number
    play.kernel.spawn(_reborn(play, shell, event.seconds))
    return f"after {event.number} more calls"


def _reborn(play: Play, shell: Shell, seconds: float) -> Script:
    while shell.alive and shell.die_after is not None:
        yield 1.0
    yield seconds
    play.start_operator()
