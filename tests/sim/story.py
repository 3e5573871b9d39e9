"""A story: a job, a cluster, and what befalls them; drawn from a seed, played in virtual time, shrunk when it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.sim import faults
from tests.sim.cluster import Cluster
from tests.sim.events import Event, Make
from tests.sim.invariants import Violation, Watchman, lineage
from tests.sim.kernel import Kernel
from tests.sim.shell import Shell
from tests.sim.training import Phase, Training
from tests.sim.victims import UNFENCED
from tests.sim.wishes import sizes

from elastipod_operator.api import JobSpec
from elastipod_operator.core import offenders
from elastipod_operator.core.actions import VerifyPods
from elastipod_operator.kube.translate import policy_of

CHAOS_S = 420.0
CONVERGE_S = 1500.0
# Longer than an incomplete increment is held; the rests between get longer than that after six tries.
STEADY_S = 190.0
SETTLE_S = 4000.0
END_S = 200.0
DEAD_NODE_S = 700.0
LONGEST_DRAIN_S = 600.0  # gracefulShutdownTimeoutInSeconds where it is not set
LOOKS = 3


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that a play depends on."""

    seed: int
    nodes: int
    policy: dict[str, Any] | None
    specs: list[dict[str, Any]]
    run_policy: dict[str, Any]
    heeds_events: bool
    collective_timeout_s: float
    make: Make = Make.OURS
    ours: dict[str, Any] = field(default_factory=dict)
    """What is in spec.elastipod beside its back-off."""
    events: tuple[Event, ...] = ()

    def spec(self) -> dict[str, Any]:
        """Give the job's spec."""
        template = {"spec": {"containers": [{"name": "train", "image": "train"}]}}
        spec = {
            "nprocPerNode": "1",
            "replicaSpecs": [{**spec, "template": template} for spec in self.specs],
            "elasticPolicy": self.policy, "runPolicy": self.run_policy,
            "elastipod": {"backoff": {"baseSeconds": 5, "maxSeconds": 40}, "minStableSeconds": 10, **self.ours},
        }  # fmt: skip
        return {name: value for name, value in spec.items() if value is not None}

    def __str__(self) -> str:
        make = "" if self.make is Make.OURS else f", agents {self.make.value}"
        lines = [
            f"seed {self.seed}: {self.nodes} nodes, policy {self.policy}, specs {self.specs}, run {self.run_policy}, "
            f"heeds events: {self.heeds_events}, collective time-out {self.collective_timeout_s:g} s, {self.ours}{make}"
        ]
        return "\n".join([*lines, *(f"  {event}" for event in self.events)])


def draw(seed: int) -> Story:
    """Draw a story from a seed."""
    rng = Random(seed)
    low = rng.choice((1, 1, 2, 2, 3))
    high = low + rng.choice((1, 2, 3, 4))
    make = rng.choices((Make.OURS, Make.IN_PROCESS, Make.FOREIGN), (6, 3, 1))[0]
    is_fixed = rng.random() < 0.06
    events = (faults.draw(rng, CHAOS_S) for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 10))))
    happens = (e for e in events if make is not Make.FOREIGN or e.what not in UNFENCED)
    return Story(
        seed=seed,
        nodes=rng.randint(low, high + 1),
        policy=None if is_fixed else _draw_policy(rng, low, high),
        specs=[{"name": "workers", "replicas": low}] if is_fixed else _draw_specs(rng, low, high),
        run_policy=_draw_run_policy(rng),
        heeds_events=rng.random() < 0.9,
        collective_timeout_s=rng.choice((20.0, 20.0, 300.0)),
        make=make,
        ours={"minStableSeconds": rng.choice((0, 10, 40)), "payback": rng.choice(("Auto", "Auto", "Off"))},
        events=tuple(sorted(happens, key=lambda e: e.at)),
    )


def _draw_policy(rng: Random, low: int, high: int) -> dict[str, Any]:
    policy: dict[str, Any] = {
        "minReplicas": low, "maxReplicas": high, "scalingTimeoutInSeconds": rng.choice((0, 10, 30)),
        "gracefulShutdownTimeoutInSeconds": rng.choice((40, 90)),
        "faultyScaleDownTimeoutInSeconds": rng.choice((5, 20, 30)),
    }  # fmt: skip
    if rng.random() < 0.2:
        policy["replicaDiscreteValues"] = sorted({low, rng.randint(low, high), high})
    elif rng.random() < 0.3:
        policy["replicaIncrementStep"] = 2
    return policy


def _draw_specs(rng: Random, low: int, high: int) -> list[dict[str, Any]]:
    spares = rng.choice((0, 0, 0, 1))
    if rng.random() < 0.25:
        return [
            {"name": "base", "replicas": low, "spares": spares},
            {"name": "extra", "replicas": 0, "maxReplicas": high - low},
        ]
    return [{"name": "workers", "replicas": rng.randint(low, high), "maxReplicas": high, "spares": spares}]


def _draw_run_policy(rng: Random) -> dict[str, Any]:
    may_be_late = rng.random() < 0.85
    return {
        "cleanPodPolicy": rng.choice(("All", "None", "Running", "OnlyComplete")),
        "jobMaxRetryCount": rng.choice((None, None, None, 0, 1)),
        "activeDeadlineSeconds": None if may_be_late else rng.choice((300, 900)),
        "startupDeadlineSeconds": None if may_be_late else rng.choice((20, 200)),
        "faultDeadlineSeconds": None if may_be_late else rng.choice((10, 15, 120)),
        "ttlSecondsAfterFinished": rng.choice((None, 0, 20, 90)),
        "restartPolicy": {
            "evalPeriodSeconds": rng.choice((60, 300, 3600)),
            "numRestartBeforeFullJobRestart": rng.choice((None, None, 0, 1)),
            "maxFullJobRestarts": rng.choice((None, None, 0, 1)),
            "maxNumRepeatOffendersToAvoid": rng.choice((0, 0, 1)),
            "scaleUpSnoozeTimeInSeconds": rng.choice((0, 0, 45)),
        },
    }


@dataclass
class Play:
    """A story being played."""

    story: Story
    log: list[str] = field(default_factory=list)
    is_healed: bool = False
    is_spec_broken: bool = False

    def __post_init__(self) -> None:
        self.kernel = Kernel()
        self.rng = Random(self.story.seed * 7919 + 13)
        self.watchman = Watchman(self.say, heeds_events=self.story.heeds_events)
        self.training = Training(
            self.kernel, self.rng, self.watchman,
            heeds_events=self.story.heeds_events, timeout_s=self.story.collective_timeout_s,
        )  # fmt: skip
        self.cluster = Cluster(self.kernel, self.rng, self.watchman, self.training, self.story.spec())
        self.cluster.make = self.story.make
        for _ in range(self.story.nodes):
            self.cluster.add_node()
        self.met = self.watchman.met
        self.shell: Shell | None = None
        self.start_operator()

    def say(self, text: str) -> None:
        """Write a line of the story."""
        self.log.append(f"{self.kernel.now:8.2f}  {text}")

    def told(self) -> str:
        """Give the whole story as it was played."""
        return "\n".join([str(self.story), "", *self.log])

    def start_operator(self) -> None:
        """Begin a life of the operator, if none is under way."""
        if self.shell is None or not self.shell.alive:
            self.shell = self.another_operator()

    def another_operator(self) -> Shell:
        """Begin a life of an operator, whoever else may be there."""
        return Shell(self.kernel, self.rng, self.cluster, self.watchman)

    def run(self) -> Play:
        """Play to the end; raises Violation, or what the code under test raises."""
        for event in self.story.events:
            self.kernel.at(event.at, lambda e=event: faults.befall(self, e))
        self.kernel.run(CHAOS_S)
        faults.heal(self)
        if self._is_wanted():
            self._converge()
        if self._is_wanted() and self._is_alive():
            self._stay()
        if self._is_wanted() and self._is_alive():
            self._complete()
        if self.cluster.job is not None and self.cluster.job.deleted_at is None:
            self.say("the job is deleted")
            self.cluster.delete_job()
        self._vanish()
        return self

    def _is_wanted(self) -> bool:
        return self.cluster.job is not None and self.cluster.job.deleted_at is None

    def _is_alive(self) -> bool:
        return not self.watchman.record.outcome

    def capacity(self, *, avoiding: bool = True) -> int:
        """How many pods can run: not on nodes that new ones avoid, unless one is there already."""
        avoided: tuple[str, ...] = ()
        if self.cluster.job is not None and avoiding:
            policy = policy_of(JobSpec.model_validate(self.cluster.job.spec))
            avoided = offenders.avoided(self.watchman.record, policy, self.kernel.utc())
        usable = [node for node in self.cluster.nodes.values() if self.cluster.usable(node)]
        return sum(n.name not in avoided or any(not p.ended for p in self.cluster.on_node(n)) for n in usable)

    def _converge(self) -> None:
        self.say("all faults are over")
        if not self.kernel.run(self.kernel.now + CONVERGE_S, self._is_converged):
            raise Violation(f"the job does not converge: {self._situation()}")
        self.say(f"converged: {self._situation()}")

    def _is_converged(self) -> bool:
        record, job = self.watchman.record, self.cluster.job
        if record.outcome == "Completed" and not self.met["agent: lies that its workers finished"]:
            raise Violation("the job is completed though its workers never finished")
        if record.outcome or job is None:
            return True
        if record.transition is not None or record.settled_at is None or not record.members:
            return False
        allowed = sizes(job.spec)
        run = self.training.runs.get(record.generation)
        at_work = (
            run is not None and run.phase is Phase.STEPPING and all(m.works(m.generation) for m in run.members.values())
        )
        return at_work and len(record.members) == allowed.fit(min(self.capacity(), allowed.maximum))

    def _situation(self) -> str:
        record, job = self.watchman.record, self.cluster.job
        state = job.status["conditions"][-1] if job is not None and job.status else None
        pods = [
            f"{p.name}:{p.phase}{'(terminating)' if p.deleted_at is not None else ''}"
            f"{'/' + p.agent.state.value + str(p.agent.generation) if p.agent is not None else ''}"
            for p in self.cluster.pods.values()
        ]
        about = f"generation {record.generation}, {len(record.members)} members, {record.transition}"
        return f"{about}; {self.capacity()} nodes usable; {pods}; {state}"

    def _stay(self) -> None:
        """Nothing is written and nothing is done while nothing happens; dead nodes may take minutes to be done with.

        Now and then the look falls upon the end of a window or of a wait, which is written once.
        """
        for _ in range(LOOKS):
            problem = self._look_again()
            if not problem:
                return
        raise Violation(f"a second look at the same facts writes or does something: {problem}")

    def _look_again(self) -> str:
        writes, quiet_since = self.cluster.writes, self.kernel.now
        limit = self.kernel.now + SETTLE_S
        while self.kernel.now - quiet_since < STEADY_S:
            self.kernel.run(self.kernel.now + 5.0)
            if not self._is_wanted() or not self._is_alive():
                return ""  # a deadline of the job passed
            if self.cluster.writes != writes:
                writes, quiet_since = self.cluster.writes, self.kernel.now
            if self.kernel.now > limit:
                raise Violation(f"the operator goes on writing though nothing happens; last: {self.cluster.last_write}")
        assert self.shell is not None
        self.shell.wake()
        self.kernel.run(self.kernel.now + 5.0)
        actions = [a for a in self.shell.last_actions if not isinstance(a, VerifyPods)]
        return f"{actions}; last: {self.cluster.last_write}" if self.cluster.writes != writes or actions else ""

    def _complete(self) -> None:
        run = max(self.training.runs.values(), key=lambda r: r.generation)
        self.training.total = total = run.step + 5
        if not self.kernel.run(self.kernel.now + END_S, lambda: self.watchman.record.outcome != ""):
            raise Violation(f"the job does not complete: {self._situation()}")
        if self.watchman.record.outcome_reason == "DeadlineExceeded":
            return
        if self.watchman.record.outcome != "Completed":
            raise Violation(f"the job ended as {self.watchman.record.outcome}: {self.watchman.record.outcome_message}")
        lineage(self.training, total)
        ttl_s = (
            self.cluster.job.spec["runPolicy"].get("ttlSecondsAfterFinished") if self.cluster.job is not None else None
        )
        clean = self.cluster.job.spec["runPolicy"]["cleanPodPolicy"] if self.cluster.job is not None else ""
        self.kernel.run(self.kernel.now + END_S)
        # Of a dead node's pods nobody knows that they are gone before its grace is over.
        self.kernel.run(self.kernel.now + DEAD_NODE_S, lambda: all(p.node_runs() for p in self.cluster.pods.values()))
        if bool(ttl_s) is self._is_wanted():
            raise Violation(f"the job should go {ttl_s} s after its end, and {'stays' if ttl_s else 'goes'}")
        self.met["ttlSecondsAfterFinished"] += bool(ttl_s)
        self.met[f"cleanPodPolicy {clean}"] += 1
        left = [p for p in self.cluster.pods.values() if not p.ended]
        if left:
            raise Violation(f"pods still run long after the end: {[p.name for p in left]}")
        if clean in ("All", "OnlyComplete") and self.cluster.pods:
            raise Violation(f"pods are left: {self._situation()}")

    def _vanish(self) -> None:
        # Workers that do not heed the event have all the time that a drain gives them, also in a deletion that drains.
        gone = self.kernel.run(self.kernel.now + LONGEST_DRAIN_S + END_S, lambda: self.cluster.job is None)
        self.kernel.run(self.kernel.now + 10.0)
        if not gone or self.cluster.pods:
            raise Violation(f"deletion leaves something: {self._situation()}")


def shrink(story: Story, fails: Callable[[Story], bool]) -> Story:
    """Leave events out, one after the other, as long as the story still fails."""
    at = 0
    while at < len(story.events):
        shorter = replace(story, events=story.events[:at] + story.events[at + 1 :])
        if fails(shorter):
            story = shorter
        else:
            at += 1
    return story


def failure_of(story: Story, met: Counter[str] | None = None) -> BaseException | None:
    """Play a story; give what went wrong. met: takes in what was met in it."""
    play = Play(story)
    try:
        play.run()
    except Exception as error:  # whatever the code under test raises is a finding
        return error
    if met is not None:
        met.update(play.met)
    return None


def explain(story: Story) -> str:
    """Tell a failing story in its shortest form, with the log of its play."""
    short = shrink(story, lambda s: failure_of(s) is not None)
    play = Play(short)
    try:
        play.run()
    except Exception as error:  # as above
        text = f"{type(error).__name__}: {error}"
        return "\n".join([text, "", str(short), "", *play.log[-60:]])
    return f"the story does not fail when played again:\n{short}"
