"""The traceback of a program that a fork runs shows the program alone.

A file of its own: in the copies for mutation testing every function has frames of mutmut's.
"""

from __future__ import annotations

from pathlib import Path

from tests.unit.agent.test_program import both

from elastipod_agent.fork_server.program import FILE


def test_a_traceback_begins_with_the_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def train():\n    raise KeyError('lr')\ntrain()\n")
    expected, own = both(FILE, str(script), folder=tmp_path)
    assert own == expected
    assert own.code == 1
