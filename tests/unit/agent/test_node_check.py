"""The check of nodes in examples/node_check, as the agent runs it before a start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.worker_scripts import SAYS

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "node_check" / "check_node.py"
TWO_GPUS = "echo 'GPU 0: H100'; echo 'GPU 1: H100'"


@pytest.fixture
def port() -> Iterator[int]:
    """The port of an agent of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def checked(folder: Path, port: int, *arguments: str, smi: str = TWO_GPUS) -> tuple[int, str]:
    """Give exit code and sentence. smi: what nvidia-smi does, in shell; empty: there is none."""
    tools = folder / "bin"
    tools.mkdir()
    if smi:
        (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
        (tools / "nvidia-smi").chmod(0o755)
    env = {"PATH": f"{tools}:{os.defpath}", "MASTER_ADDR": "127.0.0.1", "NODE_NAME": "node-7"}
    command = [sys.executable, str(SCRIPT), f"--port={port}", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stderr.strip()


def test_a_good_node_passes(tmp_path: Path, port: int) -> None:
    assert checked(tmp_path, port, "--gpus=2", "--memory-gib=0.01") == (0, "")


@pytest.mark.parametrize(
    ("arguments", "smi", "sentence"),
    [
        (["--gpus=3"], TWO_GPUS, "node node-7: 2 of 3 GPUs answer (nvidia-smi -L, exit code 0):"),
        (["--gpus=2"], "echo no driver >&2; exit 9", "0 of 2 GPUs answer (nvidia-smi -L, exit code 9): no driver"),
        (["--gpus=1"], "", "nvidia-smi cannot be run: No such file or directory"),
        (["--gpus=1"], "exec sleep 600", "its check of GPUs did not end within 5 s"),
        (["--memory-gib=999999"], "", "GiB of memory are available, not 999999"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, port: int, arguments: list[str], smi: str, sentence: str) -> None:
    code, said = checked(tmp_path, port, *arguments, smi=smi)
    assert (code, sentence in said) == (1, True), said


def test_a_pod_of_rank_0_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, said = checked(tmp_path, port)
    assert (code, f"the agent of rank 0 at 127.0.0.1:{port} cannot be reached" in said) == (1, True), said


def test_a_start_on_a_bad_node_fails_with_the_sentence(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        seen = agent.until("faulted")
        assert seen["reason"] == "PreScriptFailed"
        assert "GiB of memory are available, not 999999" in seen["message"]

    agent.run(SAYS, scenario, f"--pre-train-script={SCRIPT}", "--pre-train-args=--memory-gib=999999")
