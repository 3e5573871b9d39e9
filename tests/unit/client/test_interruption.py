"""Ctrl-C: a command that was interrupted reports no success; those that users leave so do."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod import cli
from elastipod_client.kubectl import Kubectl


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["why", "llm"], 130),
        (["doctor"], 130),
        (["suspend", "llm"], 130),
        (["scale", "llm", "--replicas=2"], 130),
        (["timeline", "llm"], 130),
        (["bundle", "llm", "--file", "/tmp/never-written.tar.gz"], 130),
        (["logs", "llm"], 130),
        (["logs", "llm", "--first-failure"], 130),
        (["logs", "llm", "-f"], 0),
        (["watch", "llm"], 0),
    ],
)
def test_the_exit_code_after_an_interruption(monkeypatch: pytest.MonkeyPatch, command: list[str], status: int) -> None:
    def interrupted(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Kubectl, "run", interrupted)
    assert cli.main(command) == status
