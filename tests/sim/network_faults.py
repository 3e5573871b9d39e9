"""What befalls the keys with which operators and agents know each other, and the calls that they sign."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.events import Event, Make
from tests.sim.fault_targets import AFTERMATH_S, LATE_WRITERS, OF_OPERATORS, a_pod

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

KEY_FAULTS = ("replay_calls", "impostor", "rotate_key", "delete_secret")


def replay_calls(sim: Simulation, event: Event) -> str:
    """Somebody who listened sends signed calls once more: no agent takes one."""
    return f"{told} calls" if (told := sim.cluster.network.replay()) else ""


def impostor(sim: Simulation, event: Event) -> str:
    """Somebody without the key answers at the address of an agent that the operator knows: nothing that it says is believed."""
    pod = a_pod(sim, event, training=True)
    # An operator that has just begun knows of no agent yet that it has the key.
    is_known = not any(other.what in OF_OPERATORS or other.what == "rotate_key" for other in sim.schedule.events)
    if pod is None or not pod.has_key() or not is_known or sim.schedule.make is Make.FOREIGN:
        return ""
    sim.cluster.network.impostors[pod.uid] = sim.kernel.now + event.seconds
    sim.checker.hidden(pod.name, sim.kernel.now + event.seconds + AFTERMATH_S)
    return f"{pod.name} for {event.seconds:g} s"


def rotate_key(sim: Simulation, event: Event) -> str:
    """The installation gets a new key; the operator begins anew with it and with the one before."""
    has_another = any(other.what in LATE_WRITERS for other in sim.schedule.events)  # which has the key before alone
    if not sim.install_keys or sim.shell is None or has_another:
        return ""
    sim.install_keys = (
        f"install key number {len(sim.install_keys) + 1} of this simulation".encode(),
        *sim.install_keys,
    )
    sim.shell.die()
    sim.start_operator()
    return f"{len(sim.install_keys)} keys"


def delete_secret(sim: Simulation, event: Event) -> str:
    """A user deletes the Secrets of the job: containers that begin then wait until there is one again.

    One of an install key that was replaced is not created again: its pods wait until somebody deletes them, and the job says so.
    """
    if any(other.what == "rotate_key" for other in sim.schedule.events):
        return ""
    num = len(sim.cluster.secrets)
    sim.cluster.secrets.clear()
    return f"{num} Secrets" if num else ""


def take_secret(sim: Simulation, event: Event) -> str:
    """Somebody else has made the Secret of the job. Later it is removed, with the pods that it misled."""
    cluster = sim.cluster
    for name, entries in cluster.secrets.items():
        cluster.secrets[name] = dict.fromkeys(entries, "somebody else's")
    cluster.network.has_foreign_secret = True

    def remove() -> None:
        cluster.secrets.clear()
        cluster.network.has_foreign_secret = False
        for pod in list(cluster.pods.values()):
            sim.checker.touched(pod.name, sim.kernel.now + AFTERMATH_S)
            cluster.delete(pod, force=True)

    sim.kernel.after(event.seconds, remove)
    return f"for {event.seconds:g} s" if cluster.secrets else ""
