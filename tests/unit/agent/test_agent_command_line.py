"""What `hyperpodrun` does before it is an agent: bad command lines, and machines that refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.agent.agent_in_process import AgentInProcess

from elastipod_agent.main import foreign_agent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--nproc-per-node=many", "t.py"], "--nproc-per-node is 'many'", id="worker count"),
        pytest.param(["--nnodes=2:x", "t.py"], "--nnodes is '2:x'", id="nnodes"),
        pytest.param(["--log-dir=/proc/nowhere", "t.py"], "--log-dir /proc/nowhere", id="log directory"),
    ],
)
def test_a_bad_command_line_ends_with_one_sentence(agent: AgentInProcess, arguments: list[str], words: str) -> None:
    assert agent.run_alone(*arguments) == 2
    assert words in agent.printed()
    assert agent.printed().startswith("hyperpodrun: error: ")
    assert agent.termination_message == agent.printed().strip().replace("error: ", "", 1)


def test_the_original_agent_beside_ours_is_refused(
    agent: AgentInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "hyperpod_elastic_agent-1.2.dist-info"
    record.mkdir()
    (tmp_path / "hyperpod_elastic_agent-1.2.txt").touch()
    assert foreign_agent(["/nowhere", str(tmp_path)]) == str(record)
    assert foreign_agent(["/nowhere"]) is None
    monkeypatch.syspath_prepend(str(tmp_path))
    assert agent.run_alone("t.py") == 2
    assert str(record) in agent.printed()


def test_the_log_says_where_the_agent_listens(agent: AgentInProcess) -> None:
    agent.run("", lambda: None)
    (ready,) = [line for line in agent.printed().splitlines() if " ready " in line]
    assert f"port={agent.port} " in ready


def test_warnings_about_the_command_line_are_logged(agent: AgentInProcess) -> None:
    def scenario() -> None:
        assert agent.status()["status"] == "ready"

    agent.run("", scenario, "--rdzv-backend=etcd")
    assert "WARNING" in agent.printed()
