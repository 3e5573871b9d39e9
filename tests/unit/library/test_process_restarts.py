"""The sentence about process restarts: where a job is told, by what, and how often."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.patience import PATIENCE_S

from elastipod import CheckpointManager, State, elastic_event, elastic_event_detected, process_restarts, save_checkpoint
from elastipod.integrations.marks import MarkedCheckpoints
from elastipod.process_restarts import is_news
from elastipod.worker_file import WorkerFile

SENTENCE = "each resize and recovery restarts the processes of this job"
TOLD = {"ELASTIPOD_WORKER_FILE": "/tmp/worker-file", "ELASTIPOD_GENERATION": "2", "RANK": "0"}
MODULES = ["os", "elastipod", "elastipod.elastic_event", "torch"]


@pytest.mark.parametrize(
    ("changed", "modules", "is_told"),
    [
        pytest.param({}, MODULES, True, id="rank 0 after the first change"),
        pytest.param({"ELASTIPOD_GENERATION": "1"}, MODULES, False, id="before any change"),
        pytest.param({"ELASTIPOD_GENERATION": "3"}, MODULES, False, id="after a later change"),
        pytest.param({"ELASTIPOD_GENERATION": ""}, MODULES, False, id="no generation"),
        pytest.param({"RANK": "1"}, MODULES, False, id="another rank"),
        pytest.param({"RANK": "-1"}, MODULES, False, id="no rank yet"),
        pytest.param({"ELASTIPOD_WORKER_FILE": ""}, MODULES, False, id="no agent"),
        pytest.param({}, [*MODULES, "hyperpod_elastic_agent.elastic_event_handler"], False, id="the original's event"),
        pytest.param({}, [*MODULES, "hyperpod_checkpointless_training"], False, id="the original's library"),
    ],
)
def test_where_a_job_is_told(changed: dict[str, str], modules: list[str], is_told: bool) -> None:
    assert is_news(TOLD | changed, modules) is is_told


def test_under_torchrun_and_in_plain_python_nobody_is_told() -> None:
    assert not is_news({}, MODULES)
    assert not is_news({"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}, MODULES)


@pytest.fixture
def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[], int]]:
    """Give how often the sentence was logged, in a process that a pod has started after the first change of its job."""
    monkeypatch.setattr(process_restarts, "_is_settled", False)
    monkeypatch.setattr(elastic_event, "_detector", None)
    for name in [name for name in sys.modules if name.startswith("hyperpod_")]:  # imported by other tests
        monkeypatch.delitem(sys.modules, name)
    with WorkerFile.create(tmp_path / "worker-file", 1) as file:
        for name, value in {**TOLD, "ELASTIPOD_WORKER_FILE": file.path, "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        with caplog.at_level(logging.WARNING):
            yield lambda: caplog.text.count(SENTENCE)


def objects() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def save(folder: Path) -> None:
    model, optimizer = objects()
    with CheckpointManager(folder, memory=False) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)


def test_a_script_that_asks_for_the_event_is_told_once_in_all_its_runs(told: Callable[[], int]) -> None:
    for _ in range(2):
        assert not elastic_event_detected()
        assert not elastic_event_detected()
        elastic_event.reset_elastic_event()
    assert told() == 1


def test_a_script_that_only_saves_is_told_once(told: Callable[[], int], tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "loaded", memory=False)
    model, optimizer = objects()
    assert manager.load_latest(model=model, optimizer=optimizer) is None
    assert told() == 0, "a script may load something before it makes its State"
    manager.close()
    save(tmp_path / "saved")
    assert not elastic_event_detected()
    assert told() == 1


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda folder: State(objects), id="State"),
        pytest.param(lambda folder: MarkedCheckpoints(folder, re.compile(r"(\d+)")), id="a framework's checkpoints"),
        pytest.param(
            lambda folder: save_checkpoint(*objects(), checkpoint_path=folder, step=1), id="the original's samples"
        ),
    ],
)
def test_who_cannot_use_the_advice_or_follows_it_is_not_told(
    told: Callable[[], int], tmp_path: Path, use: Callable[[Path], object]
) -> None:
    use(tmp_path / "checkpoints")
    assert not elastic_event_detected()
    save(tmp_path / "others")
    assert told() == 0


@pytest.mark.parametrize(("module", "times"), [("elastipod", 1), ("hyperpod_elastic_agent.elastic_event_handler", 0)])
def test_a_script_without_logging_prints_it_unless_it_is_written_for_the_original(
    tmp_path: Path, module: str, times: int
) -> None:
    script = f"from {module} import elastic_event_detected\nassert not elastic_event_detected()"
    with WorkerFile.create(tmp_path / "worker-file", 1) as file:
        environ = {**os.environ, **TOLD, "ELASTIPOD_WORKER_FILE": file.path, "LOCAL_RANK": "0"}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
    assert done.stderr.count(SENTENCE) == times
    assert done.stderr.count("\n") == times, "nothing else is said"
