"""The agents of a storm, seen from outside, and callers that ask them for their status."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import psutil
from tests.e2e.agent_process import AgentProcess
from tests.patience import PATIENCE_S

from elastipod.ipc.protocol import SOCKET_ENV
from elastipod_agent import endpoint_file
from elastipod_agent.core.states import NEXT, AgentState
from elastipod_agent.ipc.link import SOCKET_NAME

KINDS = ("worker", "child", "server", "ahead", "matcher")
PRIVATE = Path(endpoint_file.fast_directory() or tempfile.gettempdir())


@dataclass
class Tally:
    """What a storm did. states: how often the agents stood where when the driver came to stop them."""

    acts: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    generations: int = 0
    slowest_ready_s: float = 0.0
    warm_starts: int = 0
    cold_starts: int = 0
    calls: int = 0
    slowest_call_s: float = 0.0


class Caller(threading.Thread):
    """Asks one agent for its status without a pause; checks that every change is one that its table of states names."""

    def __init__(self, agent: AgentProcess, pause_s: float) -> None:
        super().__init__(name="caller", daemon=True)
        self.problem = ""
        self.calls = 0
        self.slowest_s = 0.0
        self._agent = agent
        self._pause_s = pause_s
        self._is_over = threading.Event()
        self._last: tuple[int, AgentState] | None = None

    def run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._agent.port, timeout=PATIENCE_S)
        try:
            while not self._is_over.wait(self._pause_s):
                began = time.monotonic()
                connection.request("GET", "/status")
                seen = json.loads(connection.getresponse().read())
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                self.calls += 1
                self._check(int(seen["version"]), AgentState(seen["status"]))
        except Exception as error:  # told in the main thread
            self.problem = self.problem or f"asking for the status failed: {error!r}"
        finally:
            connection.close()

    def end(self) -> None:
        """Ask no more."""
        self._is_over.set()
        self.join(PATIENCE_S)

    def _check(self, version: int, state: AgentState) -> None:
        if self._last is not None:
            before, old = self._last
            if version < before:
                self.problem = f"version {version} came after {before}"
            elif state not in reachable(old, version - before):
                self.problem = f"{old} (version {before}) was followed by {state} (version {version})"
        self._last = (version, state)


def reachable(state: AgentState, moves: int) -> set[AgentState]:
    """Give the states that so many moves of the table can lead to; one change of the version may be two moves."""
    found = {state}
    for _ in range(min(2 * moves, len(NEXT))):
        found |= {after for one in found for after in NEXT[one]}
    return found


class Pod:
    """One agent, seen from outside."""

    def __init__(self, agent: AgentProcess) -> None:
        self.agent = agent
        self.process = psutil.Process(agent.process.pid)
        self.folder = next(path.parent for path in PRIVATE.glob("elastipod-*/agent.json") if self._is_mine(path))
        self.server_hits = 0
        self.warm_starts = 0

    def _is_mine(self, path: Path) -> bool:
        with suppress(OSError, ValueError):  # another agent comes or goes
            return bool(json.loads(path.read_text("utf-8"))["pid"] == self.process.pid)
        return False

    def below(self) -> dict[str, list[psutil.Process]]:
        """Give all living processes below the agent by kind; what is none of KINDS is "unknown"."""
        found: dict[str, list[psutil.Process]] = {kind: [] for kind in (*KINDS, "unknown")}
        waiting: list[psutil.Process] = []
        for process in self.process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                line, parent = " ".join(process.cmdline()), process.ppid()
                if "fork_server/bootstrap.py" in line:
                    waiting.append(process)
                elif "matcher_process" in line:
                    found["matcher"].append(process)
                elif "elastipod_agent" in line and parent == self.process.pid:
                    pass  # between fork and exec: it shows the agent's own command line
                elif "storm_train.py" in line:
                    found["worker"].append(process)
                elif "time.sleep(600)" in line:
                    found["child"].append(process)
                elif line:
                    found["unknown"].append(process)
        waiting.sort(key=_created)
        found["server"], found["ahead"] = waiting[:1], waiting[1:]
        return found

    def ahead(self) -> list[psutil.Process]:
        """Give the processes that the agent has adopted ahead of its next start; not those that are still being forked."""
        adopted = {child.pid for child in self.process.children()}
        return [one for one in self.below()["ahead"] if one.pid in adopted]

    def dead(self) -> list[psutil.Process]:
        """Give the zombies below the agent."""
        return [one for one in self.process.children(recursive=True) if _is_zombie(one)]

    def socket_path(self) -> str | None:
        """Give the agent's Unix socket, as its children know it."""
        for kind in ("worker", "matcher", "server"):
            for process in self.below()[kind]:
                with suppress(psutil.Error):
                    return process.environ().get(SOCKET_ENV)
        return None

    def files(self) -> set[str]:
        """Give the agent's private folder and all that is in it."""
        return {str(path) for path in [self.folder, *self.folder.rglob("*")] if path.exists()}

    def starts(self) -> tuple[int, int]:
        """Give how many workers were started warm and cold."""
        details = self.agent.call("GET", "/status?details=1")[1]["details"]
        return details["warm_starts"], details["cold_starts"]

    def uss(self) -> int:
        """Give the agent's own memory in bytes; little is its own while a fork of it exists, so it is asked three times."""
        found: list[int] = []
        for _ in range(3):
            found.append(int(self.process.memory_full_info().uss))
            time.sleep(0.05)
        return max(found)

    def descriptors(self) -> list[str]:
        """Give what the agent has open, without numbers; but for one socket of each process ahead and two of each worker."""
        own = -1
        while own != (now := self._own_sockets()):  # none came or went while they were listed
            own, found = now, list[str]()
            for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    found.append(re.sub(r"\d+", "", str(entry.readlink())))
        for _ in range(own):
            found.remove("socket:[]")
        return sorted(found)

    def _own_sockets(self) -> int:
        below = self.below()
        calls = sum(str(one.laddr).endswith(SOCKET_NAME) for one in self.process.net_connections("unix")) - 1
        return len(below["ahead"]) + min(calls, 2 * len(below["worker"]))


def bad_lines(pod: Pod) -> list[str]:
    """Give the lines of the agent's own that no storm excuses; workers' lines have their prefix."""
    words = ("Traceback", "the agent itself failed", "was never retrieved", "Task exception", "never awaited")
    lines = pod.agent.printed().splitlines()
    return [line for line in lines if not line.startswith("[") and any(word in line for word in words)]


def _go_on(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


def _created(process: psutil.Process) -> float:
    try:
        return process.create_time()
    except psutil.NoSuchProcess:
        return float("inf")


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
