"""What can befall a job, as a table: name -> how it is done. Each is drawn at random, and healed in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pydantic import ValidationError
from tests.sim.agents import Crash, Lie, SimAgent
from tests.sim.cluster import Body, SimNode, SimPod
from tests.sim.events import Event, Make
from tests.sim.kernel import Script

from elastipod_operator.api import JobSpec
from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_DRAIN_ON_DELETE
from elastipod_operator.core.sizes import SizeError, Sizes
from elastipod_operator.kube.translate import policy_of

if TYPE_CHECKING:
    from tests.sim.shell import Shell
    from tests.sim.story import Play

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
    ),
    *("hide_node", "hide_all", "deafen_node", "mute_node", "agent_hangs", "agent_lags", "agent_lies"),
}
# What may keep a pod from being drained before it is killed.
DELAYS = HINDRANCES | {"freeze_node", "cut_node", "kill_node", "delete_node"}
# Calls without a generation are not fenced: what comes late or from somebody else does harm there.
UNFENCED = {
    *("lossy_calls", "wipe_record", "wipe_state", "stop_from_outside", "operator_stands_still", "second_operator"),
    *("deafen_node", "mute_node", "agent_lags", "agent_lies"),
}
JUMPS_S = (-3600.0, -240.0, -20.0, 20.0, 240.0, 3600.0)
EDITS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("elasticPolicy", "scalingTimeoutInSeconds", (0, 5, 40)),
    ("elasticPolicy", "gracefulShutdownTimeoutInSeconds", (40, 120)),
    ("elasticPolicy", "faultyScaleDownTimeoutInSeconds", (5, 40)),
    ("runPolicy", "cleanPodPolicy", ("All", "None", "Running", "OnlyComplete")),
    ("runPolicy", "restartPolicy", ({"scaleUpSnoozeTimeInSeconds": 60}, {"maxNumRepeatOffendersToAvoid": 1})),
    ("runPolicy", "ttlSecondsAfterFinished", (20, 0)),
    ("elastipod", "payback", ("Off", "Auto")),
    ("elastipod", "minStableSeconds", (0, 30)),
)

# A power loss shows at last when its node is found not ready; a slow watch adds to it.
AFTERMATH_S = 600.0

Fault = Callable[["Play", "Event"], str]
"""Does it; gives what happened in words, nothing when it hit nobody."""

REASONS = ("WorkerCrash", "WorkerCrash", "WorkerUnhealthy", "LogHang_loss", "LogSlow_speed", "LogFault_xid")
MODES = ("", "local_process_level_restart", "process_level_restart", "job_level_restart")
MANY = 1000


def sizes(spec: Body) -> Sizes:
    """Give the allowed sizes of a spec. Raises SizeError."""
    return policy_of(JobSpec.model_validate(spec)).sizes


def draw(rng: Random, until: float) -> Event:
    """Draw one event."""
    what = rng.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])[0]
    return Event(
        round(rng.uniform(0.0, until), 1), what, rng.randrange(1000), round(rng.choice((3, 12, 25, 60, 100)) * 1.0, 1)
    )


def befall(play: Play, event: Event) -> None:
    """Let an event happen."""
    play.cluster.may_be_late |= event.what in DELAYS
    happened = FAULTS[event.what][1](play, event)
    play.watchman.met[event.what] += bool(happened)
    play.say(f"** {event.what}: {happened or 'hits nobody'}")


def heal(play: Play) -> None:
    """End everything that goes on, and see to it that the job can run."""
    cluster = play.cluster
    play.is_healed = True
    cluster.spells.clear()
    cluster.clock_offset_s = 0.0
    for node in cluster.nodes.values():
        node.frozen_until = node.cut_until = node.hidden_until = node.deaf_until = node.mute_until = node.sick_until = (
            0.0
        )
        if node.tainted or node.cordoned:
            node.tainted = node.cordoned = False
            cluster.node_changed(node)
    for agent in cluster.agents():
        agent.hangs_until = agent.lags_until = agent.lies_until = 0.0
    if play.shell is not None:
        play.shell.die_after = None
    play.start_operator()
    mend_spec(play)
    if cluster.job is None:
        return
    if cluster.job.spec["runPolicy"].get("suspend"):
        cluster.edit_job(lambda spec: spec["runPolicy"].update(suspend=False))
    play.kernel.run(play.kernel.now + 10.0)
    while cluster.job is not None and play.capacity() < sizes(cluster.job.spec).minimum:
        cluster.add_node()


# ---- pods and workers


def _pod(play: Play, event: Event, *, training: bool = False) -> SimPod | None:
    pods = sorted((p for p in play.cluster.pods.values() if not p.ended), key=lambda p: p.name)
    if training:
        pods = [p for p in pods if p.agent is not None and p.agent.works(p.agent.generation)]
    return pods[event.number % len(pods)] if pods else None


def _touch(play: Play, pod: SimPod, event: Event) -> None:
    if any(other.what in HINDRANCES for other in play.story.events):
        play.watchman.worker_faults += 1  # it may look like one to an operator that did not see it come
    play.watchman.touched(pod.name, play.kernel.now + event.seconds + AFTERMATH_S)
    if pod.agent is not None:
        play.training.touched(pod.agent, event.what)


def crash_worker(play: Play, event: Event) -> str:
    pod = _pod(play, event, training=True)
    return _crash(play, pod, event) if pod is not None else ""


def _crash(play: Play, pod: SimPod, event: Event) -> str:
    agent = pod.agent
    assert agent is not None
    reason, asks = REASONS[event.number % len(REASONS)], ""
    if agent.make is Make.IN_PROCESS:
        asks = MODES[event.number // 7 % len(MODES)]
        _note_what_is_asked(play, agent, asks)
    _touch(play, pod, event)
    play.watchman.worker_faults += 1
    play.watchman.met[f"crash: {reason}"] += 1
    agent.crash(Crash(1, None, "Traceback ...\nValueError: boom", reason, asks))
    return f"{pod.name} {reason} {asks}"


def _note_what_is_asked(play: Play, agent: SimAgent, asks: str) -> None:
    """Where nothing but this fault disturbs a generation, everybody must hear that its workers ask for new processes."""
    play.watchman.met[f"asks for {asks or 'nothing'}"] += 1
    play.watchman.asked_for_pods += asks == "job_level_restart"
    run, record = play.training.runs.get(agent.generation), play.watchman.record
    is_alone = run is not None and not run.spoiled and record.transition is None and record.settled_at is not None
    if asks == "process_level_restart" and is_alone and not any(e.what in DELAYS for e in play.story.events):
        play.watchman.asked_for_processes(agent.generation)


def take_master_port(play: Play, event: Event) -> str:
    """Somebody else has the port that rank 0 is to open: no fault of the workers, whoever fails over it."""
    run = max(play.training.runs.values(), key=lambda r: r.generation, default=None)
    agent = run.members.get(0) if run is not None else None
    if agent is None or not agent.works(agent.generation):
        return ""
    _touch(play, agent.pod, event)
    play.watchman.worker_faults += agent.make is Make.FOREIGN  # who does not say what it was
    agent.crash(Crash(1, None, "EADDRINUSE: master port 10010 is in use on this host", "WorkerFault"))
    return agent.pod.name


def agent_hangs(play: Play, event: Event) -> str:
    """The agent's process stands still; its workers go on."""
    pod = _pod(play, event)
    if pod is None or pod.agent is None:
        return ""
    pod.agent.hangs_until = play.kernel.now + event.seconds
    play.watchman.hidden(pod.name, pod.agent.hangs_until + AFTERMATH_S)
    return f"{pod.name} for {event.seconds:g} s"


def agent_lags(play: Play, event: Event) -> str:
    """What the agent says arrives seconds later."""
    pod = _pod(play, event)
    if pod is None or pod.agent is None:
        return ""
    pod.agent.lags_until, pod.agent.lag_s = play.kernel.now + event.seconds, float(event.number % 9)
    play.watchman.hidden(pod.name, pod.agent.lags_until + AFTERMATH_S)
    return f"{pod.name} by {pod.agent.lag_s:g} s for {event.seconds:g} s"


def agent_lies(play: Play, event: Event) -> str:
    pod = _pod(play, event)
    if pod is None or pod.agent is None:
        return ""
    lie = tuple(Lie)[event.number // 7 % len(Lie)]
    _touch(play, pod, event)
    play.watchman.worker_faults += MANY  # each word of it may be believed
    play.watchman.is_lied_to |= lie in (Lie.NEWER, Lie.ENORMOUS)
    pod.agent.lie, pod.agent.lies_until = lie, play.kernel.now + event.seconds
    pod.agent_changed()
    return f"{pod.name} {lie.value} for {event.seconds:g} s"


def crash_again_and_again(play: Play, event: Event) -> str:
    """The workers of one node fail as often as they are started there."""
    node = _node(play, event)
    if node is None:
        return ""
    times = 2 + event.number % 4
    for nth in range(times):
        one = replace(event, number=event.number + 7 * nth)
        play.kernel.after(nth * event.seconds, lambda one=one: _crash_on(play, node, one))
    return f"{node.name}, {times} times, every {event.seconds:g} s"


def _crash_on(play: Play, node: SimNode, event: Event) -> None:
    if play.is_healed:
        return
    for pod in play.cluster.on_node(node):
        if pod.agent is not None and pod.agent.works(pod.agent.generation):
            play.say(f"** crash on {node.name}: {_crash(play, pod, event)}")


def kill_container(play: Play, event: Event) -> str:
    pod = _pod(play, event)
    if pod is None or pod.agent is None or not pod.node_runs():
        return ""
    _touch(play, pod, event)
    play.watchman.worker_faults += 1
    pod.container_exits(137)
    return pod.name


def stop_from_outside(play: Play, event: Event) -> str:
    """Somebody else calls /stop of an agent, as the plain protocol has it."""
    pod = _pod(play, event, training=True)
    if pod is None or pod.agent is None:
        return ""
    graceful = bool(event.number % 2) and play.training.heeds_events
    if not graceful:
        _touch(play, pod, event)
        play.watchman.worker_faults += 1
    pod.agent.stop({"is_graceful": graceful, "timeout": 30})
    return f"{pod.name}, {'graceful' if graceful else 'hard'}"


def delete_pod(play: Play, event: Event) -> str:
    pod = _pod(play, event)
    if pod is None:
        return ""
    play.cluster.delete(pod)
    return pod.name


def force_delete_pod(play: Play, event: Event) -> str:
    pod = _pod(play, event)
    if pod is None:
        return ""
    _touch(play, pod, event)
    play.cluster.delete(pod, force=True)
    return pod.name


# ---- nodes


def _node(play: Play, event: Event) -> SimNode | None:
    nodes = [n for n in play.cluster.nodes.values() if n.powered]
    return nodes[event.number % len(nodes)] if nodes else None


def _touch_node(play: Play, node: SimNode, event: Event) -> None:
    for pod in play.cluster.on_node(node):
        _touch(play, pod, event)


def add_node(play: Play, event: Event) -> str:
    return play.cluster.add_node().name


def kill_node(play: Play, event: Event) -> str:
    node = _node(play, event)
    if node is None:
        return ""
    _touch_node(play, node, event)
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
    node = _node(play, event)
    if node is None:
        return ""
    _touch_node(play, node, event)
    play.cluster.delete_node(node)
    return node.name


def _node_spell(attribute: str, *, is_fault: bool) -> Fault:
    """Give a trouble that lasts for some seconds on one node. is_fault: its workers notice; else only the operator does."""

    def fault(play: Play, event: Event) -> str:
        node = _node(play, event)
        if node is None:
            return ""
        until = play.kernel.now + event.seconds
        if is_fault:
            _touch_node(play, node, event)
        else:
            _hide(play, node, until)
        setattr(node, attribute, until)
        return f"{node.name} for {event.seconds:g} s"

    return fault


def _hide(play: Play, node: SimNode, until: float) -> None:
    for pod in play.cluster.on_node(node):
        play.watchman.hidden(pod.name, until + AFTERMATH_S)


def hide_all(play: Play, event: Event) -> str:
    """The operator reaches nobody: training goes on and must not be disturbed."""
    for node in play.cluster.nodes.values():
        node.hidden_until = play.kernel.now + event.seconds
        _hide(play, node, node.hidden_until)
    return f"all for {event.seconds:g} s"


def cordon_node(play: Play, event: Event) -> str:
    node = _node(play, event)
    if node is None:
        return ""
    node.cordoned = not node.cordoned
    play.cluster.node_changed(node)
    return f"{node.name}: {node.cordoned}"


def drain_node(play: Play, event: Event) -> str:
    node = _node(play, event)
    if node is None:
        return ""
    node.cordoned = True
    play.cluster.node_changed(node)
    for pod in play.cluster.on_node(node):
        if not pod.ended:
            play.cluster.delete(pod, disrupted="EvictionByEvictionAPI")
    return node.name


def taint_node(play: Play, event: Event) -> str:
    node = _node(play, event)
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


# ---- API server, watches, calls, the operator


def _spell(name: str) -> Fault:
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


# ---- the user


def edit_times(play: Play, event: Event) -> str:
    """Time-outs, budgets and policies that act at once."""
    where, field, values = EDITS[event.number % len(EDITS)]
    value = values[event.number // len(EDITS) % len(values)]
    if play.cluster.job is None or where not in play.cluster.job.spec:
        return ""
    play.cluster.edit_job(lambda spec: spec[where].update({field: value}))
    return f"{where}.{field} = {value}"


def break_spec(play: Play, event: Event) -> str:
    """An edit that cannot be used, mended later."""
    if play.cluster.job is None or play.is_spec_broken or ANNOTATION_APPLIED not in play.cluster.job.annotations:
        return ""
    play.is_spec_broken = True
    play.cluster.edit_job(lambda spec: spec["replicaSpecs"][0].update(name="other"))
    play.kernel.after(event.seconds, lambda: mend_spec(play))
    return f"replicaSpecs are renamed for {event.seconds:g} s"


def mend_spec(play: Play) -> None:
    """Take a broken edit back."""
    if play.is_spec_broken:
        play.is_spec_broken = False
        play.cluster.edit_job(lambda spec: spec["replicaSpecs"][0].update(name=play.story.specs[0]["name"]))


def scale(play: Play, event: Event) -> str:
    job = play.cluster.job
    if job is None:
        return ""
    spec = {**job.spec, "replicas": 0}
    allowed = sizes(spec).allowed
    ceiling = (0, *allowed, allowed[-1] + 1)[event.number % (len(allowed) + 2)]
    play.cluster.edit_job(lambda spec: spec.update(replicas=ceiling))
    return str(ceiling)


def set_bounds(play: Play, event: Event) -> str:
    job = play.cluster.job
    if job is None or "elasticPolicy" not in job.spec:
        return ""
    low, high = 1 + event.number % 3, 1 + event.number % 3 + event.number // 3 % 3
    wish = {**job.spec, "elasticPolicy": {**job.spec["elasticPolicy"], "minReplicas": low, "maxReplicas": high}}
    try:
        sizes(wish)
    except (SizeError, ValidationError):
        return "refused"
    play.cluster.edit_job(lambda spec: spec["elasticPolicy"].update(minReplicas=low, maxReplicas=high))
    return f"{low} to {high}"


def suspend(play: Play, event: Event) -> str:
    play.cluster.edit_job(lambda spec: spec["runPolicy"].update(suspend=True))
    play.kernel.after(event.seconds, lambda: resume(play, event))
    return f"for {event.seconds:g} s"


def resume(play: Play, event: Event) -> str:
    play.cluster.edit_job(lambda spec: spec["runPolicy"].update(suspend=False))
    return "resumed"


def touch_job(play: Play, event: Event) -> str:
    play.cluster.edit_job(lambda spec: None)
    return "resourceVersion moves"


def wipe_record(play: Play, event: Event) -> str:
    known = max((p.agent.generation for p in play.cluster.pods.values() if p.agent and p.agent.alive), default=0)
    if known < play.watchman.record.generation or not known or play.is_spec_broken:
        return ""  # nobody is left who could tell the generation, or which spec the pods are of
    for run in play.training.runs.values():
        run.spoiled.add(event.what)
    play.cluster.wipe_record(leaves_history=False)
    return "annotations are gone"


def wipe_state(play: Play, event: Event) -> str:
    """Only the state is gone: the history tells the generation, whether or not an agent lives."""
    if not play.watchman.record.generation:
        return ""
    for run in play.training.runs.values():
        run.spoiled.add(event.what)
    play.cluster.wipe_record(leaves_history=True)
    return "the state is gone"


def edit_template(play: Play, event: Event) -> str:
    """Another image: it acts when the job is resumed, or at once where it never trained."""

    def edit(spec: Body) -> None:
        for one in spec["replicaSpecs"]:
            one["template"]["spec"]["containers"][0]["image"] = f"train:{event.number}"

    play.cluster.edit_job(edit)
    return f"train:{event.number}"


def drain_and_delete_job(play: Play, event: Event) -> str:
    play.cluster.annotate_job(ANNOTATION_DRAIN_ON_DELETE, "true")
    return delete_job(play, event)


def delete_job(play: Play, event: Event) -> str:
    if play.cluster.job is None or play.cluster.job.deleted_at is not None:
        return ""
    play.cluster.delete_job()
    return "deleted"


FAULTS: dict[str, tuple[float, Fault]] = {
    "crash_worker": (10, crash_worker),
    "crash_again_and_again": (6, crash_again_and_again),
    "take_master_port": (2, take_master_port),
    "kill_container": (4, kill_container),
    "delete_pod": (5, delete_pod),
    "force_delete_pod": (3, force_delete_pod),
    "stop_from_outside": (2, stop_from_outside),
    "agent_hangs": (3, agent_hangs),
    "agent_lags": (3, agent_lags),
    "agent_lies": (6, agent_lies),
    "add_node": (6, add_node),
    "kill_node": (4, kill_node),
    "return_node": (4, return_node),
    "delete_node": (2, delete_node),
    "mark_out_of_service": (2, mark_out_of_service),
    "cordon_node": (2, cordon_node),
    "drain_node": (6, drain_node),
    "taint_node": (4, taint_node),
    "freeze_node": (4, _node_spell("frozen_until", is_fault=True)),
    "cut_node": (3, _node_spell("cut_until", is_fault=True)),
    "sicken_node": (3, _node_spell("sick_until", is_fault=False)),
    "hide_node": (4, _node_spell("hidden_until", is_fault=False)),
    "deafen_node": (3, _node_spell("deaf_until", is_fault=False)),
    "mute_node": (3, _node_spell("mute_until", is_fault=False)),
    "hide_all": (2, hide_all),
    "api_down": (3, _spell("api_down")),
    "api_loses_answers": (3, _spell("api_loses_answers")),
    "api_throttles": (2, _spell("api_throttles")),
    "api_fails": (3, _spell("api_fails")),
    "busy_job": (2, _spell("busy_job")),
    "creates_refused": (3, _spell("creates_refused")),
    "slow_watch": (3, _spell("slow_watch")),
    "broken_watch": (5, broken_watch),
    "repeated_watch": (2, repeated_watch),
    "lossy_calls": (4, _spell("lossy_calls")),
    "operator_dies": (4, operator_dies),
    "operator_dies_soon": (5, operator_dies_soon),
    "operator_dies_after": (1, operator_dies_after),
    "operator_stands_still": (4, operator_stands_still),
    "second_operator": (3, second_operator),
    "clock_jumps": (3, clock_jumps),
    "scale": (8, scale),
    "set_bounds": (3, set_bounds),
    "suspend": (3, suspend),
    "touch_job": (3, touch_job),
    "edit_times": (4, edit_times),
    "edit_template": (1, edit_template),
    "break_spec": (1, break_spec),
    "wipe_record": (0.5, wipe_record),
    "wipe_state": (0.7, wipe_state),
    "delete_job": (1, delete_job),
    "drain_and_delete_job": (1, drain_and_delete_job),
}
"""Weight and deed of each fault."""
