"""Agents as real processes; and a real cluster for jobs: four nodes with room for one replica each, the operator from its chart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess, until_gone
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.job_run import JobRun
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import worker_environment

from elastipod_local.cluster import Cluster
from elastipod_local.state import NodeOptions

ROOT = Path(__file__).resolve().parents[2]
OPERATOR_NAMESPACE = "aws-hyperpod"


@pytest.fixture(scope="session")
def cluster(worker_id: str) -> Iterator[Cluster]:
    """The cluster with the operator; taken down at the end of the session. Each process of pytest-xdist has its own."""
    name = "e2e" if worker_id == "master" else f"e2e-{worker_id}"
    with Cluster.up(name, nodes=4, options=NodeOptions(cpus=1), progress=print) as made:
        chart = ("install", "elastipod", str(ROOT / "charts" / "elastipod"))
        where = ("--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--set", "image.tag=dev")
        made.helm(*chart, *where, "--wait", "--timeout", "240s")
        made.kubectl("apply", "-f", str(ROOT / "examples" / "storage.yaml"))
        yield made


@pytest.fixture
def job(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[JobRun]:
    """A job named after the test; deleted with everything of it afterwards."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")[:40].strip("-")
    run = JobRun(cluster, name)
    yield run
    run.delete()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[TorchForkServer]:
    """The process that workers without an agent are forked from: loading torch takes longer than most of them live."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # each lost connection is told with a long trace otherwise
    server = TorchForkServer({**worker_environment(), **quiet})
    yield server
    server.close()


@pytest.fixture
def run_agent(tmp_path: Path) -> Iterator[RunAgent]:
    """Start agents whose workers run a script; at the end they leave and nothing of theirs is left."""
    agents: list[AgentProcess] = []

    def run(script: str, *arguments: str, script_args: tuple[str, ...] = (), **options: Any) -> AgentProcess:
        path = tmp_path / "train.py"
        path.write_text(script, "utf-8")
        agent = AgentProcess(tmp_path, [*arguments, str(path), *script_args], **options)
        agents.append(agent)
        until(agent.answers, "the agent's server")
        agent.until("ready")
        return agent

    yield run
    for agent in agents:
        agent.end()
    until_gone(p for p in psutil.process_iter(["environ"]) if f"HOME={tmp_path}" in _environment(p))


def _environment(process: psutil.Process) -> list[str]:
    return [f"{name}={value}" for name, value in (process.info["environ"] or {}).items()]
