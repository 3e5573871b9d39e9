"""A story: a job, a cluster, and what befalls them; drawn from a seed, played in virtual time, shrunk when it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.sim import faults
from tests.sim.cluster import Cluster
from tests.sim.events import Event
from tests.sim.invariants import Violation, Watchman, lineage
from tests.sim.kernel import Kernel
from tests.sim.shell import Shell
from tests.sim.training import Training

from elastipod_operator.api import JobSpec
from elastipod_operator.core import offenders
from elastipod_operator.core.actions import VerifyPods
from elastipod_operator.kube.translate import policy_of

CHAOS_S = 420.0
CONVERGE_S = 1500.0
STEADY_S = 150.0
END_S = 200.0
LOOKS = 3


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that a play depends on."""

    seed: int
    nodes: int
    policy: dict[str, Any]
    specs: list[dict[str, Any]]
    run_policy: dict[str, Any]
    heeds_events: bool
    collective_timeout_s: float
    agents_are_ours: bool = True
    events: tuple[Event, ...] = ()

    def spec(self) -> dict[str, Any]:
        """Give the job's spec."""
        template = {"spec": {"containers": [{"name": "train", "image": "train"}]}}
        return {
            "replicaSpecs": [{**spec, "template": template} for spec in self.specs],
            "elasticPolicy": self.policy, "runPolicy": self.run_policy,
            "elastipod": {"backoff": {"baseSeconds": 5, "maxSeconds": 40}, "minStableSeconds": 10},
        }  # fmt: skip

    def __str__(self) -> str:
        make = "" if self.agents_are_ours else ", agents of another make"
        lines = [
            f"seed {self.seed}: {self.nodes} nodes, policy {self.policy}, specs {self.specs}, run {self.run_policy}, "
            f"heeds events: {self.heeds_events}, collective time-out {self.collective_timeout_s:g} s{make}"
        ]
        return "\n".join([*lines, *(f"  {event}" for event in self.events)])


def draw(seed: int) -> Story:
    """Draw a story from a seed."""
    rng = Random(seed)
    low = rng.choice((1, 1, 2, 2, 3))
    high = low + rng.choice((1, 2, 3, 4))
    policy: dict[str, Any] = {
        "minReplicas": low, "maxReplicas": high, "scalingTimeoutInSeconds": rng.choice((0, 10, 30)),
        "gracefulShutdownTimeoutInSeconds": rng.choice((40, 90)),
        "faultyScaleDownTimeoutInSeconds": rng.choice((5, 20, 30)),
    }  # fmt: skip
    if rng.random() < 0.2:
        policy["replicaDiscreteValues"] = sorted({low, rng.randint(low, high), high})
    elif rng.random() < 0.3:
        policy["replicaIncrementStep"] = 2
    first = rng.randint(low, high)
    specs: list[dict[str, Any]] = [{"name": "workers", "replicas": first, "maxReplicas": high}]
    if rng.random() < 0.25:
        specs = [{"name": "base", "replicas": low}, {"name": "extra", "replicas": 0, "maxReplicas": high - low}]
    elif rng.random() < 0.2:
        specs[0]["spares"] = 1
    number = rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 10))
    are_ours = rng.random() < 0.9
    events = [faults.draw(rng, CHAOS_S) for _ in range(number)]
    return Story(
        seed=seed,
        nodes=rng.randint(low, high + 1),
        policy=policy,
        specs=specs,
        run_policy={
            "cleanPodPolicy": rng.choice(("All", "None", "Running", "OnlyComplete")),
            "jobMaxRetryCount": rng.choice((None, None, None, 0, 1)),
            "restartPolicy": {
                "evalPeriodSeconds": rng.choice((60, 300, 3600)),
                "numRestartBeforeFullJobRestart": rng.choice((None, None, 0, 1)),
                "maxFullJobRestarts": rng.choice((None, None, 0, 1)),
                "maxNumRepeatOffendersToAvoid": rng.choice((0, 0, 1)),
            },
        },
        heeds_events=rng.random() < 0.9,
        collective_timeout_s=rng.choice((20.0, 20.0, 300.0)),
        agents_are_ours=are_ours,
        events=tuple(sorted((e for e in events if are_ours or e.what not in faults.UNFENCED), key=lambda e: e.at)),
    )


@dataclass
class Play:
    """A story being played."""

    story: Story
    log: list[str] = field(default_factory=list)
    is_healed: bool = False

    def __post_init__(self) -> None:
        self.kernel = Kernel()
        self.rng = Random(self.story.seed * 7919 + 13)
        self.watchman = Watchman(self.say, heeds_events=self.story.heeds_events)
        self.training = Training(
            self.kernel, self.rng, self.watchman,
            heeds_events=self.story.heeds_events, timeout_s=self.story.collective_timeout_s,
        )  # fmt: skip
        self.cluster = Cluster(self.kernel, self.rng, self.watchman, self.training, self.story.spec())
        self.cluster.agents_are_ours = self.story.agents_are_ours
        for _ in range(self.story.nodes):
            self.cluster.add_node()
        self.shell: Shell | None = None
        self.start_operator()

    def say(self, text: str) -> None:
        """Write a line of the story."""
        self.log.append(f"{self.kernel.now:8.2f}  {text}")

    def start_operator(self) -> None:
        """Begin a life of the operator, if none is under way."""
        if self.shell is None or not self.shell.alive:
            self.shell = Shell(self.kernel, self.rng, self.cluster, self.watchman)

    def run(self) -> Play:
        """Play to the end; raises Violation, or what the code under test raises."""
        for event in self.story.events:
            self.kernel.at(event.at, lambda e=event: faults.befall(self, e))
        self.kernel.run(CHAOS_S)
        faults.heal(self)
        if self.cluster.job is not None and self.cluster.job.deleted_at is None:
            if self.watchman.record.outcome != "Failed":
                self._converge()
            if self.watchman.record.outcome != "Failed":
                self._stay()
                self._complete()
            self.say("the job is deleted")
            self.cluster.delete_job()
        self._vanish()
        return self

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
        if record.outcome == "Failed":
            return True
        if job is None or record.transition is not None or record.settled_at is None or not record.members:
            return False
        sizes = faults.sizes(job.spec)
        run = self.training.runs.get(record.generation)
        at_work = run is not None and run.phase.value == "stepping"
        return at_work and len(record.members) == sizes.fit(min(self.capacity(), sizes.maximum))

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
        limit = self.kernel.now + CONVERGE_S
        while self.kernel.now - quiet_since < STEADY_S:
            self.kernel.run(self.kernel.now + 5.0)
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
        if self.watchman.record.outcome != "Completed":
            raise Violation(f"the job ended as {self.watchman.record.outcome}: {self.watchman.record.outcome_message}")
        lineage(self.training, total)
        self.kernel.run(self.kernel.now + END_S)
        left = [p for p in self.cluster.pods.values() if not p.ended]
        if left:
            raise Violation(f"pods still run long after the end: {[p.name for p in left]}")
        if self.story.run_policy["cleanPodPolicy"] in ("All", "OnlyComplete") and self.cluster.pods:
            raise Violation(f"pods are left: {self._situation()}")

    def _vanish(self) -> None:
        gone = self.kernel.run(self.kernel.now + END_S, lambda: self.cluster.job is None)
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


def failure_of(story: Story) -> BaseException | None:
    """Play a story; give what went wrong."""
    try:
        Play(story).run()
    except Exception as error:  # whatever the code under test raises is a finding
        return error
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
