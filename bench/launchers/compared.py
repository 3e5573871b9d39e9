"""A resize, a crash and a hang of a small training: in memory, in new processes, under the original agent and torchrun."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

from bench.common.processes import Processes
from bench.common.report import Reach, Row
from bench.common.samples import Samples
from bench.launchers import steplog
from bench.launchers.client import Client
from bench.launchers.nodes import AgentNodes, Launcher
from bench.launchers.resizing import GROW, SHRINK
from bench.launchers.rows import MEMORY, ORIGINAL, PEER_NAMES, TUNED, WARM
from bench.launchers.session import TRAINED_S, UNPREPARED_S, Session
from bench.launchers.small_operator import SmallOperator

CRASH, HANG = "crash", "hang"
SIDES = (MEMORY, WARM, ORIGINAL, TUNED)
HANG_LIMIT_S = 5.0  # long enough for a worker that gets no processor for some seconds
HUNG_SEEN, HUNG_BACK = "hang seen after the limit", "hang back after the limit"
REACH_PAUSE = {GROW: 0.10, SHRINK: 0.06, CRASH: 0.10}  # seconds
REACH_HUNG_BACK_S = 1.0
TIMES_BETTER = 80  # than the better peer, in a planned change


class ComparedSession(Session):
    """A life with each change once, and without what only `Session` measures."""

    def __init__(self, launcher: Launcher, folder: Path, samples: Samples) -> None:
        if launcher.is_ours:
            launcher = replace(launcher, options=(*launcher.options, f"--hang-timeout={HANG_LIMIT_S:g}"))
        super().__init__(launcher, folder, samples)
        self.job.trained_s = TRAINED_S if launcher.is_ours else UNPREPARED_S

    def run_agents(self, processes: Processes) -> None:
        """Grow, crash, hang where the agent watches for it, shrink."""
        nodes = AgentNodes(self.launcher, processes, self.folder)
        operator = SmallOperator(self.launcher.restart_mode)
        try:
            with self._event("start 2"):
                four = self._begin(nodes, 4)
                agents = [node.client for node in four]
                self._start(operator, agents[:2])
            with self._event(GROW):
                self._planned(operator, GROW, agents)
            self._crash(operator, four)
            if self.launcher.is_ours:
                self._hang(operator, agents)
            self.job.trained_s = UNPREPARED_S
            with self._event(SHRINK):
                self._planned(operator, SHRINK, agents[:2])
        finally:
            operator.close()

    def run_torchrun(self, processes: Processes) -> None:
        """Grow and crash: torchrun knows no planned shrink, and watches for no hang."""
        self._grow_and_crash(processes)

    def _hang(self, operator: SmallOperator, agents: list[Client]) -> None:
        """Stop a worker where it stands. Its peers wait for it in their next collective."""
        with self._event(HANG):
            first_loss = operator.watch(closely=agents[2])
            os.kill(self.job.world[2].pid, signal.SIGSTOP)
            loss = first_loss()
            old = [steplog.read_one(self.folder, worker.name) for worker in self.job.world]
            limit_at = min(worker.steps[-1].at for worker in old) + HANG_LIMIT_S
            self._add(HUNG_SEEN, loss.seen_at - limit_at)
            self.job.new_world(len(agents), operator.recover(agents))
            self._add(HUNG_BACK, steplog.first_step_everywhere(self.job.world) - limit_at)
            self.job.train()


def compared_rows(samples: Samples) -> list[Row]:
    """Draw the rows: the pause in memory held against its limit, beside new processes, and against the better peer."""
    found: list[Row] = []
    for name, limit in REACH_PAUSE.items():
        peer = better_peer(samples, f"pause, {name}")
        ratio = None if name == CRASH else Reach.ratio(TIMES_BETTER)
        what = "SIGKILL of one worker of 4" if name == CRASH else "last step of the old world"
        how = f"{what} to the first step of the new one, less a usual step; a small model"
        found += [
            _row(samples, f"pause, {name}", WARM, Reach.median(limit), how),
            _row(
                samples, f"pause, {name}", peer, ratio, f"{how}; the peer is the better one of {_peers(samples, name)}"
            ),
        ]
    how = (
        f"SIGSTOP of one worker of 4; from {HANG_LIMIT_S:g} s, the limit of the watch for hangs, after the last step to the first one "
        "of the new world. torchrun has no such watch, and the original agent's is of lines that a script prints"
    )
    found.append(_row(samples, HUNG_BACK, WARM, Reach.median(REACH_HUNG_BACK_S), how))
    return found


def better_peer(samples: Samples, metric: str) -> str:
    """Give the peer whose median is smaller; the original agent where neither has a figure."""
    spreads = {side: samples.spread(side, metric) for side in (ORIGINAL, TUNED)}
    measured = {side: spread.median for side, spread in spreads.items() if spread is not None}
    return min(measured, key=measured.__getitem__, default=ORIGINAL)


def _peers(samples: Samples, name: str) -> str:
    """Say how often each peer was measured, and why one was not."""
    told = []
    for side in (ORIGINAL, TUNED):
        failed = samples.failures.get((side, name), [])
        runs = len(samples.values.get((side, f"pause, {name}"), ()))
        why = f", {len(failed)} failed, e.g.: {failed[0][:200]}" if failed else ""
        told.append(f"{PEER_NAMES.get(side, side)} (n={runs}{why})")
    return " and ".join(told)


def _row(samples: Samples, metric: str, peer: str, reach: Reach | None, how: str) -> Row:
    return Row(
        metric=f"{metric}, small model", unit="s", ours=samples.spread(MEMORY, metric), peer=PEER_NAMES.get(peer, peer),
        theirs=samples.spread(peer, metric), reach=reach, how=how, missing=samples.missing(MEMORY, metric),
    )  # fmt: skip
