"""The worlds of a job whose workers run in pods: each container writes its step logs into a folder of its own, on shared storage."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from bench.common.processes import Failed, until
from bench.launchers import steplog
from bench.launchers.session import TRAINED_S
from bench.launchers.steplog import Worker

WORLD_WITHIN_S = 150.0


class Worlds:
    """What the training processes of a job wrote. logs: on this machine; it has a folder for each container.

    Times are of the machine's monotonic clock, which all containers share. Waits raise Failed.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.present: list[Worker] = []
        self._past: set[str] = set()

    def read(self) -> list[Worker]:
        """Give all processes and worlds so far; names begin with the container's folder."""
        found: list[Worker] = []
        for folder in sorted(self._logs.iterdir()) if self._logs.exists() else ():
            for worker in steplog.read(folder):
                worker.name = f"{folder.name}/{worker.name}"
                found.append(worker)
        return found

    def wait_for(self, size: int, since: float) -> list[Worker]:
        """Wait for the world of this size that began after a moment, until its slowest rank has made a step."""
        self._past |= {worker.name for worker in self.present}

        def found() -> list[Worker] | None:
            return steplog.complete_world([one for one in self.read() if one.name not in self._past], size, since)

        self.present = until(found, f"a first step of {size} ranks", WORLD_WITHIN_S, every_s=0.1, seen=self._seen)
        return self.present

    def kill(self, rank: int) -> float:
        """Kill a process of the present world as the kernel's OOM killer would, and give the moment."""
        pid = host_pid(self.present[rank])
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at

    def train(self) -> None:
        """Let the present world make steps for a while."""
        time.sleep(TRAINED_S)
        until(self._has_trained, f"{TRAINED_S:g} s of steps", WORLD_WITHIN_S, every_s=0.1, seen=self._seen)

    def again(self, world: list[Worker]) -> list[Worker]:
        """Read a world again, with all its steps."""
        read = {worker.name: worker for worker in self.read()}
        return [read[worker.name] for worker in world]

    def _has_trained(self) -> bool:
        self.present = self.again(self.present)
        return all(worker.steps[-1].at - worker.steps[0].at >= TRAINED_S for worker in self.present)

    def _seen(self) -> str:
        newer = [(w.rank, w.world_size, len(w.steps)) for w in self.read() if w.name not in self._past]
        return f"(rank, world size, steps) of newer processes: {newer}"


def host_pid(worker: Worker) -> int:
    """Give the number that a process in a container has on this machine. Raises Failed when it is gone.

    It is found by the folder of its logs, which it inherited in its environment, and by its number in the container.
    """
    container, _, name = worker.name.partition("/")
    own = name.partition("-")[0]
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # it has ended
        (numbers,) = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
        if numbers[-1] == own and f"/logs/{container}\0".encode() in environment + b"\0":
            return pid
    raise Failed(f"process {own} of container {container} is gone")
