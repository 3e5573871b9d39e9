"""Whom a fault hits, and what may be seen of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.events import Event
from tests.sim.objects import SimNode, SimPod

if TYPE_CHECKING:
    from tests.sim.agents import SimAgent
    from tests.sim.simulation import Simulation

# What keeps the operator from seeing or acting in time.
HINDRANCES = {
    *("api_down", "api_loses_answers", "api_throttles", "api_fails", "busy_job", "lossy_calls"),
    *("slow_watch", "broken_watch", "repeated_watch"),
    *(
        "operator_dies",
        "operator_dies_soon",
        "operator_dies_after",
        "operator_stands_still",
        "second_operator",
        "clock_jumps",
        "rotate_key",
    ),
    *("hide_node", "hide_all", "deafen_node", "mute_node", "impostor", "agent_hangs", "agent_lags", "agent_lies"),
}
# What keeps the operator from seeing in time how nodes are, or from judging it by the right time, which takes hours to become right.
BLINDNESS = {
    *("slow_watch", "broken_watch", "repeated_watch", "operator_stands_still", "second_operator", "clock_jumps")
}
BLIND_FOR_GOOD = "clock_jumps"
# What may keep a pod from being drained before it is killed.
DELAYS = HINDRANCES | {"freeze_node", "cut_node", "part_nodes", "kill_node", "lose_rack", "delete_node"}
# During these, and for a while after them, writes may come late, and invariants about who may write do not hold.
LATE_WRITERS = frozenset({"operator_stands_still", "second_operator"})
# What happens to operators, and so to all of their jobs.
OF_OPERATORS = frozenset(
    {
        "operator_dies",
        "operator_dies_soon",
        "operator_dies_after",
        "operator_stands_still",
        "second_operator",
        "clock_jumps",
        "rotate_key",
    }
)
# What keeps an operator from giving quota back in time.
QUOTA_HINDRANCES = frozenset(HINDRANCES | {"kueue_away"})
# What ends an agent.
ENDS_OF_PODS = {
    "delete_pod",
    "delete_pod_soon",
    "force_delete_pod",
    "kill_container",
    "end_agent",
    "drain_node",
    "return_node",
}
# Calls without a generation are not fenced: what comes late or from somebody else does harm there.
UNFENCED = {
    *("lossy_calls", "wipe_record", "wipe_state", "stop_from_outside", "operator_stands_still", "second_operator"),
    *("deafen_node", "mute_node", "agent_lags", "agent_lies"),
}
# From one fault to the next that is not disturbed by it, and from a crash to the training after it.
CALM_S, RECOVERED_S = 60.0, 35.0
STARTED_S = 100.0  # a minute in which a start is not taken, and what it takes to replace the pod
# A power loss shows at last when its node is found not ready, after 40 s; a slow watch adds to it.
AFTERMATH_S = 120.0
# From the end of an operator that writes late to when none of its writes is on its way any more.
FENCED_AGAIN_S = 60.0
# From the end of what keeps an operator from seeing nodes to when it has acted on all that it was told since.
SEEN_AGAIN_S = 60.0

Fault = Callable[["Simulation", "Event"], str]
"""Does it; gives what happened in words, nothing when it hit nobody."""


def a_pod(sim: Simulation, event: Event, *, training: bool = False) -> SimPod | None:
    pods = sorted((p for p in sim.cluster.pods.values() if not p.ended), key=lambda p: p.name)
    if training:
        pods = [p for p in pods if p.agent is not None and p.agent.works(p.agent.generation)]
    return pods[event.number % len(pods)] if pods else None


def touch(sim: Simulation, pod: SimPod, event: Event) -> None:
    if any(other.what in HINDRANCES for other in sim.schedule.events):
        sim.checker.worker_faults += 1  # it may look like one to an operator that did not see it come
    sim.checker.touched(pod.name, sim.kernel.now + event.seconds + AFTERMATH_S)
    if pod.agent is not None:
        sim.training.touched(pod.agent, event.what)


def expect_notice(sim: Simulation, agent: SimAgent, within_s: float) -> None:
    """What happens to a generation that runs, and to nothing else, must be known so soon."""
    generation = agent.generation
    if agent.works(generation) and all(e.what == "add_node" for e in sim.schedule.events[1:]):
        sim.kernel.after(within_s, lambda: sim.checker.must_notice(generation))


def expect_start(sim: Simulation, event: Event) -> None:
    """Where a crash and one member that hears no call are all that delays a start, and another node is free, the job trains again."""
    others = [other.what for other in sim.schedule.events if other != event]
    has_room = sim.schedule.nodes > (sim.schedule.policy or {}).get("maxReplicas", sim.schedule.nodes)
    if others == ["crash_worker"] and has_room and event.seconds > STARTED_S:
        generation = sim.checker.record.generation

        def look() -> None:
            sim.checker.must_have_recovered(generation)
            sim.met["trains in spite of a member that hears no call"] += 1

        sim.kernel.after(STARTED_S, look)


def expect_recovery(sim: Simulation, agent: SimAgent, event: Event) -> None:
    """A fault is recovered from as ever while an edit cannot be used, and whatever happens to another job of the operator."""
    generation, record, events = agent.generation, sim.checker.record, sim.schedule.events
    is_at_rest = record.generation == generation and record.transition is None and record.running_since is not None
    is_hindered = sim.server is not None or any(e.what in HINDRANCES for e in events)
    others = [e for e in events if e != event and e.what not in ("break_spec", "add_node")]
    is_alone = all(e.at + e.seconds + CALM_S < event.at or e.at > event.at + RECOVERED_S for e in others)
    # New pods take their time, and another job's may be made first.
    is_quick = sim.schedule.run_policy.get("restartPolicy", {}).get("numRestartBeforeFullJobRestart") is None
    is_beside = sim.is_neighbour and is_quick
    if not ((sim.is_spec_broken or is_beside) and is_at_rest and is_alone) or is_hindered:
        return

    def look() -> None:
        if sim.is_spec_broken or is_beside:
            sim.checker.must_have_recovered(generation)
            sim.met["recovered while an edit cannot be used"] += sim.is_spec_broken
            sim.met["recovered beside another job"] += is_beside

    sim.kernel.after(RECOVERED_S, look)


def a_node(sim: Simulation, event: Event) -> SimNode | None:
    nodes = [n for n in sim.cluster.nodes.values() if n.powered]
    return nodes[event.number % len(nodes)] if nodes else None


def touch_node(sim: Simulation, node: SimNode, event: Event) -> None:
    for pod in sim.cluster.on_node(node):
        touch(sim, pod, event)


def hide(sim: Simulation, node: SimNode, until: float) -> None:
    for pod in sim.cluster.on_node(node):
        sim.checker.hidden(pod.name, until + AFTERMATH_S)
