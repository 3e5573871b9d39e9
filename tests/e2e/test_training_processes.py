"""Real training processes (gloo, no Kubernetes): resizes, a crash, and the proof that the training did not notice."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun, wait_until
from tests.nonempty import some

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

STEPS = 90
LM = [
    *("--dim=32", "--layers=2", "--heads=2", "--seq-len=32", "--corpus-kib=256"),
    *(f"--steps={STEPS}", "--epochs=2", "--global-batch=14", "--micro-batch=2", "--checkpoint-every=10"),
]
SLOWLY = "--min-step-time=0.2"  # leaves a test time to act between two steps
LOSS_TOLERANCE = 1e-4
WITH_STATE, LOWER_LEVEL = "examples/lm/train.py", "examples/lm/train_with_checkpoints.py"

MakeRun = Callable[..., TrainingRun]


@pytest.fixture(scope="module")
def make_run(fork_server: TorchForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    made: list[TrainingRun] = []

    def make(script: str, *arguments: str, **environment: str) -> TrainingRun:
        folder = tmp_path_factory.mktemp("run") / "job"
        made.append(TrainingRun(fork_server, folder, REPOSITORY / script, list(arguments), environment))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.fixture(scope="module")
def undisturbed(make_run: MakeRun) -> dict[int, float]:
    """The loss at every step of the same job at a fixed size."""
    run = make_run(LOWER_LEVEL, *LM)
    run.start(2)
    run.finish()
    losses = run.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 1, "it learns, so that equal losses say something"
    return losses


@pytest.mark.parametrize(
    "script",
    [
        pytest.param((WITH_STATE,), id="State"),
        pytest.param((LOWER_LEVEL, "--parallel=ddp"), id="ddp", marks=pytest.mark.long("variants")),
        pytest.param((LOWER_LEVEL, "--parallel=fsdp2"), id="fsdp2", marks=pytest.mark.long("variants")),
    ],
)
def test_resizes_and_a_crash_leave_no_trace_in_the_training(
    make_run: MakeRun, undisturbed: dict[int, float], script: tuple[str, ...]
) -> None:
    run = make_run(script[0], *LM, *script[1:])
    run.start(2, SLOWLY)
    run.reach(12)
    grown_at = run.drain(rank=1)
    run.start(4, SLOWLY)
    run.reach(grown_at + 12)
    shrunk_at = run.drain(rank=2)
    run.start(2, SLOWLY)
    run.reach(shrunk_at + 12)  # at least one checkpoint on the way
    run.kill(rank=1)
    run.start(2)
    run.finish()
    assert f"done: {STEPS} steps, {STEPS * 14} samples" in run.output(0)

    told = [run.output(0, generation).count("restarts the processes of this job") for generation in (1, 2, 3, 4)]
    assert told == ([0, 0, 0, 0] if script[0] == WITH_STATE else [0, 1, 0, 0]), "who does not use State, once"

    report = audit(read_logs(run.logs))
    assert report.exact, report.sentence
    assert report.completed
    assert report.lineage[0] == [1, 1, grown_at]
    assert report.lineage[1] == [2, grown_at + 1, shrunk_at]
    assert [report.steps_repeated[generation] for generation in (1, 2, 3)] == [0, 0, 0]
    assert 0 <= report.steps_repeated[4] <= 10, "a crash repeats what came after the last checkpoint, no more"

    losses = run.losses()
    assert max(abs(losses[step] / undisturbed[step] - 1) for step in undisturbed) <= LOSS_TOLERANCE

    # null: a save beside the training, and a rank but the first of a replicated state
    saved, loaded = (
        {line["step"]: line["optimizer_norm"] for line in run.lines(kind) if line["optimizer_norm"] is not None}
        for kind in ("saved", "loaded")
    )
    assert saved.keys() >= {grown_at, shrunk_at}
    assert loaded.keys() >= {grown_at, shrunk_at}
    for step in some(saved.keys() & loaded.keys()):
        assert math.isclose(float(str(loaded[step])), float(str(saved[step])), rel_tol=1e-12)


@pytest.mark.long("variants")
def test_a_crash_costs_one_step_where_memory_holds_every_step(make_run: MakeRun, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    run = make_run(LOWER_LEVEL, *LM, "--memory-every=1", ELASTIPOD_MEMORY_DIR=str(memory))
    run.start(2, SLOWLY)
    run.reach(17)  # the last durable checkpoint is of step 10
    run.kill(rank=1)
    made = run.step()
    run.start(2)
    run.finish()
    report = audit(read_logs(run.logs))
    assert report.exact, report.sentence
    assert report.lineage[1][1] >= made - 1, "it goes on from memory, not from step 10"
    assert report.steps_repeated[2] <= 2, "one step was not copied yet, another was under way"


@pytest.mark.parametrize("signalled", [[3], [1, 0, 2]], ids=["one rank", "three ranks, one after another"])
def test_signals_on_different_ranks_stop_all_at_the_same_step(make_run: MakeRun, signalled: list[int]) -> None:
    run = make_run("tests/e2e/event_worker.py", ELASTIPOD_WORKER_FILE="")  # outside a pod: SIGUSR1 is the event
    run.start(4)
    wait_until(lambda: run.alive() and all("steps are made" in run.output(rank) for rank in range(4)), "steps")
    for rank in signalled:
        run.workers[rank].send_signal(signal.SIGUSR1)
    run.finish()
    stops = [re.findall(r"^stopped at (\d+)$", run.output(rank), re.MULTILINE) for rank in range(4)]
    assert len(stops[0]) == 1
    assert stops == [stops[0]] * 4
    assert not any("rror" in run.output(rank) for rank in range(4)), "the store's host leaves last"


def test_the_digits_example_finishes_an_epoch_with_a_short_batch(make_run: MakeRun) -> None:
    run = make_run("examples/digits/train.py", "--epochs=3", "--global-batch=64")
    run.start(3)
    run.finish()
    assert "done: 72 steps, 4500 samples" in run.output(0)
    assert audit(read_logs(run.logs)).exact


@pytest.mark.slow
def test_an_example_trains_a_batch_with_fewer_samples_than_ranks(make_run: MakeRun) -> None:
    losses = []
    for world_size in (1, 3):
        run = make_run("examples/digits/train.py", "--epochs=2", "--global-batch=1499")  # the second one has one image
        run.start(world_size)
        run.finish()
        losses.append(run.losses())
    alone, spread = losses
    assert sorted(spread) == [1, 2, 3, 4]
    assert spread == pytest.approx(alone, rel=LOSS_TOLERANCE)


def test_a_second_process_of_an_old_generation_is_fenced_off(make_run: MakeRun, tmp_path: Path) -> None:
    """The new generation claims the directory while the old one still trains; the old one's next checkpoint fails."""
    run = make_run(LOWER_LEVEL, *LM, "--checkpoint-every=80")
    run.start(1, "--min-step-time=0.1")
    run.reach(2)
    (run.checkpoints / ".claims" / "gen-000002").touch()
    wait_until(lambda: not run.running(), "the fenced worker ends")
    assert run.workers[0].returncode == 1
    assert "FencedError: generation 2 has taken over" in run.output(0)
    assert not list(run.checkpoints.glob("step-*"))
