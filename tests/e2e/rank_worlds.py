"""Worlds of ranks by the dozen: forked from one process that has torch loaded, each with a process group of its own.

Cases that run in them are functions of a module which is started as a program of its own (`Cases`): the process of
pytest has threads, and is no place to fork from.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Body = Callable[[int], Any]


class Cases:
    """A process that runs the cases of a module, one after the other; each works in worlds that it forks from there."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        )

    def run(self, case: str, folder: Path, *arguments: object) -> Any:
        """Run one and give what it returned (JSON). Fails with its traceback. The test's own time limit is the limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([case, str(folder), arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{case}: the process that runs the cases has ended"
        answer = json.loads(line)
        assert "failed" not in answer, f"{case}: {answer['failed']}"
        return answer["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def serve(cases: dict[str, Callable[..., Any]]) -> None:
    """Be the process that `Cases` talks to."""
    import torch
    import torch.distributed.fsdp

    import elastipod.checkpoint.manager

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # the first one loads all of torch.compile: once here, and not in every rank
    assert elastipod.checkpoint.manager
    gc.freeze()  # otherwise every fork copies these objects
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what cases print is not an answer
    for line in sys.stdin:
        case, folder, arguments = json.loads(line)
        try:
            answer = {"value": cases[case](Path(folder), *arguments)}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
        out.flush()


class World:
    """Ranks that run ``body(rank)``; what it returns (JSON) comes back by `results`."""

    def __init__(self, size: int, body: Body, *, environ: Sequence[dict[str, str]] = ()) -> None:
        """environ: by rank, what is added to its environment."""
        self._folder = tempfile.TemporaryDirectory()
        self.pids: list[int] = []
        self._pipes: list[int] = []
        for rank in range(size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _live(rank, size, body, environ[rank] if environ else {}, Path(self._folder.name) / "init", writer)
            os.close(writer)
            self.pids.append(pid)
            self._pipes.append(reader)

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def results(self, *, lost: Sequence[int] = ()) -> list[Any]:
        """Wait for all ranks. Raises AssertionError with the first failure, of ranks other than those that were killed."""
        answers: list[Any] = []
        for rank, (pid, pipe) in enumerate(zip(self.pids, self._pipes, strict=True)):
            with os.fdopen(pipe) as reader:
                text = reader.read()
            os.waitpid(pid, 0)
            answer = json.loads(text) if text else {"failed": "it ended without a word"}
            assert "failed" not in answer or rank in lost, f"rank {rank}: {answer['failed']}"
            answers.append(answer.get("value"))
        self._folder.cleanup()
        return answers


def run_world(size: int, body: Body, *, environ: Sequence[dict[str, str]] = ()) -> list[Any]:
    """Run ``body(rank)`` on so many ranks and give what each returned."""
    return World(size, body, environ=environ).results()


def _live(rank: int, size: int, body: Body, environ: dict[str, str], meeting: Path, writer: int) -> None:
    import torch.distributed as dist

    dies_with_its_parent()
    os.environ.update(environ)
    answer: dict[str, Any]
    try:
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        answer = {"value": body(rank)}
        if size > 1:
            dist.destroy_process_group()
    except BaseException:
        answer = {"failed": traceback.format_exc()}
        traceback.print_exc()  # also where nobody comes to read the answer
    with os.fdopen(writer, "w") as out:
        json.dump(answer, out)
    sys.stderr.flush()
    os._exit(0)


def dies_with_its_parent() -> None:
    """Have the kernel end this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
