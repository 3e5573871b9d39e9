"""Data and batches with real processes (gloo): gradients of any world, and runs whose size changes all the time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.data_run import STEPS, DataRun, Stay, stays
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun
from tests.long_runs import LongRun

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

CASES = 6
SEED = 2  # of a fate with crashes
LOSS_TOLERANCE = 1e-4
LONG_RUNS = 12


@pytest.fixture(scope="module")
def undisturbed(fork_server: TorchForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss at every step of the same job, trained by one process from beginning to end."""
    return losses_of(fork_server, tmp_path_factory.mktemp("undisturbed"), "fixed-order", [Stay(1, STEPS)])


def losses_of(fork_server: TorchForkServer, folder: Path, mode: str, fate: list[Stay]) -> dict[int, float]:
    """Play a job and audit it; gives its losses by step."""
    job = DataRun(fork_server, folder / "run", mode)
    try:
        job.play(fate)
        report = audit(read_logs(job.run.logs))
        assert report.exact, report.sentence
        assert report.completed
        losses = job.run.losses()
        assert sorted(losses) == list(range(1, STEPS + 1))
        return losses
    finally:
        job.run.close()


@pytest.mark.long("data")
def test_ddp_fsdp2_and_hsdp_give_the_gradient_of_one_process(
    fork_server: TorchForkServer, tmp_path: Path, seed: int
) -> None:
    """Random small models, four ranks: even and uneven parts, passes of any size, a short last batch."""
    script = REPOSITORY / "tests" / "e2e" / "gradient_worker.py"
    run = TrainingRun(fork_server, tmp_path / "job", script, [str(CASES), str(seed)])
    try:
        run.start(4)
        run.finish()
        (line,) = [line for line in run.output(0).splitlines() if line.startswith("{")]
    finally:
        run.close()
    found = json.loads(line)
    assert found["cases"] == 3 * CASES
    assert found["worst"] < 1e-10
    assert found["refused"] == 3, "of four ranks with four seeds the first one is right"
    assert found["reductions"] == found["expected"] > 3 * CASES, "one reduction per step, however many passes it has"


@pytest.mark.long("data")
def test_resizes_and_crashes_leave_every_bit_of_the_loss_as_it_was(
    fork_server: TorchForkServer, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """Sums in a fixed order: not nearly the same losses but the same ones."""
    fate = stays(SEED, resizes=4)
    assert any(stay.dies is not None for stay in fate)
    assert losses_of(fork_server, tmp_path, "fixed-order", fate) == undisturbed
    assert undisturbed[STEPS] < undisturbed[1] - 1, "it learns, so that equal losses say something"


@pytest.mark.long("data")
def test_resizes_under_ddp_change_the_loss_by_rounding_only(
    fork_server: TorchForkServer, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    losses = losses_of(fork_server, tmp_path, "ddp", stays(SEED + 1, resizes=2))
    assert max(abs(losses[step] / undisturbed[step] - 1) for step in undisturbed) <= LOSS_TOLERANCE


@pytest.mark.long("data")
@pytest.mark.timeout(3600)
def test_a_dozen_jobs_with_ten_resizes_are_exact(
    fork_server: TorchForkServer, undisturbed: dict[int, float], tmp_path: Path, long_run: LongRun
) -> None:
    worst, num_bitwise, crashes = 0.0, 0, 0
    for number in range(LONG_RUNS):
        fate = stays(long_run.seed + 100 + number)
        crashes += sum(stay.dies is not None for stay in fate)
        mode = ("fixed-order", "ddp")[number % 2]
        losses = losses_of(fork_server, tmp_path / str(number), mode, fate)
        if mode == "ddp":
            worst = max(worst, *(abs(losses[step] / undisturbed[step] - 1) for step in undisturbed))
        else:
            assert losses == undisturbed, f"run {number}"
            num_bitwise += 1
        long_run.count(real_runs=number + 1, bitwise=num_bitwise, crashes=crashes, worst_relative_loss=worst)
    assert worst <= LOSS_TOLERANCE
