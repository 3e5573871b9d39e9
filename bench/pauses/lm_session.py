"""A life of examples/lm under four agents: changes of size with new processes or in memory, or crashes of a worker."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common.machine import descendants
from bench.common.processes import Process, Processes, free_port, until
from bench.launchers.client import Client
from bench.launchers.nodes import REPOSITORY, worker_environment
from bench.launchers.small_operator import KEEPS, SmallOperator
from bench.pauses.parts import Pause, read_spans
from bench.pauses.versions import Version

from elastipod_local.demo.run_log import Generation, read_run

SCRIPT = "examples/lm/train.py"
# Of the sides whose workers do not keep their state: they have nothing to prepare, either.
SCRIPTS = {"checkpoints": "examples/lm/train_with_checkpoints.py"}
KINDS = {"process": "new processes", "checkpoints": "new processes without State", "memory": "in memory"}
MODES = {
    "process": "process_level_restart",
    "checkpoints": "process_level_restart",
    "memory": KEEPS,
    "crash": KEEPS,
}
OF_DEMO = ("--steps=560", "--corpus-kib=600", "--checkpoint-every=20", "--min-step-time=0.25")
DRAIN_S = 120
SETTLED_S = 6.0  # agents prepare their next start 5 s after one
STEPS = 20
WITHIN_S = 120.0


class LmSession:
    """One job in a folder of its own; `found` has its changes. memory: the folder in a memory file system, one for each node below it."""

    def __init__(self, folder: Path, memory: Path) -> None:
        self.found: list[Pause] = []
        self._folder, self._memory = folder, memory
        self._nodes: list[Process] = []

    def run(self, processes: Processes, side: str, version: Version) -> None:
        """Raises Failed."""
        operator = SmallOperator(MODES[side])
        try:
            script = SCRIPTS.get(side, SCRIPT)
            agents = [self._begin(processes, number, version, script) for number in range(4)]
            for process, agent in zip(self._nodes, agents, strict=True):
                until(lambda process=process, agent=agent: _is_ready(process, agent), "an agent", WITHIN_S)  # type: ignore[misc]
            operator.start(agents[:2])
            self._train(operator)
            if side == "crash":
                for _ in range(2):
                    self._crash(operator, agents)
            else:
                for size in (4, 2):
                    self._resize(operator, agents[:size], side)
        finally:
            operator.close()

    def _begin(self, processes: Processes, number: int, version: Version, script: str) -> Client:
        port = free_port()
        env = worker_environment(self._folder) | {
            **{
                "NNODES": "1",
                "PYTHONPATH": f"{version.root / 'agent'}:{REPOSITORY}",
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            },
            **{"ELASTIPOD_JOB": "bench/lm", "ELASTIPOD_RUN_ID": "bench-lm", "ELASTIPOD_POD": f"node-{number}"},
            "ELASTIPOD_MEMORY_DIR": str(self._memory / f"node-{number}"),
        }
        traced = ["--preload=bench.pauses.traced"] if version.is_traced else []
        command = [
            *(sys.executable, "-m", "elastipod_agent", "--server-host=127.0.0.1", f"--server-port={port}"),
            *(*traced, str(version.root / script), *OF_DEMO),
            *(f"--checkpoint-dir={self._folder / 'checkpoints'}", f"--sample-log-dir={self._folder / 'samples'}"),
        ]
        self._nodes.append(processes.start(f"node {number}", command, env, self._folder / f"node-{number}.txt"))
        return Client(port)

    def _resize(self, operator: SmallOperator, members: Sequence[Client], side: str) -> None:
        """As the operator does it: newcomers are prepared, and every pod is told whether it leaves."""
        before = operator.members
        if side not in SCRIPTS:
            operator.prepare(members)
        operator.drain(staying=members, timeout_s=DRAIN_S)
        ready = time.monotonic()
        operator.start(members)
        self._train(operator)
        old, new = self._generation(operator.generation - 1), self._generation(operator.generation)
        self._note(f"{KINDS[side]}, {len(before)} -> {len(members)}", _monotonic(old.steps[-1].at), ready, new)

    def _crash(self, operator: SmallOperator, agents: Sequence[Client]) -> None:
        """SIGKILL of one of two workers; it is replaced, the other one keeps its process."""
        first_loss = operator.watch(closely=agents[1])
        time.sleep(0.3)  # every watcher waits at its agent by now
        worker = self._worker_of(1)
        killed_at = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        first_loss()
        members = operator.members
        operator.end(members)
        ready = time.monotonic()
        operator.start(members)
        self._train(operator)
        self._note("crash, 2 -> 2", killed_at, ready, self._generation(operator.generation))

    def _worker_of(self, number: int) -> int:
        """Give the process of a node that has completed a step: it alone notes what it does."""
        living = set(descendants(self._nodes[number].pid))
        noted = {int(path.stem) for path in self._folder.glob("*.spans")}
        (worker,) = living & noted
        return worker

    def _note(self, kind: str, last_step: float, ready: float, new: Generation) -> None:
        assert new.step_s is not None
        first_step = _monotonic(new.steps[0].at)
        spans = [each for each in read_spans(self._folder) if last_step < each.end < first_step + new.step_s]
        self.found.append(Pause(kind, last_step, ready, first_step, new.step_s, spans))

    def _train(self, operator: SmallOperator) -> None:
        """Wait until the present generation has made some steps, and agents have prepared their next start."""
        time.sleep(SETTLED_S)

        def trained() -> bool:
            for process in self._nodes:
                process.require_alive()
            return any(len(each.steps) >= STEPS for each in self._runs() if each.number == operator.generation)

        until(trained, f"{STEPS} steps of generation {operator.generation}", WITHIN_S, every_s=0.2)

    def _generation(self, number: int) -> Generation:
        return next(each for each in self._runs() if each.number == number)

    def _runs(self) -> tuple[Generation, ...]:
        return read_run(self._folder / "samples")


def _is_ready(process: Process, agent: Client) -> bool:
    process.require_alive()
    try:
        return bool(agent.status()["status"] == "ready")
    except OSError:
        return False


def _monotonic(at: float) -> float:
    """Give a moment of the sample log by the clock of the spans."""
    return at - time.time() + time.monotonic()
