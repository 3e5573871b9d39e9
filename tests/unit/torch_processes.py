"""Python processes that have torch loaded: forks of one that loads it once, which takes seconds.

Each runs a script as `python -c` does and ends as Python ends: with its traceback, its exit handlers and its exit code.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from tests.patience import PATIENCE_S

# A script that has been told runs at the end of this one, in a fork, with its names.
_LOADER = """
import gc, json, os, socket, sys
import torch
torch.optim.SGD([torch.zeros(1)])  # the first optimizer loads all of torch.compile
import elastipod.checkpoint.export, elastipod.in_memory.process_groups

def _next_script():
    with socket.socket(fileno=int(sys.argv[1])) as link:
        while told := socket.recv_fds(link, 1 << 20, 2):
            text, descriptors = told[0], told[1]
            if not text:
                os._exit(0)
            asked = json.loads(text)
            if "await" in asked:
                link.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(asked["await"], 0)[1])).encode())
                continue
            if pid := os.fork():
                for each in descriptors:
                    os.close(each)
                link.send(json.dumps(pid).encode())
                continue
            for each, standard in zip(descriptors, (1, 2), strict=True):
                os.dup2(each, standard)
                os.close(each)
            os.environ.clear()
            os.environ.update(asked["environ"])
            os.chdir(asked["folder"])
            sys.argv = ["-c", *asked["arguments"]]
            return asked["script"]

exec(compile(_next_script(), "<string>", "exec"))
"""


@dataclass
class TorchProcess:
    """A process that runs a script. code: its exit code, once it was waited for."""

    pid: int
    stdout: IO[str]
    stderr: IO[str]
    _link: socket.socket
    code: int | None = None
    _is_awaited: bool = False

    def wait(self) -> int:
        """Wait for its end; gives the exit code. Raises TimeoutError."""
        if not self._is_awaited:
            self._is_awaited = True
            self._link.send(json.dumps({"await": self.pid}).encode())
        if self.code is None:
            self.code = int(json.loads(self._link.recv(100)))
        return self.code

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


class TorchProcesses:
    """Starts such processes, from one test at a time."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(PATIENCE_S)
        with theirs:
            command = [sys.executable, "-W", "ignore", "-c", _LOADER, str(theirs.fileno())]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._loaded = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ)

    @contextmanager
    def start(
        self, script: str, *arguments: str, environ: Mapping[str, str] | None = None, folder: str = "."
    ) -> Iterator[TorchProcess]:
        """Run a script; what still runs in the end is killed. environ: in place of this process's."""
        out, err = os.pipe(), os.pipe()
        asked: dict[str, Any] = {
            "script": script, "arguments": arguments, "environ": dict(os.environ if environ is None else environ),
            "folder": os.path.abspath(folder),
        }  # fmt: skip
        socket.send_fds(self._link, [json.dumps(asked).encode()], [out[1], err[1]])
        os.close(out[1])
        os.close(err[1])
        with open(out[0], encoding="utf-8") as stdout, open(err[0], encoding="utf-8") as stderr:
            process = TorchProcess(json.loads(self._link.recv(100)), stdout, stderr, self._link)
            try:
                yield process
            finally:
                process.kill()

    def run(self, script: str, *arguments: str, folder: str = ".") -> subprocess.CompletedProcess[str]:
        """Run a script to its end, which says little on stderr before it has said all on stdout."""
        with self.start(script, *arguments, folder=folder) as process:
            said, complained = process.stdout.read(), process.stderr.read()
            return subprocess.CompletedProcess([script, *arguments], process.wait(), said, complained)

    def close(self) -> None:
        """End the process that has loaded torch."""
        self._link.close()
        self._loaded.wait()
