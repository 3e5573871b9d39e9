"""What a training makes under a launcher while nothing happens: samples a second at one size, and the time of single calls."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.common.processes import Processes, until
from bench.common.samples import Samples, quantile
from bench.launchers.nodes import AgentNodes, Launcher, TorchrunNodes
from bench.launchers.session import Session
from bench.launchers.small_operator import SmallOperator
from bench.launchers.steplog import Worker
from bench.launchers.train import BATCH

WARM_UP = 10  # steps of a world that do not count
CALLS_WITHIN_S = 120.0
CALLS_SCRIPT = Path(__file__).with_name("time_calls.py")


class SpeedSession(Session):
    """One world of a given size that trains for a while."""

    def __init__(self, launcher: Launcher, size: int, folder: Path, samples: Samples) -> None:
        if launcher.restart_mode:  # the script with State takes the samples of all ranks together
            launcher = replace(launcher, arguments=(str(BATCH * size),))
        super().__init__(launcher, folder, samples)
        self._size = size

    def run_agents(self, processes: Processes) -> None:
        """Train under agents with a control API."""
        operator = SmallOperator()
        try:
            with self._event(speed(self._size)):
                nodes = AgentNodes(self.launcher, processes, self.folder)
                begun = [nodes.begin(number) for number in range(self._size)]
                self.job.agents = [node.process for node in begun]
                for node in begun:
                    nodes.until_ready(node)
                self.job.new_world(self._size, operator.start([node.client for node in begun]))
                self._measure()
        finally:
            operator.close()

    def run_torchrun(self, processes: Processes) -> None:
        """Train under torchrun."""
        with self._event(speed(self._size)):
            since = time.monotonic()
            sizes = f"{self._size}:{self._size}"
            nodes = TorchrunNodes(self.launcher, processes, self.folder, sizes, own_store=False)
            self.job.agents = [nodes.begin(number) for number in range(self._size)]
            self.job.new_world(self._size, since)
            self._measure()

    def _measure(self) -> None:
        self.job.train()
        self._add(speed(self._size), BATCH * self._size * steps_per_s(self.job.world))


class CallsSession(Session):
    """Two ranks that time what the library does in each step; see time_calls.py."""

    def run_agents(self, processes: Processes) -> None:
        """Start both ranks, and wait until rank 0 has written its times."""
        operator = SmallOperator()
        try:
            with self._event("calls"):
                nodes = AgentNodes(replace(self.launcher, script=CALLS_SCRIPT), processes, self.folder)
                begun = [nodes.begin(number) for number in range(2)]
                for node in begun:
                    nodes.until_ready(node)
                operator.start([node.client for node in begun])
                written = self.folder / "calls.json"
                until(written.exists, "the times of all calls", CALLS_WITHIN_S, 0.1, seen=begun[0].process.printed_last)
                for metric, value in call_figures(json.loads(written.read_text())).items():
                    self._add(metric, value)
        finally:
            operator.close()


def speed(size: int) -> str:
    """Name the metric of a size."""
    return f"samples/s at {size}"


def steps_per_s(world: Sequence[Worker]) -> float:
    """Give the steps a second of the slowest rank, without those at the beginning. Each rank must have made more than these."""
    return min((len(worker.steps) - 1 - WARM_UP) / (worker.steps[-1].at - worker.steps[WARM_UP].at) for worker in world)


def call_figures(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Give mean and 99th percentile of each kind of call, in microseconds, from the seconds of every single one."""
    found: dict[str, float] = {}
    for kind, seconds in taken.items():
        found[f"{kind}, mean"] = 1e6 * sum(seconds) / len(seconds)
        found[f"{kind}, p99"] = 1e6 * quantile(seconds, 0.99)
    return found
