"""One life of a small job under one launcher, with every event that is measured; the names of metrics are made here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.common.exits import ExitWatch
from bench.common.machine import cpu_s, descendants
from bench.common.processes import Failed, Process, Processes, until
from bench.common.samples import Samples
from bench.launchers import steplog
from bench.launchers.client import Client
from bench.launchers.nodes import AgentNodes, Launcher, Node, TorchrunNodes
from bench.launchers.small_operator import SmallOperator
from bench.launchers.steplog import Worker

WORLD_WITHIN_S = 90.0
# Every world trains for this time before the next event: there is something to interrupt, and what an agent does in advance
# for the next start (ours forks 5 s after a start) is done, as it is in a job whose worlds live for minutes.
TRAINED_S = 6.5
# This is enough where nothing is prepared or interrupted: before the next start of a peer, and in the last world of a life.
UNPREPARED_S = 3.0
SETTLED_S = 0.4
SETTLE_WITHIN_S = 60.0


class Job:
    """The training processes of one session as their logs show them. folder: where they write. trained_s: for how long `train` does."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher = launcher
        self.folder = folder
        self.trained_s = TRAINED_S
        self.world: list[Worker] = []
        self.agents: list[Process] = []  # whose end is the end of every wait
        self._past: set[str] = set()

    def new_world(self, size: int, since: float) -> list[Worker]:
        """Wait for the world of this size that begins after a moment. Raises Failed, also when it should be warm and is not."""
        self._past |= {worker.name for worker in self.world}

        def found() -> list[Worker] | None:
            for agent in self.agents:
                agent.require_alive()
            return steplog.complete_world(steplog.read(self.folder, self._past), size, since)

        self.world = until(found, f"a first step of {size} ranks", WORLD_WITHIN_S, every_s=0.1, seen=self._seen)
        if [worker.is_warm for worker in self.world] != [self.launcher.is_warm] * size:
            warm = [worker.rank for worker in self.world if worker.is_warm]
            raise Failed(
                f"ranks {warm} of {size} had torch loaded when the script began; wanted: {self.launcher.name}; {self._seen()}"
            )
        return self.world

    def train(self) -> None:
        """Let the present world make steps for a while, until its slowest rank has."""

        def done() -> bool:
            self.world = [steplog.read_one(self.folder, worker.name) for worker in self.world]
            return all(worker.steps[-1].at - worker.steps[0].at >= self.trained_s for worker in self.world)

        time.sleep(self.trained_s)
        until(done, f"{self.trained_s:g} s of steps", WORLD_WITHIN_S, every_s=0.1, seen=self._seen)

    def _seen(self) -> str:
        shown = [(w.rank, w.world_size, len(w.steps)) for w in steplog.read(self.folder, self._past)]
        ends = [
            f"{p.name}: {' | '.join(p.read_text('utf-8', 'replace').splitlines()[-4:])}" for p in _outputs(self.folder)
        ]
        return f"(rank, world size, steps) of newer processes: {shown}; " + "; ".join(ends)


class Session:
    """Measures into samples; after a failed event the rest of the session is given up, for its state is unknown."""

    def __init__(self, launcher: Launcher, folder: Path, samples: Samples) -> None:
        self.launcher = launcher
        self.folder = folder
        self.job = Job(launcher, folder)
        self._samples = samples

    def run_agents(self, processes: Processes) -> None:
        """Everything that an operator does with agents, and that happens to them."""
        nodes = AgentNodes(self.launcher, processes, self.folder)
        operator = SmallOperator(self.launcher.restart_mode)
        try:
            with self._event("agent up"):
                began = time.monotonic()
                four = self._begin(nodes, 4)
                self._add("agent up", time.monotonic() - began)
                for node in four:
                    until_settled(node.process)
            agents = [node.client for node in four]
            with self._event("start 1"):
                self._start(operator, agents[:1])
                operator.stop()
            with self._event("start 2"):
                self._start(operator, agents[:2])
            for name, size in (("grow 2->4", 4), ("restart of 4", 4), ("shrink 4->2", 2)):
                with self._event(name):
                    self._planned(operator, name, agents[:size])
            with self._event("start 4"):
                operator.stop()
                self._start(operator, agents)
            self._crash(operator, four)
            self._node_loss(operator, four)
        finally:
            operator.close()

    def run_torchrun(self, processes: Processes) -> None:
        """What torchrun can do of it: grow, and recover."""
        self._grow_and_crash(processes)
        four = self.job.agents
        with self._event("node loss"):
            lost, since = _node_of(self.job.world[2].pid, four), time.monotonic()
            lost.kill_tree()
            four.remove(lost)
            self._add("node loss back", steplog.first_step_everywhere(self.job.new_world(3, since)) - since)

    def _grow_and_crash(self, processes: Processes) -> None:
        """Under torchrun."""
        nodes = TorchrunNodes(self.launcher, processes, self.folder, "2:4")
        with self._event("spawn 2"):
            since = time.monotonic()
            four = self.job.agents
            four += [nodes.begin(number) for number in range(2)]
            self._add("spawn 2", steplog.first_step_everywhere(self.job.new_world(2, since)) - since)
            self.job.train()
        with self._event("grow 2->4"):
            old, since = self.job.world, time.monotonic()
            four += [nodes.begin(number) for number in (2, 3)]
            self._add_gap("grow 2->4", old, self.job.new_world(4, since))
            self._train_after("grow 2->4")
        with self._event("crash"):
            victim, since = self.job.world[2].pid, time.monotonic()
            os.kill(victim, signal.SIGKILL)
            self._add("crash back", steplog.first_step_everywhere(self.job.new_world(4, since)) - since)
            self._train_after("crash", "crash back")

    def _begin(self, nodes: AgentNodes, number: int) -> list[Node]:
        """Start so many agents together, and wait until all are ready."""
        begun = [nodes.begin(each) for each in range(number)]
        self.job.agents = [node.process for node in begun]
        for node in begun:
            nodes.until_ready(node)
        return begun

    def _planned(self, operator: SmallOperator, name: str, agents: list[Client]) -> None:
        operator.prepare(agents)
        old = self.job.world
        since = operator.resize(agents)
        self._add_gap(name, old, self.job.new_world(len(agents), since))
        self._train_after(name)

    def _crash(self, operator: SmallOperator, nodes: list[Node]) -> None:
        agents = [node.client for node in nodes]
        with self._event("crash"), ExitWatch(self.job.world[2].pid) as exit_watch:
            first_loss = operator.watch(closely=agents[2])
            time.sleep(0.3)  # every watcher waits at its agent by now
            killed_at = time.monotonic()
            os.kill(self.job.world[2].pid, signal.SIGKILL)
            loss = first_loss()
            self.job.new_world(4, operator.recover(agents))
            self._add("crash seen after SIGKILL", 1000 * (loss.seen_at - killed_at))
            self._add_seen_after_exit(1000 * (loss.seen_at - exit_watch.exited_at(1.0)))
            self._add("crash back", steplog.first_step_everywhere(self.job.world) - killed_at)
            self._train_after("crash", "crash back")

    def _add_seen_after_exit(self, seen_ms: float) -> None:
        """Add a time that can be: the thread that takes the moment of the exit may have woken up after all others."""
        metric = "crash seen after the exit"
        if seen_ms >= 0:
            self._add(metric, seen_ms)
        else:
            why = f"the machine was busy: the end of the worker was noticed {-seen_ms:.1f} ms after the agent had told of it"
            self._samples.fail(self.launcher.name, metric, why)

    def _node_loss(self, operator: SmallOperator, nodes: list[Node]) -> None:
        with self._event("node loss"):
            first_loss = operator.watch(closely=nodes[2].client)
            time.sleep(0.3)
            killed_at = time.monotonic()
            nodes[2].process.kill_tree()
            self.job.agents.remove(nodes[2].process)
            loss = first_loss()
            survivors = [node.client for node in nodes if node is not nodes[2]]
            self.job.new_world(3, operator.recover(survivors))
            self._add("node loss seen", 1000 * (loss.seen_at - killed_at))
            self._add("node loss back", steplog.first_step_everywhere(self.job.world) - killed_at)

    def _start(self, operator: SmallOperator, agents: list[Client]) -> None:
        since, name = operator.start(agents), f"start {len(agents)}"
        world = self.job.new_world(len(agents), since)
        self._add(name, steplog.first_step_everywhere(world) - since)
        for phase in ("began", "imported", "grouped"):  # of the slowest rank, for the file of all runs
            self._add(f"{name}, {phase}", max(getattr(worker, phase) for worker in world) - since)
        self.job.train()

    def _train_after(self, name: str, gap: str = "") -> None:
        """Train, and add the pause of an event: its gap less a usual step, which no change can do without. gap: its metric."""
        gap_s = self._samples.values[self.launcher.name, gap or name][-1]
        self.job.train()
        step_s = steplog.usual_step(self.job.world)
        self._add(f"step after {name}", step_s)
        self._add(f"pause, {name}", gap_s - step_s)

    def _add_gap(self, name: str, old: list[Worker], new: list[Worker]) -> None:
        found = steplog.restart([steplog.read_one(self.folder, worker.name) for worker in old], new)
        self._add(name, found.gap_s)
        self._add(f"repeated, {name}", found.repeated)

    def _add(self, metric: str, value: float) -> None:
        self._samples.add(self.launcher.name, metric, value)
        print(f"    {metric}: {value:.3f}", flush=True)

    @contextmanager
    def _event(self, name: str) -> Iterator[None]:
        """Note which event failed, and how, whatever went wrong in it."""
        try:
            yield
        except (Failed, OSError) as error:
            self._samples.fail(self.launcher.name, name, str(error))
            raise Failed(f"{self.launcher.name}, {name}: {error}") from error


def until_settled(process: Process) -> None:
    """Wait until an agent and all that it has started use no processor: what it prepares in advance is there."""

    def is_quiet() -> bool:
        process.require_alive()
        before = _tree_cpu_s(process.pid)
        time.sleep(SETTLED_S)
        return _tree_cpu_s(process.pid) - before < 0.02 * SETTLED_S

    until(is_quiet, f"{process.name} to settle", SETTLE_WITHIN_S)


def _tree_cpu_s(pid: int) -> float:
    used = 0.0
    for one in descendants(pid):
        with suppress(OSError):
            used += cpu_s(one)
    return used


def _node_of(worker: int, nodes: list[Process]) -> Process:
    return next(node for node in nodes if worker in descendants(node.pid))


def _outputs(folder: Path) -> list[Path]:
    return sorted(folder.glob("node-*.txt"))
