"""What befalls pods: their workers, containers and agents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.agents import Crash, Lie, SimAgent
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
    from tests.sim.simulation import Play

REASONS = ("WorkerCrash", "WorkerCrash", "WorkerUnhealthy", "LogHang_loss", "LogSlow_speed", "LogFault_xid")
MODES = ("", "local_process_level_restart", "process_level_restart", "job_level_restart")
MANY = 1000
# Longer than any checkpoint takes that nothing disturbs: the rest of a step, and half a minute.
LONGEST_SAVE_S = 40


def crash_worker(play: Play, event: Event) -> str:
    pod = a_pod(play, event, training=True)
    if pod is None or pod.agent is None:
        return ""
    expect_recovery(play, pod.agent, event)
    return _crash(play, pod, event)


def _crash(play: Play, pod: SimPod, event: Event) -> str:
    agent = pod.agent
    assert agent is not None
    reason, asks = REASONS[event.number % len(REASONS)], ""
    if agent.make is Make.IN_PROCESS:
        asks = MODES[event.number // 7 % len(MODES)]
        _note_what_is_asked(play, agent, asks)
    touch(play, pod, event)
    play.watchman.worker_faults += 1
    play.watchman.met[f"crash: {reason}"] += 1
    agent.crash(Crash(1, None, "Traceback ...\nValueError: boom", reason, asks))
    return f"{pod.name} {reason} {asks}"


def _note_what_is_asked(play: Play, agent: SimAgent, asks: str) -> None:
    """Where nothing but this fault disturbs a generation, everybody must hear that its workers ask for new processes."""
    play.watchman.met[f"asks for {asks or 'nothing'}"] += 1
    play.watchman.asked_for_pods += asks == "job_level_restart"
    run, record = play.training.runs.get(agent.generation), play.watchman.record
    is_alone = run is not None and not run.spoiled and record.transition is None and record.running_since is not None
    is_wished = play.story.ours.get("recovery") == "Process"
    # Who is being stopped by somebody else fails in a drain, which is no fault of a worker.
    is_asked = (is_wished or asks == "process_level_restart") and agent.state is AgentState.RUNNING
    if is_asked and is_alone and not any(e.what in DELAYS for e in play.story.events):
        play.watchman.asked_for_processes(agent.generation)
        play.watchman.met["recovery: Process"] += is_wished


def take_master_port(play: Play, event: Event) -> str:
    """Somebody else has the port that rank 0 is to open: no fault of the workers, whoever fails over it."""
    run = max(play.training.runs.values(), key=lambda r: r.generation, default=None)
    agent = run.members.get(0) if run is not None else None
    if agent is None or not agent.works(agent.generation):
        return ""
    touch(play, agent.pod, event)
    play.watchman.worker_faults += agent.make is Make.FOREIGN  # who does not say what it was
    agent.crash(Crash(1, None, "EADDRINUSE: master port 10010 is in use on this host", "WorkerFault"))
    return agent.pod.name


def agent_hangs(play: Play, event: Event) -> str:
    """The agent's process stands still; its workers go on."""
    pod = a_pod(play, event)
    if pod is None or pod.agent is None:
        return ""
    pod.agent.hangs_until = play.kernel.now + event.seconds
    if any(other.what == "evaluate" for other in play.story.events):
        touch(play, pod, event)  # neither others nor steps tell that it is alive
    play.watchman.hidden(pod.name, pod.agent.hangs_until + AFTERMATH_S)
    return f"{pod.name} for {event.seconds:g} s"


def agent_lags(play: Play, event: Event) -> str:
    """What the agent says arrives seconds later."""
    pod = a_pod(play, event)
    if pod is None or pod.agent is None:
        return ""
    pod.agent.lags_until, pod.agent.lag_s = play.kernel.now + event.seconds, float(event.number % 9)
    play.watchman.hidden(pod.name, pod.agent.lags_until + AFTERMATH_S)
    return f"{pod.name} by {pod.agent.lag_s:g} s for {event.seconds:g} s"


def agent_lies(play: Play, event: Event) -> str:
    pod = a_pod(play, event)
    if pod is None or pod.agent is None:
        return ""
    lie = tuple(Lie)[event.number // 7 % len(Lie)]
    touch(play, pod, event)
    play.watchman.worker_faults += MANY  # each word of it may be believed
    play.watchman.is_lied_to |= lie in (Lie.NEWER, Lie.ENORMOUS)
    pod.agent.lie, pod.agent.lies_until = lie, play.kernel.now + event.seconds
    pod.agent_changed()
    return f"{pod.name} {lie.value} for {event.seconds:g} s"


def crash_again_and_again(play: Play, event: Event) -> str:
    """The workers of one node fail as often as they are started there."""
    node = a_node(play, event)
    if node is None:
        return ""
    times = 2 + event.number % 4
    for nth in range(times):
        one = replace(event, number=event.number + 7 * nth)
        play.kernel.after(nth * event.seconds, partial(_crash_on, play, node, one))
    return f"{node.name}, {times} times, every {event.seconds:g} s"


def _crash_on(play: Play, node: SimNode, event: Event) -> None:
    if play.is_healed:
        return
    for pod in play.cluster.on_node(node):
        if pod.agent is not None and pod.agent.works(pod.agent.generation):
            play.say(f"** crash on {node.name}: {_crash(play, pod, event)}")


def kill_container(play: Play, event: Event) -> str:
    pod = a_pod(play, event)
    if pod is None or pod.agent is None or not pod.node_runs():
        return ""
    touch(play, pod, event)
    play.watchman.worker_faults += 1
    _expect_a_retry(play, pod.agent)
    pod.container_exits(137)
    return pod.name


def _expect_a_retry(play: Play, agent: SimAgent) -> None:
    """Where nothing else happens at all, what ends by itself costs a retry, and is soon known."""
    if len(play.story.events) == 1 and agent.works(agent.generation):
        play.watchman.must_count(agent.generation)
        expect_notice(play, agent, 20.0)


def evaluate(play: Play, event: Event) -> str:
    """The workers make no steps for a while, and nothing is wrong."""
    run = max(play.training.runs.values(), key=lambda r: r.generation, default=None)
    if run is None or run.phase is not Phase.STEPPING:
        return ""
    run.paused_until = play.kernel.now + event.seconds
    return f"generation {run.generation} for {event.seconds:g} s"


def end_agent(play: Play, event: Event) -> str:
    """The agent's process ends, and a shell around it stays: its container runs on and nobody listens in it."""
    pod = a_pod(play, event, training=True)
    if pod is None or pod.agent is None:
        return ""
    touch(play, pod, event)
    play.watchman.worker_faults += 1
    _expect_a_retry(play, pod.agent)
    pod.agent.die()
    return pod.name


def stop_from_outside(play: Play, event: Event) -> str:
    """Somebody else calls /stop of an agent, as the plain protocol has it.

    Of a member whose agent the operator cannot reach meanwhile it cannot know whether it saved too.
    """
    pod = a_pod(play, event, training=True)
    if pod is None or pod.agent is None:
        return ""
    graceful = bool(event.number % 2) and play.training.heeds_events
    if not graceful or any(other.what in HINDRANCES for other in play.story.events):
        touch(play, pod, event)
        play.watchman.worker_faults += 1
    pod.agent.stop({"is_graceful": graceful, "timeout": LONGEST_SAVE_S})
    return f"{pod.name}, {'graceful' if graceful else 'hard'}"


def delete_pod(play: Play, event: Event) -> str:
    pod = a_pod(play, event)
    if pod is None:
        return ""
    play.cluster.delete(pod)
    return pod.name


def delete_pod_soon(play: Play, event: Event) -> str:
    """Somebody deletes a pod and leaves it ten seconds, however long its drain may take."""
    pod = a_pod(play, event)
    if pod is None:
        return ""
    touch(play, pod, event)
    play.cluster.delete(pod, grace_s=10.0)
    return pod.name


def force_delete_pod(play: Play, event: Event) -> str:
    pod = a_pod(play, event)
    if pod is None:
        return ""
    touch(play, pod, event)
    play.cluster.delete(pod, force=True)
    return pod.name
