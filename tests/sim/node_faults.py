"""The faults of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.events import Event
from tests.sim.fault_targets import Fault, a_node, expect_notice, expect_start, hide, touch_node

from elastipod_operator.kube.observed_node import NOTICES

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


# A node that lost its power is marked 45 to 50 s later, and silence has lasted for long enough by then.
KNOWN_AFTER_S = 60.0


def add_node(sim: Simulation, event: Event) -> str:
    return sim.cluster.add_node().name


def kill_node(sim: Simulation, event: Event) -> str:
    node = a_node(sim, event)
    if node is None:
        return ""
    agent = next((p.agent for p in sim.cluster.on_node(node) if p.agent is not None), None)
    if agent is not None:
        expect_notice(sim, agent, KNOWN_AFTER_S)
    touch_node(sim, node, event)
    sim.cluster.kill_node(node)
    return node.name


def lose_rack(sim: Simulation, event: Event) -> str:
    """All nodes that pods of the job are on lose power in one moment."""
    nodes = [n for n in sim.cluster.nodes.values() if n.powered and any(not p.ended for p in sim.cluster.on_node(n))]
    at_work = [a for a in sim.cluster.agents() if a.works(a.generation)]
    if at_work:
        expect_notice(sim, at_work[0], KNOWN_AFTER_S)
    for node in nodes:
        touch_node(sim, node, event)
        sim.cluster.kill_node(node)
    return ", ".join(n.name for n in nodes)


def part_nodes(sim: Simulation, event: Event) -> str:
    """Two nodes cannot reach each other; everybody else reaches both."""
    nodes = [n for n in sim.cluster.nodes.values() if n.powered and any(not p.ended for p in sim.cluster.on_node(n))]
    if len(nodes) < 2:
        return ""
    one, other = nodes[event.number % len(nodes)], nodes[(event.number + 1) % len(nodes)]
    for node in (one, other):
        touch_node(sim, node, event)
    # What they wait for in vain is a failure of their workers, again and again.
    sim.checker.worker_faults += 1 + int(event.seconds / sim.schedule.collective_timeout_s)
    one.apart_until[other.name] = other.apart_until[one.name] = sim.kernel.now + event.seconds
    return f"{one.name} and {other.name} for {event.seconds:g} s"


def return_node(sim: Simulation, event: Event) -> str:
    dead = [n for n in sim.cluster.nodes.values() if not n.powered and not n.out_of_service]
    if not dead:
        return ""
    sim.checker.worker_faults += 1  # a quick reboot looks like a container that failed
    sim.cluster.return_node(dead[event.number % len(dead)])
    return dead[event.number % len(dead)].name


def delete_node(sim: Simulation, event: Event) -> str:
    node = a_node(sim, event)
    if node is None:
        return ""
    touch_node(sim, node, event)
    sim.cluster.delete_node(node)
    return node.name


def temporary_node_fault(attribute: str, *, is_fault: bool) -> Fault:
    """Give a trouble that lasts for some seconds on one node. is_fault: its workers notice; else only the operator does."""

    def fault(sim: Simulation, event: Event) -> str:
        node = a_node(sim, event)
        if node is None:
            return ""
        until = sim.kernel.now + event.seconds
        if is_fault:
            touch_node(sim, node, event)
        else:
            hide(sim, node, until)
        setattr(node, attribute, until)
        if attribute == "deaf_until":
            expect_start(sim, event)
        return f"{node.name} for {event.seconds:g} s"

    return fault


def hide_all(sim: Simulation, event: Event) -> str:
    """The operator reaches nobody: training goes on and must not be disturbed."""
    for node in sim.cluster.nodes.values():
        node.hidden_until = sim.kernel.now + event.seconds
        hide(sim, node, node.hidden_until)
    return f"all for {event.seconds:g} s"


def cordon_node(sim: Simulation, event: Event) -> str:
    node = a_node(sim, event)
    if node is None:
        return ""
    node.cordoned, node.cordoned_at = not node.cordoned, sim.kernel.now
    sim.cluster.node_changed(node)
    return f"{node.name}: {node.cordoned}"


def drain_node(sim: Simulation, event: Event) -> str:
    node = a_node(sim, event)
    if node is None:
        return ""
    node.cordoned, node.cordoned_at = True, sim.kernel.now
    sim.cluster.node_changed(node)
    for pod in sim.cluster.on_node(node):
        if not pod.ended:
            sim.cluster.delete(pod, disrupted="EvictionByEvictionAPI")
    return node.name


def taint_node(sim: Simulation, event: Event) -> str:
    node = a_node(sim, event)
    if node is None:
        return ""
    node.tainted = not node.tainted
    sim.cluster.node_changed(node)
    return f"{node.name}: {node.tainted}"


def label_node(sim: Simulation, event: Event) -> str:
    """Its machine is to be replaced, or is well again. Only a label says so."""
    node = a_node(sim, event)
    if node is None:
        return ""
    node.health, node.closed_at = "" if node.health else "UnschedulablePendingReplacement", sim.kernel.now
    sim.cluster.node_changed(node)
    sim.cluster.wake_scheduler()
    return f"{node.name}: {node.health or 'well'}"


def sicken_gpu(sim: Simulation, event: Event) -> str:
    """Only a condition says so, which means what the administrator wants it to."""
    node = a_node(sim, event)
    if node is None:
        return ""
    node.is_gpu_sick, node.closed_at = True, sim.kernel.now
    sim.cluster.node_changed(node)
    return node.name


def spot_notice(sim: Simulation, event: Event) -> str:
    """A Spot machine is taken back so many seconds after its notice. By then nobody waits for its workers any more."""
    node = a_node(sim, event)
    if node is None:
        return ""
    generation = sim.checker.record.generation
    node.notice = next(key for key, lead in NOTICES.items() if lead.total_seconds() == event.seconds)
    sim.cluster.node_changed(node)

    def take_back() -> None:
        sim.checker.must_have_let_go(generation)
        touch_node(sim, node, event)
        sim.cluster.delete_node(node)

    sim.kernel.after(event.seconds, take_back)
    return f"{node.name} in {event.seconds:g} s"


def mark_out_of_service(sim: Simulation, event: Event) -> str:
    """An administrator says that a dead machine will not come back."""
    dead = [n for n in sim.cluster.nodes.values() if not n.powered]
    if not dead:
        return ""
    node = dead[event.number % len(dead)]
    node.out_of_service = True
    sim.cluster.node_changed(node)
    return node.name
