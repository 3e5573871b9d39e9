"""The GRPO example with real processes: trainers resize between phases, and helpers with the rollouts come, go and are killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.e2e.torch_fork_server import ForkedTestWorker, TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun, wait_until, worker_environment
from tests.patience import PATIENCE_S

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

SCRIPT = REPOSITORY / "examples" / "grpo" / "train.py"
TOTAL_STEPS = 26  # 2 epochs of 200 prompts, 16 in a step; the last step of an epoch has 8
LOSS_TOLERANCE = 1e-4


@pytest.mark.long("variants")
def test_trainers_resize_between_phases_and_helpers_come_and_go(fork_server: TorchForkServer, tmp_path: Path) -> None:
    exchange = tmp_path / "exchange"
    alone = TrainingRun(fork_server, tmp_path / "alone", SCRIPT, ["--epochs=2", f"--exchange-dir={tmp_path / 'none'}"])
    run = TrainingRun(fork_server, tmp_path / "run", SCRIPT, ["--epochs=2", f"--exchange-dir={exchange}"])
    slowly = "--rollout-time=0.8"  # leaves time to act between two steps
    helpers: list[ForkedTestWorker] = []

    def add_helper() -> None:
        command = [str(SCRIPT), "--role=rollout", f"--exchange-dir={exchange}"]
        output = tmp_path / f"helper-{len(helpers)}"
        helpers.append(fork_server.start(command, worker_environment(), output))
        wait_until(
            lambda: run.alive() and output.exists() and "made " in output.read_text(), "a rollout by the new helper"
        )

    try:
        alone.start(2)
        alone.finish()
        expected = alone.losses()

        run.start(2, slowly)
        add_helper()
        add_helper()
        pids = [worker.pid for worker in run.workers]
        helpers[0].kill()  # whatever it was doing
        helpers[0].wait(PATIENCE_S)
        run.reach(run.step() + 2)
        assert [worker.pid for worker in run.workers] == pids, "no trainer was started anew"
        stopped_at = run.drain(1)
        assert stopped_at < TOTAL_STEPS
        run.start(3, slowly)
        run.reach(stopped_at + 2)
        stopped_at = run.drain(2)
        assert stopped_at < TOTAL_STEPS
        helpers[1].kill()
        helpers[1].wait(PATIENCE_S)
        run.start(1, slowly)
        add_helper()
        run.finish()
        assert helpers[2].wait(PATIENCE_S) == 0, "helpers end when the trainers are done"
        report = audit(read_logs(run.logs))
        assert (report.exact, report.completed, sum(report.steps_repeated.values())) == (True, True, 0), report
        found = run.losses()
        helped = [int(count) for count in re.findall(r"(\d+) of \d+ rollouts by helpers", run.output(0))]
        assert sum(helped) > 0
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait(PATIENCE_S)
        alone.close()
        run.close()
    assert sorted(found) == sorted(expected) == list(range(1, TOTAL_STEPS + 1))
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
