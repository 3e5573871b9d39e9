"""Quick starts of Python workers for tests: one process loads torch once, every worker is a fork of it.

`TorchForkServer` is the test's side. Run as a script, this file is the process: it reads one order a line from stdin, forks a
worker that runs a script as `python script ...` would, and writes {"order", "pid"} and later {"pid", "code"} to stdout. It
ends, with its workers, when stdin does. Workers exit as those of an agent do, without unloading torch: that took 25 times
the processor time of the fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from elastipod_agent.fork_server import fast_exit, program

if __name__ != "__main__":  # the script's side has no limits of its own, and cannot import this where it runs
    from tests.patience import PATIENCE_S


class ForkedTestWorker:
    """One worker process, with the methods of Popen that the tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        assert self.ended.wait(timeout), f"worker {self.pid} still runs after {timeout:g} s"
        assert self.returncode is not None
        return self.returncode


class TorchForkServer:
    """The process that workers are forked from; ended by `close`."""

    def __init__(
        self, environment: dict[str, str], python: str = sys.executable, preload: Sequence[str] = ("sklearn.datasets",)
    ) -> None:
        """python: interpreter of the workers. preload: modules that their scripts need beside torch and the library."""
        self._process = subprocess.Popen(
            [python, __file__, *preload], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._workers: dict[int, ForkedTestWorker] = {}
        self._num_orders = 0
        self._born: dict[int, ForkedTestWorker] = {}  # by order
        self._changed = threading.Condition()
        self._ordering = threading.Lock()  # several jobs may be played at a time
        self._reader = threading.Thread(target=self._read, name="fork-server-reader")
        self._reader.start()

    def start(self, command: Sequence[str], environment: dict[str, str], output: Path) -> ForkedTestWorker:
        """Run a script with its arguments and exactly this environment; stdout and stderr go to a file."""
        assert self._process.stdin is not None
        with self._ordering:
            self._num_orders += 1
            number = self._num_orders
            order = {"number": number, "command": list(command), "environment": environment, "output": str(output)}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._born, PATIENCE_S), (
                "the fork server did not fork in time"
            )
            return self._born.pop(number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with self._changed:
                if "code" in event:
                    worker = self._workers[event["pid"]]
                    worker.returncode = event["code"]
                    worker.ended.set()
                else:
                    worker = self._workers[event["pid"]] = ForkedTestWorker(event["pid"])
                    self._born[event["order"]] = worker
                self._changed.notify_all()


def main() -> None:
    """Serve orders until stdin ends; in a forked worker, return when its script has ended."""
    _preload()
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0.01)
        if readable:
            line = _line()
            if not line:
                break
            order: dict[str, Any] = json.loads(line)
            child = os.fork()
            if child == 0:
                _become_worker(order)
            children.add(child)
            _say({"order": order["number"], "pid": child})
        _reap(children)
    for child in children:
        os.kill(child, signal.SIGKILL)
    while children:
        _reap(children)
        time.sleep(0.01)
    sys.stdout.flush()
    os._exit(0)  # unloading all that was loaded would take a second and serve nobody


def _preload() -> None:
    """Load what a first step needs, without starting a thread: forking needs a process that has but one."""
    import torch
    import torch.distributed.fsdp
    import torch.nn.parallel

    import elastipod.checkpoint.manager
    import elastipod.in_memory.elastic_state

    for name in sys.argv[1:]:
        importlib.import_module(name)
    torch.optim.AdamW([torch.zeros(1)])
    assert elastipod.checkpoint.manager
    assert elastipod.in_memory.elastic_state
    fast_exit.install_exit_sentinel()
    gc.freeze()  # otherwise every fork copies, and at its end walks, all of these objects
    assert threading.active_count() == 1


def _become_worker(order: dict[str, Any]) -> NoReturn:
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(order["environment"])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as an agent starts its workers
    script, *arguments = order["command"]
    del sys.path[0]
    fast_exit.flush_files_at_exit()
    fast_exit.exit_process(program.run(program.FILE, script, arguments, [sys.executable, *order["command"]]))


def _line() -> str:
    """Read one line byte by byte, so that select never waits for what a buffer already holds."""
    data = bytearray()
    while byte := os.read(sys.stdin.fileno(), 1):
        if byte == b"\n":
            break
        data += byte
    return data.decode()


def _reap(children: set[int]) -> None:
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.remove(child)
            _say({"pid": child, "code": os.waitstatus_to_exitcode(status)})


def _say(event: dict[str, int]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
