"""The example of tensor parallelism and HSDP with real processes: a resize moves no loss, and a world that splits a group is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

SCRIPT = REPOSITORY / "examples" / "tensor_parallel" / "train.py"
TOTAL_STEPS = 57  # 3 epochs of 300 samples, 16 in a step
LOSS_TOLERANCE = 1e-4


@pytest.fixture
def make_run(fork_server: TorchForkServer, tmp_path: Path) -> Iterator[type[TrainingRun] | object]:
    made: list[TrainingRun] = []

    def make(name: str, *arguments: str) -> TrainingRun:
        made.append(TrainingRun(fork_server, tmp_path / name, SCRIPT, ["--epochs=3", *arguments]))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.mark.parametrize(
    ("axes", "two_ranks"),
    [
        pytest.param(
            ("--tp=2",), "{'dp': 1, 'tp': 2}, 1 data-parallel", id="TP x DP", marks=pytest.mark.long("variants")
        ),
        pytest.param(
            ("--tp=1", "--shard=2"),
            "{'dp': 1, 'shard': 2}, 2 data-parallel",
            id="HSDP",
            marks=pytest.mark.long("variants"),
        ),
    ],
)
def test_a_training_of_two_model_groups_goes_on_with_one(
    make_run: object, axes: tuple[str, ...], two_ranks: str
) -> None:
    assert callable(make_run)
    undisturbed, resized = make_run("undisturbed", *axes), make_run("resized", *axes)
    undisturbed.start(4)
    undisturbed.finish()
    expected = undisturbed.losses()
    assert expected[TOTAL_STEPS] < expected[1] - 0.5, "it learns, so that equal losses say something"

    resized.start(4, "--min-step-time=0.2")  # leaves time to act between two steps
    resized.reach(15)
    stopped_at = resized.drain(3)
    assert 15 <= stopped_at < TOTAL_STEPS
    resized.start(2)
    resized.finish()
    assert two_ranks in resized.output(0)
    report = audit(read_logs(resized.logs))
    assert (report.exact, report.completed) == (True, True), report
    found = resized.losses()
    assert sorted(found) == sorted(expected) == list(range(1, TOTAL_STEPS + 1))
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_a_world_that_splits_a_model_group_is_refused_with_those_that_fit(make_run: object) -> None:
    assert callable(make_run)
    sentence = "3 ranks form no whole model groups of 2 (tensor 2); world sizes that fit: 2, 4, 6"
    make_run("refused").check_refused(3, sentence, "spec.elastipod.parallelism: 2 keeps the job to such sizes")
