"""Runs the agent's own `main` in the process of a test, with real workers; the test plays the operator from a thread.

As fast as a few small processes, and what the agent does is seen by whatever watches the test's process: a debugger, coverage.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from unittest import mock

from tests.agent_client import AgentClient, until
from tests.free_ports import free_port

import elastipod_agent
from elastipod_agent.authentication import Credentials
from elastipod_agent.main import main

PACKAGES = Path(elastipod_agent.__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
HANDLED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class AgentInProcess(AgentClient):
    """The agent of this test. exit_code: of `main`, once it has returned."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        super().__init__(port, folder / f"agent-{port}.log", Credentials())
        self.folder = folder
        self.termination_log = folder / "termination-log"
        self.exit_code: int | None = None
        self._has_ended = False

    @property
    def termination_message(self) -> str:
        """What Kubernetes would show as the reason for which the container ended."""
        return self.termination_log.read_text()

    def run(
        self,
        script: str,
        scenario: Callable[[], None],
        *options: str,
        script_args: Sequence[str] = (),
        is_warm: bool = False,
    ) -> int:
        """Run the agent with a script for its workers (--module: a module), and the scenario against it; gives the exit code."""
        path = self.folder / "train.py"
        path.write_text(script)
        target = script if "--module" in options else str(path)
        cold = () if is_warm else ("--no-warm-workers",)
        arguments = ["--server-host=127.0.0.1", *cold, *options, target, *script_args]
        with self._own_output(), own_signals(), ThreadPoolExecutor(1) as threads:
            played = threads.submit(self._play, scenario)
            try:
                self.exit_code = main(arguments)
            finally:
                self._has_ended = True
        played.result()
        return self.exit_code

    def run_alone(self, *arguments: str) -> int:
        """Run the agent with nobody who calls it, for one that ends at once; gives the exit code."""
        with self._own_output(), own_signals():
            return main(arguments)

    def _play(self, scenario: Callable[[], None]) -> None:
        def has_begun() -> bool:
            assert not self._has_ended, f"the agent ended at once:\n{self.printed()}"
            with suppress(OSError):
                return bool(self.status()["status"] != "init")
            return False

        try:
            until(has_begun, "the agent")
            scenario()
        finally:
            with suppress(OSError):
                self.call("POST", "/shutdown")

    @contextmanager
    def _own_output(self) -> Iterator[None]:
        """Let what this process prints into `log`."""
        kept = os.dup(1), os.dup(2)
        with open(self.log, "ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            with open(2, "w", closefd=False) as stderr, redirect_stderr(stderr):
                yield
        finally:
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)


@contextmanager
def own_signals() -> Iterator[None]:
    """Put back how this process handles signals, and whose orphans it adopts."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def collect_garbage() -> None:
    """Collect what the agent left to the end of its process: objects of processes whose exit its reaper did not wait for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@contextmanager
def pod(folder: Path, env: Mapping[str, str] = {}) -> Iterator[AgentInProcess]:  # not changed
    """Give an agent whose environment is that of a pod; its counters begin at zero."""
    agent = AgentInProcess(folder)
    agent.termination_log.touch()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": str(PACKAGES),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "ELASTIPOD_JOB": "tests/agent",
        "ELASTIPOD_AGENT_PORT": str(agent.port),
        "ELASTIPOD_TERMINATION_LOG": str(agent.termination_log),
    }
    with mock.patch.dict(os.environ, {**environment, **env}):
        yield agent
    collect_garbage()
