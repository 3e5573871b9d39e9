"""hyperpodrun as a real process on the loopback interface, for tests that play the operator."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
from tests.agent_client import AgentClient, until
from tests.free_ports import free_port
from tests.patience import PATIENCE_S

import elastipod_agent
from elastipod_agent.authentication import read_credentials

PACKAGES = Path(elastipod_agent.__file__).parents[1]


def is_gone(process: psutil.Process) -> bool:
    """Tell whether a process has ended; whoever has become its parent may not have collected it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_gone(processes: Iterable[psutil.Process]) -> None:
    """Wait until all of them have ended; who was killed a moment ago may still be on its way."""
    known = list(processes)
    until(lambda: all(map(is_gone, known)), f"the end of {known}")


def suspend(process: psutil.Process) -> None:
    """Stop a process with SIGSTOP, and wait until the kernel says so: only then can others see it."""
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED, f"the stop of {process}")


class AgentProcess(AgentClient):
    """One agent; `log` collects all it prints. Made by the `agents` fixture, which also ends it."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        is_warm: bool = False,
    ) -> None:
        port = free_port()
        super().__init__(port, folder / f"agent-{port}.log", read_credentials(env or {}))
        cold = () if is_warm else ("--no-warm-workers",)
        command = [*wrapper, sys.executable, "-m", "elastipod_agent", "--server-host=127.0.0.1", *cold, *arguments]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(PACKAGES),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "ELASTIPOD_JOB": "tests/agent",
            "ELASTIPOD_AGENT_PORT": str(self.port),
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env={**environment, **(env or {})}, stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )

    def answers(self) -> bool:
        """Tell whether the control server can be reached; fails when the process has ended."""
        assert self.process.poll() is None, f"the agent ended with {self.process.returncode}:\n{self.printed()}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> int:
        """Make it leave, if it has not; gives its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.call("POST", "/shutdown")
            except OSError:
                self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
