"""What can befall a job, as a table: name -> how it is done. Each is drawn at random, and healed in the end."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from pydantic import ValidationError
from tests.sim.agents import Crash
from tests.sim.cluster import Body, SimNode, SimPod
from tests.sim.events import Event
from tests.sim.kernel import Script

from elastipod_operator.api import JobSpec
from elastipod_operator.core.names import ANNOTATION_DRAIN_ON_DELETE
from elastipod_operator.core.sizes import SizeError, Sizes
from elastipod_operator.kube.translate import policy_of

if TYPE_CHECKING:
    from tests.sim.shell import Shell
    from tests.sim.story import Play

# What keeps the operator from seeing or acting in time.
HINDRANCES = {
    *(
        "api_down",
        "api_loses_answers",
        "slow_watch",
        "broken_watch",
        "lossy_calls",
        "operator_dies",
        "operator_dies_soon",
    ),
    *("hide_node", "hide_all"),
}
# What may keep a pod from being drained before it is killed.
DELAYS = HINDRANCES | {"freeze_node", "cut_node", "kill_node", "delete_node"}

# A power loss shows at last when its node is found not ready; a slow watch adds to it.
AFTERMATH_S = 600.0

Fault = Callable[["Play", "Event"], str]


def sizes(spec: Body) -> Sizes:
    """Give the allowed sizes of a spec. Raises SizeError."""
    return policy_of(JobSpec.model_validate(spec)).sizes


def draw(rng: Random, until: float) -> Event:
    """Draw one event."""
    what = rng.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])[0]
    return Event(
        round(rng.uniform(0.0, until), 1), what, rng.randrange(1000), round(rng.choice((3, 12, 25, 60, 100)) * 1.0, 1)
    )


# Calls without a generation are not fenced: what comes late or from somebody else does harm there.
UNFENCED = {"lossy_calls", "wipe_record", "wipe_state", "stop_from_outside"}


def befall(play: Play, event: Event) -> None:
    """Let an event happen."""
    play.cluster.may_be_late |= event.what in DELAYS
    happened = FAULTS[event.what][1](play, event)
    play.say(f"** {event.what}: {happened or 'hits nobody'}")


def heal(play: Play) -> None:
    """End everything that goes on, and see to it that the job can run."""
    cluster = play.cluster
    play.is_healed = True
    cluster.down_until = cluster.lossy_until = cluster.refusing_until = cluster.slow_until = cluster.gap_until = 0.0
    cluster.calls_lossy_until = 0.0
    for node in cluster.nodes.values():
        node.frozen_until = node.cut_until = node.hidden_until = node.sick_until = 0.0
        if node.tainted or node.cordoned:
            node.tainted = node.cordoned = False
            cluster.node_changed(node)
    if play.shell is not None:
        play.shell.die_after = None
    play.start_operator()
    if cluster.job is None:
        return
    if cluster.job.spec["runPolicy"].get("suspend"):
        cluster.edit_job(lambda spec: spec["runPolicy"].update(suspend=False))
    play.kernel.run(play.kernel.now + 10.0)
    if cluster.job is None:
        return
    # Room for half an increment is taken and given back for ever: that is another story (test_gangs).
    wanted = sizes(cluster.job.spec)
    whole = {*wanted.allowed, *range(wanted.maximum, 100)}
    while not {play.capacity(), play.capacity(avoiding=False)} <= whole:  # nodes are not avoided for ever
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
    if pod is None or pod.agent is None:
        return ""
    _touch(play, pod, event)
    play.watchman.worker_faults += 1
    pod.agent.crash(Crash(1, None, "Traceback ...\nValueError: boom"))
    return pod.name


def crash_again_and_again(play: Play, event: Event) -> str:
    """The workers of one node fail as often as they are started there."""
    node = _node(play, event)
    if node is None:
        return ""
    for nth in range(2 + event.number % 4):
        play.kernel.after(nth * event.seconds, lambda: _crash_on(play, node, event))
    return f"{node.name}, {2 + event.number % 4} times, every {event.seconds:g} s"


def _crash_on(play: Play, node: SimNode, event: Event) -> None:
    if play.is_healed:
        return
    for pod in play.cluster.on_node(node):
        if pod.agent is not None and pod.agent.works(pod.agent.generation):
            _touch(play, pod, event)
            play.watchman.worker_faults += 1
            pod.agent.crash(Crash(1, None, "Traceback ...\nRuntimeError: CUDA error"))
            play.say(f"** crash on {node.name}: {pod.name}")


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


def freeze_node(play: Play, event: Event) -> str:
    node = _node(play, event)
    if node is None:
        return ""
    _touch_node(play, node, event)
    node.frozen_until = play.kernel.now + event.seconds
    return f"{node.name} for {event.seconds:g} s"


def cut_node(play: Play, event: Event) -> str:
    node = _node(play, event)
    if node is None:
        return ""
    _touch_node(play, node, event)
    node.cut_until = play.kernel.now + event.seconds
    return f"{node.name} for {event.seconds:g} s"


def _hide(play: Play, node: SimNode, event: Event) -> None:
    node.hidden_until = play.kernel.now + event.seconds
    for pod in play.cluster.on_node(node):
        play.watchman.hidden(pod.name, node.hidden_until + AFTERMATH_S)


def hide_node(play: Play, event: Event) -> str:
    """Only the operator cannot reach it: training goes on and must not be disturbed."""
    node = _node(play, event)
    if node is None:
        return ""
    _hide(play, node, event)
    return f"{node.name} for {event.seconds:g} s"


def hide_all(play: Play, event: Event) -> str:
    for node in play.cluster.nodes.values():
        _hide(play, node, event)
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


def sicken_node(play: Play, event: Event) -> str:
    node = _node(play, event)
    if node is None:
        return ""
    node.sick_until = play.kernel.now + event.seconds
    return f"containers end at once on {node.name} for {event.seconds:g} s"


# ---- API server, watches, calls, the operator


def api_down(play: Play, event: Event) -> str:
    play.cluster.down_until = play.kernel.now + event.seconds
    return f"{event.seconds:g} s"


def api_loses_answers(play: Play, event: Event) -> str:
    play.cluster.lossy_until = play.kernel.now + event.seconds
    return f"{event.seconds:g} s"


def creates_refused(play: Play, event: Event) -> str:
    play.cluster.refusing_until = play.kernel.now + event.seconds
    return f"{event.seconds:g} s"


def slow_watch(play: Play, event: Event) -> str:
    play.cluster.slow_until = play.kernel.now + event.seconds
    return f"{event.seconds:g} s"


def broken_watch(play: Play, event: Event) -> str:
    play.cluster.gap_until = play.kernel.now + event.seconds
    play.kernel.after(event.seconds + 0.1, play.cluster.relist_pods)
    return f"{event.seconds:g} s"


def lossy_calls(play: Play, event: Event) -> str:
    play.cluster.calls_lossy_until = play.kernel.now + event.seconds
    return f"{event.seconds:g} s"


def operator_dies(play: Play, event: Event) -> str:
    if play.shell is not None:
        play.shell.die()
    play.kernel.after(event.seconds if event.number % 2 else 2.0, play.start_operator)
    return f"{event.seconds:g} s"


def operator_dies_soon(play: Play, event: Event) -> str:
    if play.shell is None or not play.shell.alive:
        return ""
    shell = play.shell
    shell.die_after = event.number % 7
    play.kernel.spawn(_reborn(play, shell, event.seconds))
    return f"after {event.number % 7} more calls"


def _reborn(play: Play, shell: Shell, seconds: float) -> Script:
    while shell.alive and shell.die_after is not None:
        yield 1.0
    yield seconds
    play.start_operator()


# ---- the user


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
    if job is None:
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
    if known < play.watchman.record.generation or not known:
        return ""  # nobody is left who could tell the generation
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
    "crash_worker": (8, crash_worker),
    "crash_again_and_again": (6, crash_again_and_again),
    "kill_container": (4, kill_container),
    "delete_pod": (5, delete_pod),
    "force_delete_pod": (3, force_delete_pod),
    "add_node": (6, add_node),
    "kill_node": (4, kill_node),
    "return_node": (3, return_node),
    "delete_node": (2, delete_node),
    "freeze_node": (4, freeze_node),
    "cut_node": (3, cut_node),
    "hide_node": (4, hide_node),
    "hide_all": (2, hide_all),
    "cordon_node": (2, cordon_node),
    "drain_node": (6, drain_node),
    "taint_node": (4, taint_node),
    "sicken_node": (3, sicken_node),
    "api_down": (3, api_down),
    "api_loses_answers": (3, api_loses_answers),
    "creates_refused": (2, creates_refused),
    "slow_watch": (3, slow_watch),
    "broken_watch": (2, broken_watch),
    "lossy_calls": (4, lossy_calls),
    "operator_dies": (4, operator_dies),
    "operator_dies_soon": (5, operator_dies_soon),
    "scale": (5, scale),
    "set_bounds": (3, set_bounds),
    "suspend": (3, suspend),
    "touch_job": (3, touch_job),
    "wipe_record": (0.5, wipe_record),
    "wipe_state": (0.7, wipe_state),
    "edit_template": (1, edit_template),
    "delete_job": (1, delete_job),
    "drain_and_delete_job": (1, drain_and_delete_job),
    "stop_from_outside": (2, stop_from_outside),
    "mark_out_of_service": (2, mark_out_of_service),
}
"""Weight and deed of each fault."""
