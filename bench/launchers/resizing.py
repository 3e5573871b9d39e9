"""A session of resizes in memory with a state of a given size: how long the world pauses, what for, and what travels."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from bench.common.processes import Failed, Processes
from bench.common.samples import Samples
from bench.launchers import steplog
from bench.launchers.nodes import AgentNodes, Launcher
from bench.launchers.session import UNPREPARED_S, Session
from bench.launchers.small_operator import DRAIN_S, SmallOperator
from bench.launchers.steplog import Worker

GROW, SHRINK = "grow 2->4", "shrink 4->2"
COST = "cost of State in a step"
STEP_S = 0.05  # as in train_sized.py
FOLLOWED_S = 20e-6  # a call that finds nobody takes less
Stretches = Mapping[str, Sequence[int]]  # the bytes of each tensor that a process has, as start and end
PHASES = ("leave", "connect", "offers", "fill", "wrap", "compare")


class ResizeSession(Session):
    """From 2 to 4 ranks and back."""

    def run_agents(self, processes: Processes) -> None:
        """Start, grow, shrink."""
        nodes = AgentNodes(self.launcher, processes, self.folder)
        operator = SmallOperator(self.launcher.restart_mode)
        try:
            with self._event("start 2"):
                four = self._begin(nodes, 4)
                self._start(operator, [node.client for node in four[:2]])
            for name, size in ((GROW, 4), (SHRINK, 2)):
                if name == SHRINK:
                    self.job.trained_s = UNPREPARED_S
                with self._event(name):
                    self._change(operator, name, [node.client for node in four[:size]])
        finally:
            operator.close()

    def _change(self, operator: SmallOperator, name: str, agents: list[object]) -> None:
        before = self.job.world
        began = time.monotonic()
        operator.prepare(agents)  # type: ignore[arg-type]
        prepared = time.monotonic()
        old = self.job.world
        since = operator.resize(agents)  # type: ignore[arg-type]
        self._add_gap(name, old, self.job.new_world(len(agents), since))
        first = [worker.name for worker in self.job.world]
        self._train_after(name)
        self._add_phases(name, first)
        if name == GROW:
            self._add_costs(before)
            trained = [steplog.read_one(self.folder, worker.name) for worker in before]
            alone = steplog.usual_step(trained, until=began)
            beside = steplog.usual_step(trained, since=began, until=prepared)
            self._add("step while newcomers are prepared, ratio", beside / alone)

    def _add_costs(self, world: list[Worker]) -> None:
        """Add what State costs in a usual step, and what following costs in one in which somebody followed, as shares of 50 ms."""
        lines = [
            tuple(map(float, line.split()))
            for worker in world
            for line in (self.folder / f"{worker.name}.costs").read_text().splitlines()[1:]
        ]
        self._add(COST, median(cost for cost, follow in lines if follow < FOLLOWED_S) / STEP_S)
        followed = [follow for _, follow in lines if follow >= FOLLOWED_S]
        self._add("steps that were followed", len(followed))
        if followed:
            self._add("cost of following", median(followed) / STEP_S)

    def _add_phases(self, name: str, first: list[str]) -> None:
        """Add the time of the slowest rank in each phase, and the bytes of all."""
        told = [json.loads((self.folder / f"{each}.phases").read_text()) for each in first]
        for phase in PHASES:
            self._add(f"{name}, {phase}", max(each.get(phase, 0.0) for each in told))
        self._add(f"{name}, sent", sum(each.get("sent_bytes", 0) for each in told))
        self._add(f"{name}, followed", sum(each.get("followed_bytes", 0) for each in told))


class ShardedSession(ResizeSession):
    """From 2 to 4 ranks and back with FSDP2: what travels, over what must."""

    def __init__(self, launcher: Launcher, folder: Path, samples: Samples) -> None:
        super().__init__(launcher, folder, samples)
        self.job.trained_s = UNPREPARED_S

    def _change(self, operator: SmallOperator, name: str, agents: list[object]) -> None:
        before, old = self.job.world, [worker.name for worker in self.job.world]
        operator.prepare(agents)  # type: ignore[arg-type]
        operator.drain(agents, DRAIN_S)  # type: ignore[arg-type]  # tells who leaves, so that shards are handed over
        self._add_gap(name, before, self.job.new_world(len(agents), operator.start(agents)))  # type: ignore[arg-type]
        new = [worker.name for worker in self.job.world]
        self.job.train()  # its ranks write down what they have and did after their first step
        staying = {steplog.pid_of(one) for one in new}
        gone = [one for one in old if steplog.pid_of(one) not in staying]
        told = [*(f"{one}.phases" for one in new), *(f"{one}.left" for one in gone)]
        sent = sum(json.loads((self.folder / file).read_text()).get("sent_bytes", 0) for file in told)
        self._add(f"{name}, sent", sent)
        self._add(f"{name}, moved", moved(sent, least_bytes(self._stretches(old), self._stretches(new))))

    def _stretches(self, world: Sequence[str]) -> dict[int, Stretches]:
        return {steplog.pid_of(one): json.loads((self.folder / f"{one}.stretches").read_text()) for one in world}


class CostSession(ResizeSession):
    """Two ranks that train: what State costs in each step."""

    def run_agents(self, processes: Processes) -> None:
        """Start, and train."""
        nodes = AgentNodes(self.launcher, processes, self.folder)
        operator = SmallOperator(self.launcher.restart_mode)
        self.job.trained_s = UNPREPARED_S
        try:
            with self._event("start 2"):
                two = self._begin(nodes, 2)
                self._start(operator, [node.client for node in two])
                for path in self.folder.glob("node-*.txt"):
                    if "there are no copies" in (said := path.read_text("utf-8", "replace")):
                        raise Failed(f"no copies are made: {said[-200:]}")
                self._add_costs(self.job.world)
        finally:
            operator.close()


def least_bytes(old: Mapping[int, Stretches], new: Mapping[int, Stretches]) -> int:
    """Give what has to travel: the bytes that each process of the new world has, and had not in the old one. old, new: by pid."""
    lacking = 0
    for pid, stretches in new.items():
        held = old.get(pid, {})
        for key, (start, stop) in stretches.items():
            held_from, held_to = held.get(key, (0, 0))
            lacking += stop - start - max(0, min(stop, held_to) - max(start, held_from))
    return lacking


def moved(sent: int, least: int) -> float:
    """Give what was sent over what had to be. Raises Failed for less: then the new world has begun with another state."""
    if sent < least:
        raise Failed(
            f"{sent} bytes were sent where {least} were lacking: the new world has not gone on with the old one's state"
        )
    return sent / least
