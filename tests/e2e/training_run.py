"""A training run of real processes without Kubernetes: starts, drains, kills and resizes the workers of one job.

Every worker is a pod of its own here: it has its own worker file, as its agent would make it, so that an event that is
raised for one worker must reach the others through the library alone.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.e2e.torch_fork_server import ForkedTestWorker, TorchForkServer
from tests.free_ports import free_port
from tests.nonempty import every
from tests.patience import PATIENCE_S

from elastipod.worker_file import EventLevel, WorkerFile

REPOSITORY = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.01)


def worker_environment() -> dict[str, str]:
    """Give what every worker is started with, whatever its rank."""
    return {
        **os.environ,
        **{"PYTHONPATH": str(REPOSITORY / "agent"), "OMP_NUM_THREADS": "1"},
        "PYTHONFAULTHANDLER": "1",  # SIGABRT has it print where its threads are
    }


class TrainingRun:
    """One job: a script with its arguments, generation after generation in one folder.

    environment: of its workers, beside what a launcher sets. has_sample_log: the script writes one, where it is told to.
    """

    def __init__(
        self,
        fork_server: TorchForkServer,
        folder: Path,
        script: Path,
        arguments: list[str],
        environment: dict[str, str] | None = None,
        *,
        has_sample_log: bool = True,
    ) -> None:
        self._fork_server = fork_server
        self.folder = folder
        self.checkpoints, self.logs = folder / "checkpoints", folder / "samples"
        self._command = [
            *(str(script), *arguments),
            *("--checkpoint-dir", str(self.checkpoints)),
            *(("--sample-log-dir", str(self.logs)) if has_sample_log else ()),
        ]
        self._environment = environment or {}
        self.generation = 0
        self.workers: list[ForkedTestWorker] = []
        self.files: list[WorkerFile] = []
        folder.mkdir(parents=True)

    def start(self, world_size: int, *more: str) -> None:
        """Start the next generation at a size. more: arguments for this generation alone, which come last."""
        self.close()
        self.generation += 1
        port = free_port()
        for rank in range(world_size):
            path = self.folder / f"worker-file-{self.generation}-{rank}"
            self.files.append(WorkerFile.create(path, 1))
            environment = {
                **worker_environment(),
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)},
                **{"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"},
                **{"ELASTIPOD_GENERATION": str(self.generation), "ELASTIPOD_WORKER_FILE": str(path)},
                "ELASTIPOD_AGREEMENT_TIMEOUT_S": f"{PATIENCE_S:g}",
                **self._environment,
            }
            self.workers.append(
                self._fork_server.start([*self._command, *more], environment, self._output(rank, self.generation))
            )

    def reach(self, step: int) -> None:
        """Wait until rank 0 has completed a step."""
        self._wait_until(lambda: self.alive() and self.step() >= step, f"step {step} of generation {self.generation}")

    def step(self) -> int:
        progress = self.files[0].progress(0)
        return progress.step if progress else 0

    def drain(self, rank: int) -> int:
        """Raise the event for one worker only, wait until all have left, and give the step after which they did."""
        self.files[rank].set_event(EventLevel.DRAIN)
        self.workers[rank].send_signal(signal.SIGUSR1)
        self.finish()
        assert every(file.acknowledged(0) for file in self.files), "every worker acknowledges the event"
        return self.step()

    def finish(self) -> None:
        """Wait until all workers have exited with 0."""
        self._wait_until(lambda: self.alive(may_have_ended=True) and not self.running(), "all workers exit")

    def kill(self, rank: int) -> None:
        """Kill one worker with SIGKILL, then, as an agent does, all others."""
        self.workers[rank].kill()
        self.workers[rank].wait(PATIENCE_S)
        self._end()

    def check_refused(self, world_size: int, *words: str) -> None:
        """Start a world of this size, and check that it ends with these words.

        Each rank says them, but for those that are still connecting to one that has said them and ended; at least one says them.
        """
        self.start(world_size)
        self._wait_until(lambda: not self.running(), "all workers end")
        said = [self.output(rank) for rank in range(world_size)]
        without = [text for text in said if not all(each in text for each in words)]
        assert len(without) < world_size, said[0]
        assert [text for text in without if "connectFullMesh failed" not in text] == []

    def running(self) -> bool:
        return any(worker.poll() is None for worker in self.workers)

    def alive(self, may_have_ended: bool = False) -> bool:
        """True; fails the test, with what the worker said, when one has ended (badly)."""
        for rank, worker in enumerate(self.workers):
            code = worker.poll()
            if code is not None and not (may_have_ended and code == 0):
                raise AssertionError(f"rank {rank} exited with {code}:\n{self.output(rank)[-4000:]}")
        return True

    def output(self, rank: int, generation: int = 0) -> str:
        """Give what a worker has printed so far; the file is there once its process is. generation: by default the newest."""
        path = self._output(rank, generation or self.generation)
        return path.read_text(errors="replace") if path.exists() else ""

    def lines(self, kind: str) -> Iterator[dict[str, object]]:
        """Give the records of one kind from all sample logs, generation by generation, rank by rank."""
        for path in sorted(self.logs.iterdir()):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                if record["kind"] == kind:
                    yield {"file": path.name, **record}

    def losses(self) -> dict[int, float]:
        """Give the loss after each step, of the last generation that made it."""
        lines = [
            line for kind in ("step", "done") for line in self.lines(kind)
        ]  # `State` knows the loss when a step is done
        return {int(str(line["step"])): float(str(line["loss"])) for line in lines if line["loss"] is not None}

    def close(self) -> None:
        """Leave no process and no mapping behind."""
        self._end()
        for file in self.files:
            file.close()
        self.workers, self.files = [], []

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait as long as steps are made; when nothing happens any more, tell what the workers said and where they stand."""
        step, deadline = -1, 0.0
        while not condition():
            if self.step() != step:
                step, deadline = self.step(), time.monotonic() + PATIENCE_S
            assert time.monotonic() < deadline, f"at step {step} in vain for {PATIENCE_S:g} s: {what}\n{self._story()}"
            time.sleep(0.01)

    def _story(self) -> str:
        for worker in self.workers:
            worker.send_signal(signal.SIGABRT)
        for worker in self.workers:
            worker.wait(PATIENCE_S)
        return "\n".join(f"rank {rank}:\n{self.output(rank)[-4000:]}" for rank in range(len(self.workers)))

    def _end(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait(PATIENCE_S)

    def _output(self, rank: int, generation: int) -> Path:
        return self.folder / f"output-{generation}-{rank}.txt"
