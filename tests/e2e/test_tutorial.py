"""The scripts of the tutorial as a reader runs them on one machine: before, after, and with a resize in between."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.pasted import paste, shell_blocks, shell_environment
from tests.patience import PATIENCE_S
from tests.unit.docs.pages import page

BEFORE, AFTER = page("docs/tutorial.md").blocks("python")
COMMANDS = shell_blocks("docs/tutorial.md", leave_out=["Run it on the cluster"])
SIZES = "EPOCHS, GLOBAL_BATCH = 20, 128"
EPOCHS = 60  # 900 steps: no run is through before it gets its signal


def with_epochs(script: str, epochs: int) -> str:
    assert SIZES in script
    return script.replace(SIZES, f"EPOCHS, GLOBAL_BATCH = {epochs}, 128")


def slowed(script: str) -> str:
    """Give a script whose steps leave a test time to act between two of them."""
    head, shows, tail = script.partition('            print(f"loss ')
    assert shows
    return f"{head}            import time; time.sleep(0.05)\n{shows}{tail}"


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.long("variants")
def test_the_script_before_runs_with_torchrun(tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text(with_epochs(BEFORE, 1))
    printed = paste("mkdir -p out; torchrun --standalone --nproc-per-node=2 before.py out", tmp_path)
    assert printed.count("loss ") == 2 * 15  # a line on each rank for each step of the epoch
    assert (tmp_path / "out" / "weights.pt").exists()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The tutorial's script on two processes."""
    (tmp_path / "train.py").write_text(slowed(with_epochs(AFTER, EPOCHS)))
    command = ["hyperpodrun", "--standalone", "--nproc-per-node=2", "train.py", "out"]
    (tmp_path / "out").mkdir()
    with open(tmp_path / "printed", "w") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=dict(shell_environment()), stdout=output, stderr=subprocess.STDOUT, text=True
        )
    yield process
    if process.poll() is None:
        for one in psutil.Process(process.pid).children(recursive=True):
            one.kill()
        process.kill()
    process.wait()


@pytest.mark.long("variants")
def test_the_script_after_goes_on_at_another_size_and_trains_each_sample_once(
    run: subprocess.Popen[str], tmp_path: Path
) -> None:
    printed = tmp_path / "printed"
    until(lambda: printed.read_text().count("loss ") > 20, "steps of two processes")
    workers = [one for one in psutil.Process(run.pid).children() if "train.py" in " ".join(one.cmdline())]
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGUSR1)
    assert run.wait(PATIENCE_S) == 0, printed.read_text()
    assert "Traceback" not in printed.read_text()
    (tmp_path / "train.py").write_text(with_epochs(AFTER, EPOCHS))
    again = paste(COMMANDS.replace("--nproc-per-node=2", "--nproc-per-node=1"), tmp_path)
    assert again.count("loss ") > 20
    assert f"every one of {EPOCHS * 1797} samples was trained exactly once" in again
