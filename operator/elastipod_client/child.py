"""Runs a program to its end. What it says to the user, such as how to log in, is shown while it waits for an answer."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

# A call that takes longer may wait for the user. Before that, its complaints are told as one sentence.
SILENT_S = 2.0
# A login plugin may leave a process behind that keeps the pipe open.
LAST_WORDS_S = 1.0


def run_child(command: Sequence[str], *, stdin: str | None, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program; gives what it printed. Raises subprocess.TimeoutExpired after limit_s, when it is killed.

    stdin: None leaves it the terminal, so that a login plugin may ask the user. With a terminal on standard error, what it says
    there is shown once it has run for SILENT_S.
    """
    if not sys.stderr.isatty():
        return subprocess.run(
            command, input=stdin, capture_output=True, encoding="utf-8", errors="replace", timeout=limit_s
        )
    reads, writes = os.pipe()
    said: list[bytes] = []
    listener = threading.Thread(target=_pass_on, args=(reads, said), daemon=True)
    listener.start()
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=writes,
            encoding="utf-8",
            errors="replace",
            timeout=limit_s,
        )
    finally:
        os.close(writes)
    listener.join(LAST_WORDS_S)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout, b"".join(said).decode(errors="replace"))


def _pass_on(pipe: int, said: list[bytes]) -> None:
    """Collect what comes through a pipe until it ends; show it on standard error from SILENT_S on. Prompts end without a newline."""
    shows_at = time.monotonic() + SILENT_S
    shown = 0
    with os.fdopen(pipe, "rb", buffering=0) as incoming:
        while True:
            left = shows_at - time.monotonic()
            if left <= 0:
                _show(said[shown:])
                shown = len(said)
            if not select.select([incoming], [], [], max(0.0, left) if left > 0 else None)[0]:
                continue
            if not (part := incoming.read(4096)):
                return
            said.append(part)


def _show(parts: Sequence[bytes]) -> None:
    """Show the user what the program says, as it is: it is the user's own, and may colour its prompts."""
    if parts:
        sys.stderr.write(b"".join(parts).decode(errors="replace"))
        sys.stderr.flush()
