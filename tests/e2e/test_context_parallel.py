"""A training with context parallelism, whose ranks exchange keys and values: only whole replicas come and go, and no loss moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

SCRIPT = REPOSITORY / "tests" / "e2e" / "context_parallel_worker.py"
EPOCHS, TOTAL_STEPS = 3, 57  # of 300 samples, 16 in a step
LOSS_TOLERANCE = 1e-4
SLOWLY = "--min-step-time=0.2"  # leaves time to act between two steps


@pytest.fixture
def runs(fork_server: TorchForkServer, tmp_path: Path) -> Iterator[dict[str, TrainingRun]]:
    made = {
        name: TrainingRun(fork_server, tmp_path / name, SCRIPT, [f"--epochs={EPOCHS}", f"--cp={cp}"])
        for name, cp in {"alone": 1, "undisturbed": 2, "resized": 2}.items()
    }
    yield made
    for run in made.values():
        run.close()


@pytest.mark.long("variants")
def test_replicas_with_context_parallelism_go_and_come(runs: dict[str, TrainingRun]) -> None:
    alone, undisturbed, resized = runs.values()
    alone.start(1)
    alone.finish()
    expected = alone.losses()
    assert sorted(expected) == list(range(1, TOTAL_STEPS + 1))
    assert expected[TOTAL_STEPS] < expected[1] - 0.5, "it learns, so that equal losses say something"
    undisturbed.start(4)
    undisturbed.finish()
    assert undisturbed.losses() == pytest.approx(expected, rel=LOSS_TOLERANCE), "halves of a sequence see each other"

    left_at = []
    for world_size, step, leaver in ((4, 10, 3), (2, 25, 0)):
        resized.start(world_size, SLOWLY)
        resized.reach(step)
        left_at.append(resized.drain(leaver))
        assert f"{{'dp': {world_size // 2}, 'cp': 2}}, {world_size // 2} data-parallel" in resized.output(0)
    resized.start(4)
    resized.finish()
    report = audit(read_logs(resized.logs))
    assert (report.exact, report.completed) == (True, True), report
    assert [first for _, first, _ in report.lineage] == [1, *(step + 1 for step in left_at)]
    assert len(list(resized.logs.iterdir())) == 2 + 1 + 2, "one rank of each replica logs the samples"
    assert resized.losses() == pytest.approx(undisturbed.losses(), rel=LOSS_TOLERANCE)
