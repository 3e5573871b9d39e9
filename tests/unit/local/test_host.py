"""Programs that the local cluster's tool runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agent_client import until

from elastipod_local.errors import CommandError, LocalClusterError
from elastipod_local.host import run
from elastipod_local.processes import ProcessId

PACKAGES = str(Path(sys.modules[run.__module__].__file__ or "").parents[1])
TOOL = """
import sys
from elastipod_local.host import run
run(["sh", "-c", "echo $$ > $0.new; mv $0.new $0; exec sleep 600", sys.argv[1]])
"""


def test_what_a_killed_tool_was_running_does_not_outlive_it(tmp_path: Path) -> None:
    """A copy of images that went on would write into a folder that `down` deletes."""
    note = tmp_path / "pid"
    tool = subprocess.Popen([sys.executable, "-c", TOOL, str(note)], env={**os.environ, "PYTHONPATH": PACKAGES})
    try:
        until(note.exists, "the program to run")
        program = ProcessId.of(int(note.read_text()))
        assert program is not None
    finally:
        tool.send_signal(signal.SIGKILL)
        tool.wait()
    until(lambda: not program.is_alive(), "the program to end")


def test_a_program_that_is_missing_is_named() -> None:
    with pytest.raises(LocalClusterError, match="the program no-such-program was not found; is it installed"):
        run(["no-such-program", "--help"])


def test_a_program_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(CommandError, match="ended with exit code 3: so it is"):
        run(["sh", "-c", "echo so it is >&2; exit 3"])
