"""torchtitan's real package (tests/peers.py): its Trainer with FSDP2, on CPUs, goes over resizes 2 -> 3 -> 1 with its own checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.test_frameworks import JOB, PER_STEP, STEPS, MakeRun, check_audit, check_losses, resize_twice
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun, worker_environment
from tests.peers import peer_python

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

# What torchtitan imports, not torchtitan itself: the script says which device that has.
PRELOAD = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "datasets", "spmd_types", "tyro")


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    made: list[TrainingRun] = []
    fork_server = TorchForkServer(worker_environment(), python=str(peer_python("torchtitan")), preload=PRELOAD)

    def make(*arguments: str) -> TrainingRun:
        folder = tmp_path_factory.mktemp("run") / "job"
        script = REPOSITORY / "examples" / "torchtitan" / "train.py"
        made.append(TrainingRun(fork_server, folder, script, [*JOB, *arguments]))
        return made[-1]

    yield make
    for run in made:
        run.close()
    fork_server.close()


@pytest.mark.long("variants")
def test_the_trainer_of_torchtitan_resizes(make_run: MakeRun) -> None:
    undisturbed, run = make_run(), make_run()
    undisturbed.start(2)
    undisturbed.finish()
    grown_at, shrunk_at = resize_twice(run, PER_STEP)
    assert f"done: {STEPS} steps" in run.output(0)
    check_audit(run, grown_at, shrunk_at)
    check_losses(run.losses(), undisturbed.losses())
    assert {path.parent.name for path in run.checkpoints.glob("*/elastipod.json")} >= {f"step-{STEPS}"}


@pytest.mark.long("variants")
def test_a_torn_checkpoint_of_torchtitan_is_not_loaded(make_run: MakeRun) -> None:
    """torchtitan itself takes every folder that has metadata."""
    run = make_run("--checkpoint-every=4")
    run.start(2, PER_STEP)
    run.reach(10)
    run.kill(rank=1)
    torn, older, *_ = sorted(run.checkpoints.glob("*/elastipod.json"), key=lambda path: -int(path.parent.name[5:]))
    part = torn.parent / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-100])
    run.start(2)
    run.finish()
    assert f"{torn.parent} is not resumed from: __1_0.distcp has" in run.output(0)
    report = audit(read_logs(run.logs))
    assert report.exact, report.sentence
    assert [first for _, first, _ in report.lineage] == [1, int(older.parent.name[5:]) + 1]
