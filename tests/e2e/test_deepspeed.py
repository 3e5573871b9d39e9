"""DeepSpeed's real package (tests/peers.py): each ZeRO stage goes over resizes 2 -> 3 -> 1 by way of universal checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.test_frameworks import JOB, PER_STEP, STEPS, MakeRun, check_audit, check_losses, resize_twice
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun, worker_environment
from tests.peers import peer_python


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    made: list[TrainingRun] = []
    python = peer_python("deepspeed")
    settings = {"DS_ACCELERATOR": "cpu"}
    environment = {**worker_environment(), **settings}
    fork_server = TorchForkServer(environment, python=str(python), preload=("deepspeed_unbuilt",))

    def make(*arguments: str) -> TrainingRun:
        folder = tmp_path_factory.mktemp("run") / "job"
        script = REPOSITORY / "examples" / "deepspeed" / "train.py"
        made.append(TrainingRun(fork_server, folder, script, list(arguments), settings))
        return made[-1]

    yield make
    for run in made:
        run.close()
    fork_server.close()


@pytest.mark.long("variants")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_of_zero_resizes(make_run: MakeRun, stage: int) -> None:
    undisturbed, run = (make_run(f"--stage={stage}", *JOB) for _ in range(2))
    undisturbed.start(2)
    undisturbed.finish()
    grown_at, shrunk_at = resize_twice(run, PER_STEP)
    assert f"done: {STEPS} steps" in run.output(0)
    check_audit(run, grown_at, shrunk_at)
    check_losses(run.losses(), undisturbed.losses())
    left = {path.name for path in run.checkpoints.glob("*step-*")}
    assert left == {f"step-{shrunk_at}", f"step-{STEPS}"}, "what was converted is deleted, and old checkpoints are"


@pytest.mark.long("variants")
def test_without_a_resize_nothing_is_converted(make_run: MakeRun) -> None:
    run = make_run("--stage=3", *JOB)
    run.start(2, PER_STEP)
    run.reach(5)
    run.drain(rank=1)
    run.start(2)
    run.finish()
    assert "Convert DeepSpeed Checkpoint" not in run.output(0)
    assert f"done: {STEPS} steps" in run.output(0)
