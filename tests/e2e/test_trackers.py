"""Experiment trackers with their real packages: one run for a job's whole life, in which rank 0 of each generation goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.training_run import REPOSITORY
from tests.patience import PATIENCE_S
from tests.peers import peer_python

WORKER = Path(__file__).with_name("tracker_worker.py")
READER = Path(__file__).with_name("tracker_reader.py")
JOB_UID = "0b8b4f0e-7a52-4f3c-9b1e-3c6d1f1a2b3c"


class Life:
    """A job's life, one process of rank 0 after another, as hyperpodrun starts them. tracker: mlflow or wandb."""

    def __init__(self, tracker: str, folder: Path) -> None:
        self.tracker = tracker
        self.folder = folder
        # Neither client may call anybody: no server, no telemetry, no error reports.
        offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "HOME": str(folder)}
        offline |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
        where = {"MLFLOW_TRACKING_URI": str(folder / "mlruns"), "MLFLOW_ALLOW_FILE_STORE": "true"}
        self.environment = {**os.environ, **offline, **where, "PYTHONPATH": str(REPOSITORY / "agent")}

    def generation(self, number: int, size: int, *arguments: str, rank: int = 0) -> subprocess.Popen[str]:
        """Start rank 0 (or another one) of a generation."""
        job = {"ELASTIPOD_RUN_ID": JOB_UID, "ELASTIPOD_JOB": "team/llm"}
        place = {"ELASTIPOD_GENERATION": str(number), "NNODES": str(size), "RANK": str(rank), "WORLD_SIZE": str(size)}
        command = [str(peer_python("trackers")), str(WORKER), self.tracker, *arguments]
        return subprocess.Popen(
            command, env={**self.environment, **job, **place}, text=True, cwd=self.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def runs(self) -> list[dict[str, Any]]:
        """Give all runs in MLflow's folder, as its own client reads them."""
        done = subprocess.run(
            [str(peer_python("trackers")), str(READER)],
            env=self.environment, text=True, capture_output=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process; give its exit code and what it printed."""
    said, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said


def drained(process: subprocess.Popen[str], step: int) -> None:
    """Tell a process, after a step, to leave for a resize."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == f"step {step}":
            process.send_signal(signal.SIGUSR1)
            break
    code, said = ended(process)
    assert (code, "leaving" in said) == (0, True), said


@pytest.mark.long("variants")
def test_an_mlflow_run_goes_on_over_a_resize_and_a_recovery(tmp_path: Path) -> None:
    life = Life("mlflow", tmp_path)
    drained(life.generation(1, 2, "--first=1", "--leave-at=3"), 3)
    assert [run["status"] for run in life.runs()] == ["RUNNING"], "a run that is left for a resize goes on"
    crashed = life.generation(2, 4, "--first=4", "--fail-at=6")
    assert ended(crashed)[0] == 1
    assert [run["status"] for run in life.runs()] == ["FAILED"], "as far as anybody knows"
    code, said = ended(life.generation(3, 3, "--first=5", "--last=8"))
    assert code == 0, said
    (run,) = life.runs()
    assert (run["status"], run["name"]) == ("FINISHED", "team/llm")
    tags = run["tags"]
    assert {name: tags[f"elastipod.{name}"] for name in ("generation", "size", "cause", "job")} == {
        "generation": "3", "size": "3", "cause": "recovery", "job": "team/llm"
    }  # fmt: skip
    assert [step for step, _ in run["metrics"]["loss"]][-1] == 8
    assert {step for step, _ in run["metrics"]["loss"]} == set(range(1, 9))
    assert run["metrics"]["elastipod.generation"] == [[1, 1.0], [4, 2.0], [5, 3.0]]
    assert run["metrics"]["elastipod.size"] == [[1, 2.0], [4, 4.0], [5, 3.0]]


@pytest.mark.long("variants")
def test_wandb_writes_one_run_offline(tmp_path: Path) -> None:
    """Each process has a folder, and all of them the ID of one run, by which `wandb sync` joins them."""
    life = Life("wandb", tmp_path)
    drained(life.generation(1, 2, "--first=1", "--leave-at=3"), 3)
    assert ended(life.generation(2, 4, "--first=4", "--kill-at=6"))[0] == -signal.SIGKILL
    assert ended(life.generation(2, 4, "--last=2", rank=1))[0] == 0, "other ranks write nothing"
    code, said = ended(life.generation(3, 3, "--first=5", "--last=8"))
    assert code == 0, said
    files = sorted(tmp_path.rglob("*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in files] == [f"run-{JOB_UID}.wandb"] * 3
    for number, path in ((1, files[0]), (3, files[2])):  # what the process that was killed had not flushed is lost
        written = path.read_bytes()
        assert b"elastipod.generation" in written
        assert f'"{number}"'.encode() in written
