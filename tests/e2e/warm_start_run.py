"""Agents with warm workers for tests, and an interpreter without packages whose fork server is there at once."""

from __future__ import annotations

import re
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess, until_gone
from tests.patience import PATIENCE_S


def make_bare_python(folder: Path) -> Path:
    """Make an interpreter that has the standard library only; gives its path."""
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


@dataclass
class WarmStartRun:
    """One agent and its folder, which is also its working directory."""

    agent: AgentProcess
    folder: Path
    is_warm: bool

    def until_warm(self, times: int = 1) -> None:
        """Wait until that many servers have become ready since the agent began."""
        if self.is_warm:
            until(lambda: self.agent.printed().count("fork server is ready") >= times, "the server", PATIENCE_S)

    def server(self) -> psutil.Process:
        """Give the server's process."""
        found: psutil.Process = until(self._server, "the server's process")
        return found

    def _server(self) -> psutil.Process | None:
        children = psutil.Process(self.agent.process.pid).children()
        waiting = [child for child in children if "fork_server/bootstrap.py" in " ".join(_command_line(child))]
        # Processes forked ahead look like the server, which is older.
        return min(waiting, key=lambda child: child.create_time(), default=None)

    def below(self) -> list[psutil.Process]:
        """Give all processes below the agent."""
        return psutil.Process(self.agent.process.pid).children(recursive=True)

    def generation(self, number: int, **fields: Any) -> dict[str, Any]:
        """Run a generation to its end, make the agent ready again, and give the status in which it ended."""
        assert self.agent.start(number, **fields)[0] == 200
        seen: dict[str, Any] = until(partial(self._ended, number), f"the end of generation {number}")
        # The agent prints it after all that its workers have printed, which may take longer than the change of its status.
        said = re.compile(rf"(INFO completed|ERROR fault)\b.* generation={number}\b")
        until(
            lambda: any(map(said.search, self.events("generation="))), f"the line about the end of generation {number}"
        )
        self.agent.stop(number)
        self.agent.until("ready")
        return seen

    def _ended(self, number: int) -> dict[str, Any] | None:
        seen = self.agent.status()
        return seen if seen["status"] in ("completed", "faulted") and seen["generation"] == number else None

    def lines(self) -> list[str]:
        """Give what workers have printed so far, in order; lines of the agent itself are left out."""
        return [line for line in self.agent.printed().splitlines() if line.startswith("[")]

    def events(self, text: str) -> list[str]:
        """Give the agent's own lines that hold a text."""
        return [line for line in self.agent.printed().splitlines() if line.startswith("hyperpodrun") and text in line]

    def starts(self) -> tuple[int, int]:
        """Give how many workers were started warm and cold so far, as /status's details tell."""
        details = self.agent.call("GET", "/status?details=1")[1]["details"]
        return details["warm_starts"], details["cold_starts"]


@contextmanager
def run_warm(
    folder: Path, *arguments: str, python: Path | str = sys.executable, is_warm: bool = True, **env: str
) -> Iterator[WarmStartRun]:
    """Run an agent whose workers use this interpreter; at the end it leaves, and nothing of it is left."""
    agent = AgentProcess(folder, arguments, env={"PYTHON_EXEC": str(python), **env}, is_warm=is_warm)
    try:
        until(agent.answers, "the agent's server")
        agent.until("ready")
        yield WarmStartRun(agent, folder, is_warm)
        known = psutil.Process(agent.process.pid).children(recursive=True)
    finally:
        agent.end()
    until_gone(known)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def without_addresses(text: str, *folders: Path) -> str:
    """Leave out of a text what differs between two runs of the same thing."""
    for folder in folders:
        text = text.replace(str(folder), "FOLDER")
    text = re.sub(r"(elastipod-|tests_agent_)\w{8}", r"\1X", text)
    return re.sub(r"0x[0-9a-f]+|ELASTIPOD_AGENT_PORT=\d+", "", text)
