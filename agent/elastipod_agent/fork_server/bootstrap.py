"""Starts the fork server, as a script: ``python -u bootstrap.py CHANNEL AGENT PADDING``.

CHANNEL: the descriptor of the channel to the agent; AGENT: its pid; PADDING: what makes the command line long enough to show a
worker's later, see `process_title`.
"""

from __future__ import annotations

import os
import sys


def serve() -> None:
    """Import the server from where this file is, for itself only: workers find packages by their own sys.path."""
    packages = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder
    sys.path.insert(0, packages)
    from elastipod_agent.fork_server import server

    sys.path.remove(packages)
    server.main(sys.argv[1:])


if __name__ == "__main__":
    serve()
