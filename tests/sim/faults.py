"""The faults that a job can meet, as a table: name -> how it is done. Each is drawn at random, and healed in the end."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

from tests.sim import control_faults, network_faults, node_faults, pod_faults, user_edits
from tests.sim.events import Event
from tests.sim.fault_targets import (
    BLIND_FOR_GOOD,
    BLINDNESS,
    DELAYS,
    FENCED_AGAIN_S,
    LATE_WRITERS,
    QUOTA_HINDRANCES,
    SEEN_AGAIN_S,
    Fault,
)
from tests.sim.network_faults import KEY_FAULTS
from tests.sim.queue_faults import QUEUE_FAULTS
from tests.sim.storage import STORAGE_TROUBLES

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


def draw(rng: Random, until: float) -> Event:
    """Draw one event."""
    what = rng.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])[0]
    return Event(
        round(rng.uniform(0.0, until), 1), what, rng.randrange(1000), round(rng.choice((3, 12, 25, 60, 100)) * 1.0, 1)
    )


def draw_of_storage(rng: Random, until: float) -> Event:
    """Draw one trouble of the storage."""
    return Event(round(rng.uniform(0.0, until), 1), rng.choice(STORAGE_TROUBLES), 0, float(rng.choice((12, 40, 100))))


def draw_of_keys(rng: Random, until: float) -> Event:
    """Draw something that happens to keys, or to signed calls."""
    return Event(
        round(rng.uniform(0.0, until), 1), rng.choice(KEY_FAULTS), rng.randrange(1000), float(rng.choice((12, 40)))
    )


def note(sim: Simulation, event: Event) -> None:
    """Remember what an event excuses."""
    sim.cluster.may_be_late |= event.what in DELAYS
    if event.what in LATE_WRITERS:
        _excuse_writers(sim, event.seconds + FENCED_AGAIN_S)
    if event.what in BLINDNESS:
        until = math.inf if event.what == BLIND_FOR_GOOD else sim.kernel.now + event.seconds + SEEN_AGAIN_S
        sim.cluster.unseen_until = max(sim.cluster.unseen_until, until)
    if sim.server is not None and event.what in QUOTA_HINDRANCES:
        sim.server.watch.hinder(event.seconds)


def _excuse_writers(sim: Simulation, seconds: float) -> None:
    """Let no invariant about who may write hold for so long."""
    sim.unfenced_until = max(sim.unfenced_until, sim.kernel.now + seconds)
    if sim.server is not None:
        sim.server.watch.unfenced_until = max(sim.server.watch.unfenced_until, sim.unfenced_until)

    def look() -> None:
        sim.cluster.is_fenced = sim.checker.is_fenced = sim.kernel.now >= sim.unfenced_until

    look()
    sim.kernel.at(sim.unfenced_until, look)


def inject(sim: Simulation, event: Event) -> None:
    """Let an event happen."""
    note(sim, event)
    _, fault = FAULTS.get(event.what) or QUEUE_FAULTS[event.what]
    happened = fault(sim, event)
    sim.checker.met[event.what] += bool(happened)
    sim.say(f"** {event.what}: {happened or 'hits nobody'}")


def heal(sim: Simulation) -> None:
    """End everything that goes on, and see to it that the job can run."""
    cluster = sim.cluster
    sim.is_healed = True
    cluster.faults_until.clear()
    sim.checker.clock_error_s += abs(cluster.clock_offset_s)
    cluster.clock_offset_s = 0.0
    for node in cluster.nodes.values():
        node.frozen_until = node.cut_until = node.hidden_until = node.deaf_until = node.mute_until = node.sick_until = (
            0.0
        )
        if node.tainted or node.cordoned:
            node.tainted = node.cordoned = False
            cluster.node_changed(node)
        node.apart_until.clear()
    cluster.network.impostors.clear()
    for agent in cluster.agents():
        agent.hangs_until = agent.lags_until = agent.lies_until = 0.0
    if sim.shell is not None:
        sim.shell.die_after = None
    sim.start_operator()
    user_edits.mend_spec(sim)
    if cluster.job is None:
        return
    if cluster.job.spec["runPolicy"].get("suspend"):
        cluster.edit_job(lambda spec: spec["runPolicy"].update(suspend=False))
    sim.kernel.run(sim.kernel.now + 10.0)
    while cluster.job is not None and sim.capacity() < user_edits.sizes(cluster.job.spec).minimum:
        cluster.add_node()


FAULTS: dict[str, tuple[float, Fault]] = {
    "crash_worker": (10, pod_faults.crash_worker),
    "crash_again_and_again": (6, pod_faults.crash_again_and_again),
    "take_master_port": (2, pod_faults.take_master_port),
    "kill_container": (4, pod_faults.kill_container),
    "end_agent": (3, pod_faults.end_agent),
    "delete_pod": (5, pod_faults.delete_pod),
    "delete_pod_soon": (2, pod_faults.delete_pod_soon),
    "force_delete_pod": (3, pod_faults.force_delete_pod),
    "stop_from_outside": (2, pod_faults.stop_from_outside),
    "evaluate": (3, pod_faults.evaluate),
    "agent_hangs": (3, pod_faults.agent_hangs),
    "agent_lags": (3, pod_faults.agent_lags),
    "agent_lies": (6, pod_faults.agent_lies),
    "add_node": (6, node_faults.add_node),
    "kill_node": (4, node_faults.kill_node),
    "lose_rack": (2, node_faults.lose_rack),
    "part_nodes": (2, node_faults.part_nodes),
    "return_node": (4, node_faults.return_node),
    "delete_node": (2, node_faults.delete_node),
    "mark_out_of_service": (2, node_faults.mark_out_of_service),
    "cordon_node": (2, node_faults.cordon_node),
    "drain_node": (6, node_faults.drain_node),
    "taint_node": (4, node_faults.taint_node),
    "freeze_node": (4, node_faults.temporary_node_fault("frozen_until", is_fault=True)),
    "cut_node": (3, node_faults.temporary_node_fault("cut_until", is_fault=True)),
    "sicken_node": (3, node_faults.temporary_node_fault("sick_until", is_fault=False)),
    "hide_node": (4, node_faults.temporary_node_fault("hidden_until", is_fault=False)),
    "deafen_node": (3, node_faults.temporary_node_fault("deaf_until", is_fault=False)),
    "mute_node": (3, node_faults.temporary_node_fault("mute_until", is_fault=False)),
    "hide_all": (2, node_faults.hide_all),
    "api_down": (3, control_faults.temporary_fault("api_down")),
    "api_loses_answers": (3, control_faults.temporary_fault("api_loses_answers")),
    "api_throttles": (2, control_faults.temporary_fault("api_throttles")),
    "api_fails": (3, control_faults.temporary_fault("api_fails")),
    "busy_job": (2, control_faults.temporary_fault("busy_job")),
    "creates_refused": (3, control_faults.temporary_fault("creates_refused")),
    "deletes_refused": (2, control_faults.temporary_fault("deletes_refused")),
    "slow_admission": (3, control_faults.temporary_fault("slow_admission")),
    "slow_watch": (3, control_faults.temporary_fault("slow_watch")),
    "broken_watch": (5, control_faults.broken_watch),
    "repeated_watch": (2, control_faults.repeated_watch),
    "lossy_calls": (4, control_faults.temporary_fault("lossy_calls")),
    "operator_dies": (4, control_faults.operator_dies),
    "operator_dies_soon": (5, control_faults.operator_dies_soon),
    "operator_dies_after": (1, control_faults.operator_dies_after),
    "operator_stands_still": (4, control_faults.operator_stands_still),
    "second_operator": (3, control_faults.second_operator),
    "clock_jumps": (3, control_faults.clock_jumps),
    "scale": (8, user_edits.scale),
    "set_bounds": (3, user_edits.set_bounds),
    "suspend": (3, user_edits.suspend),
    "touch_job": (3, user_edits.touch_job),
    "edit_times": (4, user_edits.edit_times),
    "edit_template": (1, user_edits.edit_template),
    "break_spec": (1, user_edits.break_spec),
    "wipe_record": (0.5, user_edits.wipe_record),
    "wipe_state": (0.7, user_edits.wipe_state),
    "delete_job": (1, user_edits.delete_job),
    "drain_and_delete_job": (1, user_edits.drain_and_delete_job),
    "spot_notice": (0, node_faults.spot_notice),  # of a length that clouds give; what is drawn has any
    # Where they matter, stories tell of them.
    "label_node": (0, node_faults.label_node),
    "sicken_gpu": (0, node_faults.sicken_gpu),
    "edit_worker_count": (0, user_edits.edit_worker_count),
    "set_spares": (0, user_edits.set_spares),
    "replay_calls": (0, network_faults.replay_calls),  # these are drawn for jobs with keys
    "impostor": (0, network_faults.impostor),
    "rotate_key": (0, network_faults.rotate_key),
    "delete_secret": (0, network_faults.delete_secret),
    "take_secret": (0, network_faults.take_secret),
    **{trouble: (0, control_faults.temporary_fault(trouble)) for trouble in STORAGE_TROUBLES},  # drawn by themselves
}
"""Weight and deed of each fault."""
