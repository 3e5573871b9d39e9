"""Starts the fork server, run as a script: ``python -u bootstrap.py CHANNEL AGENT PADDING``.

CHANNEL: descriptor of the channel to the agent; AGENT: pid of the agent; PADDING: makes the command line long enough for that of a
worker, see `process_title`.
"""

from __future__ import annotations

import os
import sys


def serve() -> None:
    """Import the server from this file's package without leaving that on sys.path: workers use their own sys.path."""
    packages = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder
    sys.path.insert(0, packages)
    from elastipod_agent.fork_server import server

    sys.path.remove(packages)
    server.main(sys.argv[1:])


if __name__ == "__main__":
    serve()
