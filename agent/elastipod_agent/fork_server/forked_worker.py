"""The agent's side of a process that the fork server has forked."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastipod_agent.core.warm_start import read_program
from elastipod_agent.fork_server.channel import BadMessage, pack
from elastipod_agent.workers import process_table
from elastipod_agent.workers.reaper import ChildProcess

_SEND_LIMIT_S = 5.0


@dataclass(slots=True, eq=False)
class ForkedWorker:
    """A forked process that waits for its program. It exits by itself when `end`, its channel, is closed.

    environ: of the server; the order sends only differences.
    """

    child: ChildProcess
    end: socket.socket
    environ: Mapping[str, str]

    async def start_program(self, command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> None:
        """Make it a worker with this command and complete environment. Raises OSError if it is dead."""
        program = read_program(command)
        assert program is not None
        own = {name: value for name, value in environ.items() if self.environ.get(name) != value}
        try:
            await send(self.end, {**asdict(program), "environ": own}, [stdout, stderr])
        except (OSError, asyncio.TimeoutError, BadMessage) as error:
            self.child.send(signal.SIGKILL)
            raise OSError(f"it does not take its order: {error}") from error
        finally:
            self.end.close()

    def is_fit(self) -> bool:
        """Tell whether it can take an order: it is alive and not stopped by a signal."""
        return self.child.status is None and not process_table.is_stopped(self.child.pid)

    def discard(self) -> None:
        """End it. SIGKILL is needed because a stopped process does not notice that its channel is closed."""
        self.end.close()
        self.child.send(signal.SIGKILL)


async def send(end: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message without blocking, its descriptors with the first part. Raises OSError if the other side does not take it."""
    data = pack(dict(message))
    sent = socket.send_fds(end, [data], descriptors)
    if sent < len(data):
        rest = asyncio.get_running_loop().sock_sendall(end, data[sent:])
        await asyncio.wait_for(rest, _SEND_LIMIT_S)
