"""The faults of pods: of their workers, containers and agents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.agent_words import Crash, Lie
from tests.sim.agents import SimAgent
from tests.sim.events import Event, Make
from tests.sim.fault_targets import (
    AFTERMATH_S,
    DELAYS,
    HINDRANCES,
    a_node,
    a_pod,
    expect_notice,
    expect_recovery,
    touch,
)
from tests.sim.objects import SimNode, SimPod
from tests.sim.training import Phase

from elastipod_agent.core.states import AgentState

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

REASONS = ("WorkerCrash", "WorkerCrash", "WorkerUnhealthy", "LogHang_loss", "LogSlow_speed", "LogFault_xid")
MODES = ("", "local_process_level_restart", "process_level_restart", "job_level_restart")
MANY = 1000
# Longer than any checkpoint takes that nothing disturbs: the rest of a step, and half a minute.
LONGEST_SAVE_S = 40


def crash_worker(sim: Simulation, event: Event) -> str:
    pod = a_pod(sim, event, training=True)
    if pod is None or pod.agent is None:
        return ""
    expect_recovery(sim, pod.agent, event)
    return _crash(sim, pod, event)


def _crash(sim: Simulation, pod: SimPod, event: Event) -> str:
    agent = pod.agent
    assert agent is not None
    reason, asks = REASONS[event.number % len(REASONS)], ""
    if agent.make is Make.IN_PROCESS or agent.make.keeps_state:
        asks = MODES[event.number // 7 % len(MODES)]
        _note_what_is_asked(sim, agent, asks)
    touch(sim, pod, event)
    sim.checker.worker_faults += 1
    sim.checker.met[f"crash: {reason}"] += 1
    local = event.number % pod.nproc
    sim.checker.met["crash: of another worker than the first of its pod"] += local > 0
    agent.crash(Crash(1, None, "Traceback ...\nValueError: boom", reason, asks, local))
    return f"{pod.name} {reason} {asks}"


def _note_what_is_asked(sim: Simulation, agent: SimAgent, asks: str) -> None:
    """Where nothing but this fault disturbs a generation, everybody must hear that its workers ask for new processes."""
    sim.checker.met[f"asks for {asks or 'nothing'}"] += 1
    sim.checker.asked_for_pods += asks == "job_level_restart"
    run, record = sim.training.runs.get(agent.generation), sim.checker.record
    is_alone = run is not None and not run.spoiled and record.transition is None and record.running_since is not None
    is_wished = sim.schedule.ours.get("recovery") == "Process"
    # Who is being stopped by somebody else fails in a drain, which is no fault of a worker.
    is_asked = (is_wished or asks == "process_level_restart") and agent.state is AgentState.RUNNING
    if is_asked and is_alone and not any(e.what in DELAYS for e in sim.schedule.events):
        sim.checker.asked_for_processes(agent.generation)
        sim.checker.met["recovery: Process"] += is_wished


def take_master_port(sim: Simulation, event: Event) -> str:
    """Somebody else has the port that rank 0 is to open: no fault of the workers, whoever fails over it."""
    run = max(sim.training.runs.values(), key=lambda r: r.generation, default=None)
    agent = run.members.get(0) if run is not None else None
    if agent is None or not agent.works(agent.generation):
        return ""
    touch(sim, agent.pod, event)
    sim.checker.worker_faults += agent.make is Make.FOREIGN  # who does not say what it was
    agent.crash(Crash(1, None, "EADDRINUSE: master port 10010 is in use on this host", "WorkerFault"))
    return agent.pod.name


def agent_hangs(sim: Simulation, event: Event) -> str:
    """The agent's process stands still; its workers go on."""
    pod = a_pod(sim, event)
    if pod is None or pod.agent is None:
        return ""
    pod.agent.hangs_until = sim.kernel.now + event.seconds
    is_alone = len(sim.checker.record.members) <= 1
    if is_alone or any(other.what == "evaluate" for other in sim.schedule.events):
        # Neither others nor steps tell that it is alive, and a pod that waits may say that it is not reached.
        touch(sim, pod, event)
    sim.checker.hidden(pod.name, pod.agent.hangs_until + AFTERMATH_S)
    return f"{pod.name} for {event.seconds:g} s"


def agent_lags(sim: Simulation, event: Event) -> str:
    """What the agent says arrives seconds later."""
    pod = a_pod(sim, event)
    if pod is None or pod.agent is None:
        return ""
    pod.agent.lags_until, pod.agent.lag_s = sim.kernel.now + event.seconds, float(event.number % 9)
    sim.checker.hidden(pod.name, pod.agent.lags_until + AFTERMATH_S)
    return f"{pod.name} by {pod.agent.lag_s:g} s for {event.seconds:g} s"


def agent_lies(sim: Simulation, event: Event) -> str:
    pod = a_pod(sim, event)
    if pod is None or pod.agent is None:
        return ""
    lie = tuple(Lie)[event.number // 7 % len(Lie)]
    touch(sim, pod, event)
    sim.checker.worker_faults += MANY  # each word of it may be believed
    sim.checker.is_lied_to |= lie in (Lie.NEWER, Lie.ENORMOUS)
    pod.agent.lie, pod.agent.lies_until = lie, sim.kernel.now + event.seconds
    pod.agent_changed()
    return f"{pod.name} {lie.value} for {event.seconds:g} s"


def crash_again_and_again(sim: Simulation, event: Event) -> str:
    """The workers of one node fail as often as they are started there."""
    node = a_node(sim, event)
    if node is None:
        return ""
    times = 2 + event.number % 4
    for nth in range(times):
        one = replace(event, number=event.number + 7 * nth)
        sim.kernel.after(nth * event.seconds, partial(_crash_on, sim, node, one))
    return f"{node.name}, {times} times, every {event.seconds:g} s"


def _crash_on(sim: Simulation, node: SimNode, event: Event) -> None:
    if sim.is_healed:
        return
    for pod in sim.cluster.on_node(node):
        if pod.agent is not None and pod.agent.works(pod.agent.generation):
            sim.say(f"** crash on {node.name}: {_crash(sim, pod, event)}")


def kill_container(sim: Simulation, event: Event) -> str:
    pod = a_pod(sim, event)
    if pod is None or pod.agent is None or not pod.node_runs():
        return ""
    touch(sim, pod, event)
    sim.checker.worker_faults += 1
    _expect_a_retry(sim, pod.agent)
    pod.container_exits(137)
    return pod.name


def _expect_a_retry(sim: Simulation, agent: SimAgent) -> None:
    """Where nothing else happens at all, what ends by itself costs a retry, and is soon known."""
    if len(sim.schedule.events) == 1 and agent.works(agent.generation):
        sim.checker.must_count(agent.generation)
        expect_notice(sim, agent, 20.0)


def evaluate(sim: Simulation, event: Event) -> str:
    """The workers make no steps for a while, and nothing is wrong."""
    run = max(sim.training.runs.values(), key=lambda r: r.generation, default=None)
    if run is None or run.phase is not Phase.STEPPING:
        return ""
    run.paused_until = sim.kernel.now + event.seconds
    return f"generation {run.generation} for {event.seconds:g} s"


def end_agent(sim: Simulation, event: Event) -> str:
    """The agent's process ends, and a shell around it stays: its container runs on and nobody listens in it."""
    pod = a_pod(sim, event, training=True)
    if pod is None or pod.agent is None:
        return ""
    touch(sim, pod, event)
    sim.checker.worker_faults += 1
    _expect_a_retry(sim, pod.agent)
    pod.agent.die()
    return pod.name


def stop_from_outside(sim: Simulation, event: Event) -> str:
    """Somebody else calls /stop of an agent, as the plain protocol has it.

    Of a member whose agent the operator cannot reach meanwhile it cannot know whether it saved too.
    """
    pod = a_pod(sim, event, training=True)
    if pod is None or pod.agent is None:
        return ""
    graceful = bool(event.number % 2) and sim.training.heeds_events
    if not graceful or any(other.what in HINDRANCES for other in sim.schedule.events):
        touch(sim, pod, event)
        sim.checker.worker_faults += 1
    pod.agent.stop({"is_graceful": graceful, "timeout": LONGEST_SAVE_S})
    return f"{pod.name}, {'graceful' if graceful else 'hard'}"


def delete_pod(sim: Simulation, event: Event) -> str:
    pod = a_pod(sim, event)
    if pod is None:
        return ""
    sim.cluster.delete(pod)
    return pod.name


def delete_pod_soon(sim: Simulation, event: Event) -> str:
    """Somebody deletes a pod and leaves it ten seconds, however long its drain may take."""
    pod = a_pod(sim, event)
    if pod is None:
        return ""
    touch(sim, pod, event)
    sim.cluster.delete(pod, grace_s=10.0)
    return pod.name


def force_delete_pod(sim: Simulation, event: Event) -> str:
    pod = a_pod(sim, event)
    if pod is None:
        return ""
    touch(sim, pod, event)
    sim.cluster.delete(pod, force=True)
    return pod.name
