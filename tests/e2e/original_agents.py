"""This agent and the original one as processes that take the same requests, with a training script that obeys a file.

Both run outside any pod, on the loopback interface; no training script here needs torch.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.agent_process import PACKAGES
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.peers import peer_python

SETTLED_S = 0.5  # a state that did not change for this long is taken to stay
STOPPING_SETTLED_S = 3.0  # a hard stop takes a moment, and so does a signal to a worker
ENDING = ("completes", "crashes")
POLL_S = 0.06  # each poll costs both sides some milliseconds, and many agents run at once
MASTER_PORT = 29_411  # nothing listens there; workers only see the number

# What a worker does stands in the file `mode` at its start; what it saw it adds to the file `runs`.
WORKER = """
import json, os, signal, sys, time
mode = open("mode").read()
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "NNODES")
def note(**what):
    with open("runs", "a") as runs:
        runs.write(json.dumps(what) + chr(10))
def drained(number, frame):
    note(event="SIGUSR1", pid=os.getpid())
    if mode == "drains":
        os._exit(0)
if mode in ("drains", "ignores"):
    signal.signal(signal.SIGUSR1, drained)
note(pid=os.getpid(), env={name: os.environ.get(name) for name in names})
if mode == "completes":
    sys.exit(0)
if mode == "crashes":
    sys.exit(3)
while True:
    time.sleep(0.5)
"""

# The original writes below /opt/ml, whoever runs it, and leaves files in /tmp: it gets an /opt of its own, this machine's
# with a layer above, and a /tmp that is empty but for its folder.
PRIVATE_FOLDERS = """
set -e
mkdir -p "$1"; mount -t tmpfs none "$1"; mkdir "$1/upper" "$1/work"
mount -t overlay none -o "lowerdir=/opt,upperdir=$1/upper,workdir=$1/work" /opt
here=$PWD; mkdir /opt/here; mount --bind "$here" /opt/here
mount -t tmpfs none /tmp; mkdir -p "$here"; mount --bind /opt/here "$here"; cd "$here"
shift; exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. body: parsed JSON, text that is none, or None when empty. code 0: the connection ended without one."""

    code: int
    body: Any = None


class ControlledAgent:
    """One agent of either make. Ended by `end`; `log` collects what it prints."""

    def __init__(self, make: str, folder: Path, *arguments: str) -> None:
        self.make = make
        self.port = free_port()
        self.folder = folder
        self.log = folder / "agent.log"
        folder.mkdir(parents=True)
        (folder / "worker.py").write_text(WORKER)
        self.set_mode("sleeps")
        (folder / "runs").touch()
        where = ["--server-host=127.0.0.1", f"--server-port={self.port}", *arguments, "worker.py"]
        environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "NNODES": "1"}
        if make == "original":
            program = str(peer_python("original").with_name("hyperpodrun"))
            command = ["unshare", "--mount", "sh", "-c", PRIVATE_FOLDERS, "sh", str(folder / "opt"), program]
        else:
            command = [sys.executable, "-m", "elastipod_agent", "--no-warm-workers"]
            environ |= {"PYTHONPATH": str(PACKAGES), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *where], env=environ, stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )

    def wait_until_up(self) -> None:
        """Wait until it answers READY."""
        deadline = time.monotonic() + 4 * PATIENCE_S  # it imports torch, and others do at the same time
        while self.state() != "ready":
            assert self.process.poll() is None, f"{self} ended with {self.process.returncode}: {self.printed()}"
            assert time.monotonic() < deadline, f"{self} does not become ready: {self.printed()}"
            time.sleep(0.1)

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Make one request. body: sent as JSON, nothing when None; raw: sent as it is."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if headers is None and data is not None else dict(headers or {})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            return Reply(0)
        finally:
            connection.close()
        try:
            return Reply(response.status, json.loads(text) if text else None)
        except ValueError:
            return Reply(response.status, text.decode("utf-8", "replace"))

    def status(self) -> dict[str, Any]:
        """GET /status; empty while nobody answers."""
        reply = self.call("GET", "/status")
        return reply.body if isinstance(reply.body, dict) else {}

    def state(self) -> str:
        """The state as /status says it; "gone" when nobody answers."""
        return str(self.status().get("status", "gone"))

    def until_state(self, *states: str) -> None:
        """Wait for one of these states."""
        deadline = time.monotonic() + PATIENCE_S
        while (state := self.state()) not in states:
            assert time.monotonic() < deadline, f"the {self.make} agent is {state} and not {states}: {self.printed()}"
            time.sleep(POLL_S)

    def settled(self, *, needs_worker: bool = False, may_be_ready_at_once: bool = False) -> str:
        """Give the state once it stays.

        RUNNING does where workers have no end, STOPPING where they ignore SIGUSR1. needs_worker: RUNNING counts only once
        a worker runs. may_be_ready_at_once: a READY without workers stays.
        """
        deadline = time.monotonic() + PATIENCE_S
        last, since = "", time.monotonic()
        while time.monotonic() < deadline:
            state, now = self.state(), time.monotonic()
            is_starting = state == "running" and needs_worker and not self.living_pids()
            is_passing = (state == "running" and self.mode in ENDING) or (
                state == "stopping" and self.mode != "ignores"
            )
            if state != last or is_starting or is_passing:
                last, since = state, now
            if state == "ready" and may_be_ready_at_once and not self.living_pids():
                return state
            if now - since >= (STOPPING_SETTLED_S if state == "stopping" else SETTLED_S):
                return state
            time.sleep(POLL_S)
        raise AssertionError(f"the {self.make} agent did not settle: {self.status()}\n{self.printed()}")

    def set_mode(self, mode: str) -> None:
        """Say what workers that start from now on do: sleeps, completes, crashes, drains or ignores (SIGUSR1)."""
        self.mode = mode
        (self.folder / "mode").write_text(mode)

    def runs(self) -> list[dict[str, Any]]:
        """Give what workers noted: one entry with `env` for each start, one with `event` for each SIGUSR1."""
        written, _, _ = (self.folder / "runs").read_text().rpartition("\n")  # the last line may be half there
        return [json.loads(line) for line in written.splitlines()]

    def living_pids(self) -> list[int]:
        """Give the workers ever started that still run."""
        return [run["pid"] for run in self.runs() if "env" in run and is_alive(run["pid"])]

    def printed(self) -> str:
        """Give all that the agent has printed."""
        return self.log.read_text("utf-8", "replace")[-4000:]

    def exit_code(self, within_s: float) -> int | None:
        """Wait for its end and give its exit code, None when it goes on."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Make it leave, and what it left."""
        if self.process.poll() is None:
            self.call("POST", "/shutdown")
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.living_pids():
            with suppress(ProcessLookupError):  # it dies with its agent
                os.kill(pid, signal.SIGKILL)

    def __str__(self) -> str:
        return f"{self.make} agent in {shlex.quote(str(self.folder))}"


def is_alive(pid: int) -> bool:
    """Tell whether a worker process runs; one that waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z" and b"worker.py" in command
