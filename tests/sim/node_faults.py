"""What befalls nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.events import Event
from tests.sim.victims import Fault, a_node, hide, touch_node

if TYPE_CHECKING:
    from tests.sim.story import Play


def add_node(play: Play, event: Event) -> str:
    return play.cluster.add_node().name


def kill_node(play: Play, event: Event) -> str:
    node = a_node(play, event)
    if node is None:
        return ""
    touch_node(play, node, event)
    play.cluster.kill_node(node)
    return node.name


def return_node(play: Play, event: Event) -> str:
    dead = [n for n in play.cluster.nodes.values() if not n.powered and not n.out_of_service]
    if not dead:
        return ""
    play.watchman.worker_faults += 1  # a quick reboot looks like a container that failed
    play.cluster.return_node(dead[event.number % len(dead)])
    return dead[event.number % len(dead)].name


def delete_node(play: Play, event: Event) -> str:
    node = a_node(play, event)
    if node is None:
        return ""
    touch_node(play, node, event)
    play.cluster.delete_node(node)
    return node.name


def node_spell(attribute: str, *, is_fault: bool) -> Fault:
    """Give a trouble that lasts for some seconds on one node. is_fault: its workers notice; else only the operator does."""

    def fault(play: Play, event: Event) -> str:
        node = a_node(play, event)
        if node is None:
            return ""
        until = play.kernel.now + event.seconds
        if is_fault:
            touch_node(play, node, event)
        else:
            hide(play, node, until)
        setattr(node, attribute, until)
        return f"{node.name} for {event.seconds:g} s"

    return fault


def hide_all(play: Play, event: Event) -> str:
    """The operator reaches nobody: training goes on and must not be disturbed."""
    for node in play.cluster.nodes.values():
        node.hidden_until = play.kernel.now + event.seconds
        hide(play, node, node.hidden_until)
    return f"all for {event.seconds:g} s"


def cordon_node(play: Play, event: Event) -> str:
    node = a_node(play, event)
    if node is None:
        return ""
    node.cordoned = not node.cordoned
    play.cluster.node_changed(node)
    return f"{node.name}: {node.cordoned}"


def drain_node(play: Play, event: Event) -> str:
    node = a_node(play, event)
    if node is None:
        return ""
    node.cordoned = True
    play.cluster.node_changed(node)
    for pod in play.cluster.on_node(node):
        if not pod.ended:
            play.cluster.delete(pod, disrupted="EvictionByEvictionAPI")
    return node.name


def taint_node(play: Play, event: Event) -> str:
    node = a_node(play, event)
    if node is None:
        return ""
    node.tainted = not node.tainted
    play.cluster.node_changed(node)
    return f"{node.name}: {node.tainted}"


def mark_out_of_service(play: Play, event: Event) -> str:
    """An administrator says that a dead machine will not come back."""
    dead = [n for n in play.cluster.nodes.values() if not n.powered]
    if not dead:
        return ""
    node = dead[event.number % len(dead)]
    node.out_of_service = True
    play.cluster.node_changed(node)
    return node.name
