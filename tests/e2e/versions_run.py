"""One elastic job under another interpreter, agent and workers both; and environments of other Pythons."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests import peers
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess
from tests.free_ports import free_port
from tests.patience import PATIENCE_S

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod_local.registry_access import settings

SCRIPT = Path(__file__).with_name("versions_worker.py")
PODS = 2
STEPS = 304  # of the script's whole job


def run_job(python: Path, folder: Path, *, is_warm: bool, parallel: str) -> None:
    """Train on two pods, drain them, and let them go on to the end; checks every step of that."""
    folder.mkdir()
    # The agent itself runs under this interpreter too: the shell puts it in the place of the test's own.
    wrapper = ("sh", "-c", 'shift; exec "$0" "$@"', str(python))
    arguments = ["--nproc-per-node=1", str(SCRIPT), str(folder), f"--parallel={parallel}"]
    with ExitStack() as stack:
        agents = []
        for _ in range(PODS):
            agents.append(AgentProcess(folder, arguments, wrapper=wrapper, is_warm=is_warm))
            stack.callback(agents[-1].end)
        for agent in agents:
            until(agent.answers, "the agent's server", PATIENCE_S)
            agent.until("ready")
        _start(agents, 1)
        until(lambda: all(_step(agent) >= 5 for agent in agents), "steps", PATIENCE_S)
        for agent in agents:
            agent.drain(1, timeout=PATIENCE_S)
        drained = [agent.until("ready", PATIENCE_S) for agent in agents]
        assert [seen["drained"] for seen in drained] == [True] * PODS, _printed(agents)
        step = _step(agents[0])
        assert 5 <= step < STEPS
        _start(agents, 2)
        for agent in agents:
            agent.until("completed", PATIENCE_S)
        for agent in agents:
            agent.until_printed("completed after step")
            words = re.findall(r"(begins|drained|completed) after step (\d+)", agent.printed())
            assert words == [("begins", "0"), ("drained", str(step)), ("begins", str(step)), ("completed", str(STEPS))]
            details = agent.call("GET", "/status?details=1")[1]["details"]
            assert (details["warm_starts"], details["cold_starts"]) == ((2, 0) if is_warm else (0, 2)), agent.printed()
    for agent in agents:
        assert agent.process.returncode == 0
    report = audit(read_logs(folder / "samples"))
    assert report.exact, report.sentence
    assert report.completed
    assert report.lineage == [[1, 1, step], [2, step + 1, STEPS]]


def _start(agents: list[AgentProcess], generation: int) -> None:
    port = free_port()
    for rank, agent in enumerate(agents):
        assert agent.start(generation, rank=rank, nnodes=PODS, master_port=port) == (200, None)


def _step(agent: AgentProcess) -> int:
    seen = agent.status()
    assert seen["status"] in ("running", "ready"), f"{seen}\n{agent.printed()}"
    worker: dict[str, Any] = seen["worker"]
    return worker["step"] or 0


def _printed(agents: list[AgentProcess]) -> str:
    return "\n".join(agent.printed() for agent in agents)


def find_python(version: str) -> Path | None:
    """Give an interpreter of this version (3.12) of this machine, on the path or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    name = f"python{version}"
    on_path = shutil.which(name)
    candidates = [Path(on_path)] if on_path else []
    candidates += sorted(pyenv.glob(f"{version}.*/bin/{name}"))
    for candidate in [Path(sys.executable), *candidates]:
        code = "import sys; print('{}.{}'.format(*sys.version_info))"
        said = subprocess.run([candidate, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
        if said.returncode == 0 and said.stdout.strip() == version:
            return candidate
    return None


def uv(*arguments: str) -> str:
    """Run uv with this machine's registry settings; gives what it said. Raises RuntimeError with its words."""
    environ = {"UV_HTTP_TIMEOUT": "180", **os.environ, **settings(os.environ, Path.home())}
    done = subprocess.run(
        [Path(sys.executable).with_name("uv"), "--no-progress", *arguments],
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=peers.INSTALL_DEADLINE_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"`uv {' '.join(arguments)}` failed: {done.stderr.strip()[-2000:]}")
    return done.stdout + done.stderr


def make_environment(base: Path, folder: Path) -> Path:
    """Make an environment without packages; gives its interpreter."""
    uv("venv", "--python", str(base), str(folder))
    return folder / "bin" / "python"


def install(python: Path, *packages: str) -> None:
    """Install packages as their users do, unpinned but for what is given."""
    uv("pip", "install", "--compile-bytecode", "--python", str(python), *packages)


def versions_of(python: Path) -> dict[str, str]:
    """Give all distributions of an environment with their versions."""
    code = (
        "from importlib.metadata import distributions\n"
        "for one in distributions(): print(one.metadata['Name'], one.version)"
    )
    # Isolated: the checkout, which may be the working directory, is no distribution of that environment.
    said = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return dict(line.split() for line in said.stdout.splitlines())


def build_wheel(folder: Path) -> Path:
    """Build our wheel from a copy of the checkout, with the setuptools of the test's own environment."""
    source = folder / "source"
    source.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("agent", "operator", "localcluster"):
        shutil.copytree(peers.ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(peers.ROOT / name, source / name)
    uv(
        *("build", "--wheel", "--no-build-isolation", "--python", sys.executable),
        *("--out-dir", str(folder), str(source)),
    )
    (wheel,) = folder.glob("*.whl")
    return wheel
