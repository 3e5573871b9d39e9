"""The fork server: imports once, then forks workers when the agent asks. `bootstrap` starts it under the workers' interpreter.

It never runs a tensor operation, never touches an accelerator, and has one thread whenever it forks.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from elastipod_agent.fork_server import fast_exit, forking, patient_store, preload, program
from elastipod_agent.fork_server.channel import BadMessage, close_all, receive, send
from elastipod_agent.fork_server.import_snapshot import ImportSnapshot
from elastipod_agent.fork_server.process_title import VARIABLE, ProcessTitle, TitleUnavailable


class ForkServer:
    """The server process. agent: pid of the agent."""

    def __init__(self, channel: socket.socket, agent: int) -> None:
        self._channel = channel
        self._agent = agent
        os.environ.pop(VARIABLE, None)
        self._environ = dict(os.environ)

    def serve(self) -> dict[str, Any]:
        """Serve the agent until it is gone; returns only in the workers, with the order of each."""
        try:
            title = ProcessTitle.locate()
            self._load()
        except (preload.NotForkable, TitleUnavailable) as error:
            self._say(event="unusable", why=str(error))
            os._exit(1)
        added = {name: value for name, value in os.environ.items() if self._environ.get(name) != value}
        inherited = forking.InheritedState(self._agent, self._environ, added, title)
        while (received := self._receive()) is not None:
            _, descriptors = received
            ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            own = self._answer(ends)
            if own is not None:
                self._channel.close()
            for end in ends:
                if end is not own:
                    end.close()
            if own is not None:
                return forking.become_worker(own, inherited)
        os._exit(0)

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        try:
            return receive(self._channel)
        except (OSError, BadMessage):  # a working agent does not do that
            return None

    def _load(self) -> None:
        """Import the modules that the agent names, and prepare this process for forks. Raises NotForkable."""
        received = self._receive()
        if received is None:
            os._exit(0)
        order, descriptors = received
        close_all(descriptors)
        began = time.monotonic()
        paths, first = list(sys.path), program.first_path(order["kind"], order["target"])
        if first is not None:
            sys.path.insert(0, first)
        notes = preload.load(order["modules"], lambda name: self._say(event="loading", module=name))
        if first is not None and sys.path[:1] == [first]:
            del sys.path[0]
        preload.register_gloo()
        preload.close_nvml()
        end_import_threads()
        patient_store.install()
        fast_exit.install_exit_sentinel()
        searched = [*paths, *([] if first is None else [first])]
        self._imported = ImportSnapshot.now(
            searched, {"elastipod", *(name.partition(".")[0] for name in order["modules"])}
        )
        gc.collect()
        gc.freeze()
        gc.disable()
        preload.check(self._own_descriptors())
        self._say(event="ready", seconds=round(time.monotonic() - began, 3), notes=notes)

    def _answer(self, ends: Sequence[socket.socket]) -> socket.socket | None:
        """Fork one process for each end; without ends, only check that a fork is possible now."""
        try:
            changed = self._imported.changed()
            if changed is not None:
                self._say(event="refused", why=changed, is_stale=True)
                return None
            preload.check({*self._own_descriptors(), *(end.fileno() for end in ends)})
            forked = forking.fork_workers(ends) if ends else []
        except (preload.NotForkable, forking.ForkFailed, OSError) as error:
            self._say(event="refused", why=str(error), is_stale=False)
            return None
        if isinstance(forked, socket.socket):
            return forked
        self._say(event="forked", pids=forked)
        return None

    def _own_descriptors(self) -> set[int]:
        return {0, 1, 2, self._channel.fileno()}

    def _say(self, **message: Any) -> None:
        try:
            send(self._channel, message)
        except OSError:  # the agent is gone
            os._exit(0)


def end_import_threads() -> None:
    """Fork once to end threads: numpy's OpenBLAS starts threads at its import and ends them before any fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of those threads
        child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def main(arguments: Sequence[str]) -> None:
    """Serve, and in a worker run its program; does not return. arguments: descriptor of the channel, pid of the agent."""
    order = ForkServer(socket.socket(fileno=int(arguments[0])), int(arguments[1])).serve()
    fast_exit.flush_files_at_exit()
    fast_exit.exit_process(program.run(order["kind"], order["target"], order["args"], order["command"]))
