"""Forks workers as children of the agent, and turns a fork into a process like one that was just started."""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastipod_agent.fork_server import channel
from elastipod_agent.fork_server.process_title import ProcessTitle
from elastipod_agent.workers.linux import die_with_parent

OURS = "elastipod_agent"


@dataclass(frozen=True, slots=True)
class InheritedState:
    """What a worker inherits from the server. environ: with which the server was started; added: variables set by its imports."""

    agent: int
    environ: Mapping[str, str]
    added: Mapping[str, str]
    title: ProcessTitle


class ForkFailed(Exception):
    """Not all workers could be forked. Those that were end by themselves once the agent closes their channels."""


def fork_workers(ends: Sequence[socket.socket]) -> list[int] | socket.socket:
    """Fork one process for each end of a channel; gives their pids, and in each forked process its own end.

    An intermediate process forks them and exits at once. They become orphans, and so children of the agent, which sees their exits like
    those of workers that it started itself. Raises ForkFailed.
    """
    server = os.getpid()
    source, sink = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        for each in (source, sink):  # a pipe that stays open would keep this process from forking ever again
            os.close(each)
        raise ForkFailed(f"fork: {error.strerror}") from error
    if middle:
        os.close(sink)
        with open(source, "rb") as file:
            answer = file.read()
        os.waitpid(middle, 0)
        if not answer.startswith(b"["):
            raise ForkFailed(answer.decode("utf-8", "replace") or "the intermediate process was killed")
        pids: list[int] = json.loads(answer)
        return pids
    die_with_parent(server)
    forked: list[int] = []
    try:
        for end in ends:
            pid = os.fork()
            if not pid:
                os.close(source)
                os.close(sink)
                return end
            forked.append(pid)
        answer = json.dumps(forked).encode()
    except OSError as error:
        answer = f"fork: {error.strerror}".encode()
    os.write(sink, answer)
    os._exit(0)


def become_worker(end: socket.socket, inherited: InheritedState) -> dict[str, Any]:
    """In the new process: wait for the order and become the worker that it describes. Gives the order.

    This process exits if the channel closes without an order. The order comes after the adoption, because the agent knows of this process
    only then.
    """
    os.setsid()
    do_without_order()
    try:
        received = channel.receive(end)
    except (OSError, channel.BadMessage):
        received = None
    if received is None:
        os._exit(0)
    order, (stdout, stderr) = received
    end.close()
    die_with_parent(inherited.agent)
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    inherited.title.show(order["command"], order["environ"])
    set_environment(inherited, order["environ"])
    reopen_streams()
    importlib.invalidate_caches()  # files may have come while this process waited
    gc.enable()
    return order


def do_without_order() -> None:
    """Do what needs no order, which may come much later: the start of a worker waits for all that is left then."""
    reseed()
    importlib.invalidate_caches()  # the first time it copies memory that is shared with the server
    unload_agent_modules()


def unload_agent_modules() -> None:
    """Remove the agent's package from a worker's modules. What still runs of it has what it needs."""
    for name in [name for name in sys.modules if name == OURS or name.startswith(OURS + ".")]:
        del sys.modules[name]


def set_environment(inherited: InheritedState, own: Mapping[str, str]) -> None:
    """Replace the environment, also for C code. Variables that an import has set stay, because it is not imported again."""
    wanted = {**inherited.environ, **inherited.added, **own}
    for name in set(os.environ).difference(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def reopen_streams() -> None:
    """Set up the standard streams for their new files. The objects stay, because others may hold references to them."""
    for stream, number in ((sys.__stdin__, 0), (sys.__stdout__, 1), (sys.__stderr__, 2)):
        if isinstance(stream, io.TextIOWrapper):
            _reopen(stream, number)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__


def _reopen(stream: io.TextIOWrapper, number: int) -> None:
    text = (stream.encoding, stream.errors, "\n", stream.line_buffering, stream.write_through)
    buffer: Any = stream.buffer
    is_buffered = isinstance(buffer, io.BufferedReader)
    # A new object: the old one remembers whether the previous file was seekable.
    raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
    raw.name = buffer.name
    if is_buffered:
        buffer.__init__(raw)
    again: Any = stream
    again.__init__(buffer if is_buffered else raw, *text)


def reseed() -> None:
    """Reseed what imports have seeded: the generators of numpy and torch and the key of multiprocessing.

    `random` reseeds itself after a fork, and torch's generators of accelerators do not exist before their first use.
    """
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    generator: Any = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()  # torch.seed() also asks for work on the accelerator, once it is initialized
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
