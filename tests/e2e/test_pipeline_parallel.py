"""The example of pipeline parallelism with real processes: a resize moves no loss, and a world that splits a pipeline is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

SCRIPT = REPOSITORY / "examples" / "pipeline_parallel" / "train.py"
TOTAL_STEPS = 57  # 3 epochs of 300 samples, 16 in a step; the last step of an epoch has 12
LOSS_TOLERANCE = 1e-4


@pytest.mark.long("variants")
def test_a_pipeline_goes_on_with_other_numbers_of_replicas(fork_server: TorchForkServer, tmp_path: Path) -> None:
    runs = [TrainingRun(fork_server, tmp_path / name, SCRIPT, ["--epochs=3"]) for name in ("undisturbed", "resized")]
    undisturbed, resized = runs
    try:
        undisturbed.start(2)
        undisturbed.finish()
        expected = undisturbed.losses()
        assert expected[TOTAL_STEPS] < expected[1] - 0.5, "it learns, so that equal losses say something"

        stopped_at = 0
        for size, rank in ((4, 3), (2, 0)):
            resized.start(size, "--min-step-time=0.2")  # leaves time to act between two steps
            resized.reach(stopped_at + 10)
            stopped_at = resized.drain(rank)
        assert 20 <= stopped_at < TOTAL_STEPS
        resized.start(4)
        resized.finish()
        report = audit(read_logs(resized.logs))
        assert (report.exact, report.completed) == (True, True), report
        found = resized.losses()
    finally:
        for run in runs:
            run.close()
    assert sorted(found) == sorted(expected) == list(range(1, TOTAL_STEPS + 1))
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_a_world_that_splits_a_pipeline_is_refused_with_those_that_fit(
    fork_server: TorchForkServer, tmp_path: Path
) -> None:
    run = TrainingRun(fork_server, tmp_path / "refused", SCRIPT, [])
    try:
        run.check_refused(3, "3 ranks form no whole model groups of 2 (pipeline 2); world sizes that fit: 2, 4, 6")
    finally:
        run.close()
