"""Which versions work together (`make test-long NAME=matrix`): both wheels on each Python, and a job on each torch.

`docs/reference/versions.md` has the result. `NAME=versions` runs more tests on fewer combinations.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests import peers
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess
from tests.e2e.test_agent_wheel import wheels  # noqa: F401 a fixture
from tests.e2e.versions_run import find_python, install, make_environment, run_job, versions_of
from tests.free_ports import free_port
from tests.long_runs import LongRun
from tests.patience import PATIENCE_S

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod_local.paths import cache_dir

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Each torch from the oldest that is supported, with a Python that has wheels of it.
TORCHES = {
    **{"2.4": "3.10", "2.5": "3.12", "2.6": "3.13", "2.7": "3.10", "2.8": "3.11", "2.9": "3.12"},
    **{"2.10": "3.13", "2.11": "3.11", "2.12": "3.11", "2.13": "3.12", "2.14": "3.13", "2.15": "3.11"},
}
OPERATOR_SINCE = (3, 11)
GROUPS = Path(__file__).with_name("versions_groups.py")
EXAMPLE = peers.ROOT / "examples" / "in_memory" / "train.py"
EPOCHS = 100
SAMPLES = 1500  # of the example, in each epoch
SIZES = (2, 3, 1)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place for gigabytes, which goes when the test ends."""
    found = cache_dir() / "matrix"
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir()
    yield found
    shutil.rmtree(found)


def base_python(version: str, long_run: LongRun) -> Path:
    found = find_python(version)
    if found is None:
        long_run.detail(**{f"python {version}": "untested: this machine has none"})
        pytest.skip(f"needs Python {version}; install it (on the path, or with pyenv) to include it")
    return found


def said(*command: str | Path) -> str:
    """Give what a command prints, as a user sees it away from the checkout."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.long("matrix")
@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("wheel", ["elastipod", "elastipod-agent"])
def test_a_wheel_is_installed_alone(
    wheel: str,
    version: str,
    wheels: dict[str, Path],  # noqa: F811
    folder: Path,
    long_run: LongRun,
) -> None:
    python = make_environment(base_python(version, long_run), folder / "environment")
    install(python, str(wheels[wheel]))
    assert list(versions_of(python)) == [wheel]
    said(python, "-I", "-c", "import elastipod, elastipod.cli, elastipod_agent.main, hyperpod_elastic_agent")
    assert said(python.parent / "elastipod", "--help").startswith("usage: elastipod COMMAND")
    assert said(python.parent / "hyperpodrun", "--help").startswith("usage: hyperpodrun ")
    if wheel == "elastipod" and tuple(map(int, version.split("."))) >= OPERATOR_SINCE:
        install(python, f"{wheels[wheel]}[operator,cli]")
        assert said(python.parent / "elastipod", "operator", "--help").startswith("usage: elastipod operator")
        assert said(python.parent / "elastipod", "why", "--help").startswith("usage: elastipod why")
        long_run.count(**{f"python {version}: operator installed": 1})
    long_run.count(**{f"python {version}: {wheel} installed": 1})


@pytest.mark.timeout(1800)
@pytest.mark.long("matrix")
@pytest.mark.parametrize("minor", TORCHES)
def test_jobs_run_on_each_torch(
    minor: str,
    wheels: dict[str, Path],  # noqa: F811
    folder: Path,
    tmp_path: Path,
    long_run: LongRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is drained and goes on, and one that keeps its state in memory from 2 to 3 to 1 ranks."""
    version = TORCHES[minor]
    monkeypatch.setenv("UV_CACHE_DIR", str(folder / "downloads"))
    python = make_environment(base_python(version, long_run), folder / "environment")
    install(python, f"torch=={minor}.*", "scikit-learn", f"{wheels['elastipod-agent']}[agent]")
    torch = versions_of(python)["torch"]
    assert torch.startswith(f"{minor}.")
    what = f"torch {torch}, python {version}"
    assert said(python, "-I", GROUPS).split()[-1].isdigit(), "some releases of gloo print each connection before it"
    run_job(python, tmp_path / "drained", is_warm=True, parallel="ddp")
    long_run.count(**{f"{what}: drained and continued": 1})
    starts = resize_in_memory(python, tmp_path / "memory")
    long_run.count(**{f"{what}: in memory, 2 to 3 to 1": starts})


def resize_in_memory(python: Path, folder: Path) -> int:
    """Run the example in memory with agents of this interpreter at three sizes, to its end; gives the samples, each used once."""
    folder.mkdir()
    options = [f"--checkpoint-dir={folder}/checkpoints", f"--sample-log-dir={folder}/samples", f"--epochs={EPOCHS}"]
    options += ["--print-every=5"]
    command = ["--nproc-per-node=1", str(EXAMPLE), *options]
    wrapper = ("sh", "-c", 'shift; exec "$0" "$@"', str(python))
    env = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        agents: list[AgentProcess] = []
        for _ in range(max(SIZES)):
            agents.append(AgentProcess(folder, command, env=env, wrapper=wrapper, is_warm=True))
            stack.callback(agents[-1].end)
        for agent in agents:
            until(agent.answers, "the agent's server", PATIENCE_S)
            agent.until("ready", PATIENCE_S)
        for generation, size in enumerate(SIZES, 1):
            port, step = free_port(), _step(agents[0])
            for rank, agent in enumerate(agents[:size]):
                assert agent.start(generation, rank=rank, nnodes=size, master_port=port) == (200, None)
            if size == SIZES[-1]:
                break
            until(lambda step=step: _step(agents[0]) > step + 10, f"steps:\n{agents[0].printed()}", PATIENCE_S)  # type: ignore[misc]
            for agent in agents[:size]:
                assert agent.drain(generation, timeout=PATIENCE_S, restart_mode="ipr") == (200, None)
            assert [agent.until("ready", PATIENCE_S)["drained"] for agent in agents[:size]] == [True] * size
        agents[0].until("completed", PATIENCE_S)
        details = agents[0].call("GET", "/status?details=1")[1]["details"]
        assert (details["warm_starts"], details["cold_starts"]) == (1, 0), "rank 0 keeps its process"
        workers = re.findall(r"step \d+/\d+ loss \S+ workers (\d)", agents[0].printed())
        assert list(dict.fromkeys(workers)) == [*map(str, SIZES)], agents[0].printed()
    report = audit(read_logs(folder / "samples"))
    assert (report.exact, report.completed) == (True, True), report
    assert sum(report.steps_repeated.values()) == 0, report
    assert len(report.lineage) == len(SIZES)
    assert report.samples_unique == EPOCHS * SAMPLES
    return report.samples_unique


def _step(agent: AgentProcess) -> int:
    return (agent.status().get("worker") or {}).get("step") or 0
