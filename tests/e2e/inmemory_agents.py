"""The socket of the agents of a test's job: one line in, one line out, a thread for each connection of a worker."""

from __future__ import annotations

import json
import socketserver
from collections.abc import Callable, Mapping
from typing import Any

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


class AgentSocket(socketserver.ThreadingUnixStreamServer):
    """Serves the workers of all slots, which say their slot as their local rank."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, path: str, answer: Answer) -> None:
        self.answer = answer
        super().__init__(path, _Connection)


class _Connection(socketserver.StreamRequestHandler):
    server: AgentSocket

    def handle(self) -> None:
        try:
            for line in self.rfile:
                self.wfile.write(json.dumps(self.server.answer(json.loads(line))).encode() + b"\n")
        except OSError:
            return  # the worker is gone
