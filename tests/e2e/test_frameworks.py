"""Frameworks with their real packages (tests/peers.py): resizes 2 -> 3 -> 1 leave no trace in the training."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun, wait_until, worker_environment
from tests.patience import PATIENCE_S
from tests.peers import peer_python

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

LOSS_TOLERANCE = 1e-4
# No world size divides the global batch, nor the batch the data: passes have different sizes, and a rank may have none.
SAMPLES, EPOCHS, GLOBAL_BATCH = 197, 2, 13  # the last batch of an epoch has two samples
EPOCH_END = -(-SAMPLES // GLOBAL_BATCH)
STEPS = EPOCHS * EPOCH_END
JOB = [f"--samples={SAMPLES}", f"--epochs={EPOCHS}", f"--global-batch={GLOBAL_BATCH}"]
PRELOAD = ("transformers.trainer", "transformers.models.llama", "accelerate", "lightning.pytorch", "datasets")

MakeRun = Callable[..., TrainingRun]


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    made: list[TrainingRun] = []
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("hugging-face"))}
    fork_server = TorchForkServer(
        {**worker_environment(), **offline}, python=str(peer_python("frameworks")), preload=PRELOAD
    )

    def make(script: str, *arguments: str, **environment: str) -> TrainingRun:
        folder = tmp_path_factory.mktemp("run") / "job"
        run = TrainingRun(fork_server, folder, REPOSITORY / script, list(arguments), {**offline, **environment})
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()
    fork_server.close()


def resize_twice(run: TrainingRun, slowly: str) -> tuple[int, int]:
    """Train at 2, then 3, then 1 workers to the end; gives the steps after which the world changed.

    slowly: the script's argument that leaves time to act between two steps.
    """
    run.start(2, slowly)
    run.reach(5)
    grown_at = run.drain(rank=1)  # one rank is told, all leave
    run.start(3, slowly)
    run.reach(EPOCH_END + 2)  # the three have trained a batch of two samples
    shrunk_at = run.drain(rank=2)
    run.start(1)
    run.finish()
    return grown_at, shrunk_at


def check_audit(run: TrainingRun, grown_at: int, shrunk_at: int) -> None:
    """Check that every sample was trained once in each epoch, and no step twice."""
    report = audit(read_logs(run.logs))
    assert report.exact, report.sentence
    assert report.completed
    assert report.lineage == [[1, 1, grown_at], [2, grown_at + 1, shrunk_at], [3, shrunk_at + 1, STEPS]]
    assert sum(report.steps_repeated.values()) == 0


def trainer_losses(run: TrainingRun) -> dict[int, float]:
    """Give the loss of each step as the Trainer recorded it in its last checkpoint."""
    state = json.loads((run.checkpoints / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def check_losses(losses: dict[int, float], undisturbed: dict[int, float]) -> None:
    assert sorted(losses) == sorted(undisturbed) == list(range(1, STEPS + 1))
    assert undisturbed[STEPS] < undisturbed[1] * 0.9, "it learns, so that equal losses say something"
    assert max(abs(losses[step] / undisturbed[step] - 1) for step in undisturbed) <= LOSS_TOLERANCE


PER_SAMPLE, PER_STEP = "--sample-time=0.06", "--min-step-time=0.4"  # seconds

TRAINERS = {
    "tokens": ("examples/hf_trainer/train.py", "--jit"),
    "mean": ("tests/e2e/trainer_worker.py", "mean"),
    "TRL SFT": ("tests/e2e/trainer_worker.py", "sft"),
    "LoRA SFT": ("examples/lora/train.py",),
    # It gathers numbers of each sample, so its passes must have one size. Later options win.
    "TRL DPO": ("tests/e2e/trainer_worker.py", "dpo", "--samples=192", "--global-batch=12"),
    "LoRA DPO": (
        "examples/lora/train.py",
        "--method=dpo",
        "--samples=192",
        "--global-batch=12",
    ),
}


VARIANT = pytest.mark.long("variants")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=name, marks=pytest.mark.slow if name == "tokens" else VARIANT)
        for name, script in TRAINERS.items()
    ],
)
def test_the_trainer_resizes(make_run: MakeRun, script: tuple[str, ...]) -> None:
    name, *options = script
    undisturbed, run = (make_run(name, *JOB, *options) for _ in range(2))
    undisturbed.start(2)
    undisturbed.finish()
    grown_at, shrunk_at = resize_twice(run, PER_SAMPLE if "hf_trainer" in name else PER_STEP)
    assert f"done: {STEPS} steps" in run.output(0)
    check_audit(run, grown_at, shrunk_at)
    check_losses(trainer_losses(run), trainer_losses(undisturbed))
    marks = [json.loads(path.read_text()) for path in run.checkpoints.glob("checkpoint-*/elastipod.json")]
    assert {shrunk_at, STEPS} <= {mark["step"] for mark in marks}


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_one_step_on_all_ranks_outside_a_pod(make_run: MakeRun) -> None:
    run = make_run("examples/hf_trainer/train.py", *JOB, PER_SAMPLE, "--jit", ELASTIPOD_WORKER_FILE="")
    run.start(2)
    wait_until(lambda: run.alive() and "'loss'" in run.output(0), "the first step")
    run.workers[1].send_signal(signal.SIGTERM)
    run.finish()
    assert "done" not in run.output(0)
    assert len(list(run.checkpoints.glob("checkpoint-*/elastipod.json"))) == 1


@pytest.mark.slow
def test_a_torn_checkpoint_is_not_resumed_from(make_run: MakeRun) -> None:
    """A crash while the Trainer writes leaves a folder that looks like a checkpoint to the Trainer itself."""
    run = make_run("examples/hf_trainer/train.py", *JOB, "--save-steps=4")
    run.start(2, PER_SAMPLE)
    run.reach(10)
    run.kill(rank=1)
    newest = max(
        run.checkpoints.glob("checkpoint-*/elastipod.json"), key=lambda path: int(path.parent.name.split("-")[1])
    )
    weights = newest.parent / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    run.start(2)
    run.finish()
    assert f"{newest.parent} is not resumed from: model.safetensors has" in run.output(0)
    report = audit(read_logs(run.logs))
    assert report.exact, report.sentence
    assert report.steps_repeated[2] >= 4


@VARIANT
def test_a_trainer_that_is_started_again_after_an_end_within_an_epoch_makes_no_step(make_run: MakeRun) -> None:
    run = make_run("examples/hf_trainer/train.py", *JOB, "--epochs=1.5")
    for _ in range(2):
        run.start(2)
        run.finish()
        assert f"done: {-(-3 * EPOCH_END // 2)} steps" in run.output(0)


@pytest.mark.parametrize("example", [pytest.param("accelerate", marks=VARIANT), "lightning"])
def test_a_loop_of_accelerate_or_lightning_resizes(make_run: MakeRun, example: str) -> None:
    script = f"examples/{example}/train.py"
    undisturbed = make_run(script, *JOB)
    for _ in range(2):  # once more after its end: it has no step to make, and ends well
        undisturbed.start(2)
        undisturbed.finish()
        assert f"done: {STEPS} steps" in undisturbed.output(0)
    run = make_run(script, *JOB)
    grown_at, shrunk_at = resize_twice(run, PER_SAMPLE)
    assert f"done: {STEPS} steps" in run.output(0)
    check_audit(run, grown_at, shrunk_at)
    check_losses(run.losses(), undisturbed.losses())


@VARIANT
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((f"--steps={STEPS}",), id="of unknown length"),
        pytest.param(("--count", f"--epochs={EPOCHS}"), id="counted"),
    ],
)
def test_a_stream_resizes(make_run: MakeRun, tmp_path: Path, options: tuple[str, ...]) -> None:
    """The example's files have 188 samples: with 12 in a batch, two counted epochs have as many steps as the other jobs."""
    arguments = ("examples/streaming/train.py", f"--data-dir={tmp_path}", *options)
    undisturbed = make_run(*arguments)
    undisturbed.start(2)
    undisturbed.finish()
    run = make_run(*arguments)
    grown_at, shrunk_at = resize_twice(run, PER_STEP)
    assert f"done: {STEPS} steps" in run.output(0)
    check_audit(run, grown_at, shrunk_at)
    check_losses(run.losses(), undisturbed.losses())


DRAINS = [EPOCH_END - 2, EPOCH_END, EPOCH_END + 2]  # the event is heard from the second step of a generation on
LEAVES = ("--leave-after", *map(str, DRAINS))


@pytest.mark.parametrize(
    "script",
    [
        ("tests/e2e/trainer_worker.py", "mean", "--dropout=0.2"),
        pytest.param(("tests/e2e/lightning_worker.py",), marks=VARIANT),
    ],
)
def test_drains_around_the_end_of_an_epoch_leave_no_trace_not_even_in_random_numbers(
    make_run: MakeRun, script: tuple[str, ...]
) -> None:
    """At one size, where the random numbers are the same ones too, every loss is the same."""
    undisturbed, run = (make_run(*script, *JOB, *leaves, ELASTIPOD_WORKER_FILE="") for leaves in ((), LEAVES))
    undisturbed.start(1)
    undisturbed.finish()
    for _ in range(4):
        run.start(1)
        run.finish()
        is_done = "done" in run.output(0)
    assert is_done
    report = audit(read_logs(run.logs))
    assert report.exact, report.sentence
    assert [first for _, first, _ in report.lineage] == [1, *(step + 1 for step in DRAINS)]
    losses = [trainer_losses(each) if "trainer" in script[0] else each.losses() for each in (undisturbed, run)]
    assert losses[0] == losses[1]
    assert sorted(losses[0]) == list(range(1, STEPS + 1))


REFUSED = {
    "trainer: stream": "gives no sample by its index",
    "trainer: grouped": "set 'random' or 'sequential'",
    "trainer: auto_find_batch_size": "TrainingArguments.auto_find_batch_size is True; an exact resize needs False",
    "trainer: ignore_data_skip": "TrainingArguments.ignore_data_skip is True; an exact resize needs False",
    "trainer: dataloader_drop_last": "TrainingArguments.dataloader_drop_last is True; an exact resize needs False",
    "trainer: average_tokens_across_devices": "average_tokens_across_devices is False; an exact resize needs True",
    "trainer: save_only_model": "TrainingArguments.save_only_model is True; an exact resize needs False",
    "trainer: resume_from_checkpoint": "resume_from_checkpoint cannot be given",
    "trainer: one checkpoint": "save_total_limit is 1, so the Trainer deletes the last checkpoint before",
    "trainer: own order": "OwnOrder has a get_train_dataloader of its own",
    "trainer: FSDP1": "set fsdp_config={'version': 2}",
    "trainer: DeepSpeed": "belong to one world size; use DDP",
    "trainer: several devices": "one process drives 2 devices (DataParallel); start one process per device",
    "trainer: GRPO": "GRPOTrainer has a get_train_dataloader of its own, so it chooses which samples a step trains",
    "trainer: RLOO": "RLOOTrainer has a get_train_dataloader of its own, so it chooses which samples a step trains",
    "trainer: KTO": "of its own, so it chooses which samples a step trains",
    "accelerate: DeepSpeed": "DEEPSPEED, whose checkpoints belong to one world size; use DDP or FSDP2",
    "accelerate: Megatron-LM": "MEGATRON_LM, whose checkpoints belong to one world size; use DDP or FSDP2",
    "accelerate: no backward": "step.backward(loss) was not called in a pass; call it once",
    "accelerate: backward twice": "step.backward(loss) was called twice in a pass",
    "accelerate: stream": "gives no sample by its index",
    "accelerate: batch_sampler": "give it batch_size, the maximum for one pass, instead",
    "accelerate: subset": "the loader has a SubsetRandomSampler",
    "accelerate: drop_last": "the loader has drop_last=True",
    "accelerate: prepared loader": "leave it out of accelerator.prepare",
    "accelerate: prepared scheduler": "the learning rate would depend on the world size",
    "accelerate: accumulation": "the number of passes follows from global_batch",
    "lightning: stream": "gives no sample by its index",
    "lightning: batch_sampler": "give it batch_size, the maximum for one pass, instead",
    "lightning: subset": "the loader has a SubsetRandomSampler",
    "lightning: drop_last": "the loader has drop_last=True",
    "lightning: no loader": "loader is a list; give torch's DataLoader",
    "lightning: accumulation": "Trainer(accumulate_grad_batches=3); an exact resize needs 1, so leave it out",
    "lightning: limit": "Trainer(limit_train_batches=4); an exact resize needs 1.0, so leave it out",
    "lightning: no end": "neither max_epochs nor max_steps",
    "lightning: no loss": "training_step gave no loss in step 1, whose passes all count",
    "lightning: manual": "automatic_optimization = False",
    "lightning: FSDP1": "use DDPStrategy, or ModelParallelStrategy, which is FSDP2",
    "lightning: DeepSpeed": "belong to one world size; use DDPStrategy",
    "lightning: ckpt_path": "ckpt_path cannot be given",
}


@pytest.mark.long("variants")
def test_what_a_resize_could_not_keep_exact_is_refused_in_one_sentence(tmp_path: Path) -> None:
    script = REPOSITORY / "tests" / "e2e" / "framework_refusals.py"
    done = subprocess.run(
        [peer_python("frameworks"), script, tmp_path / "out"],
        env=worker_environment(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sentences = json.loads(done.stdout.splitlines()[-1])
    assert sorted(sentences) == sorted(REFUSED)
    for case, text in REFUSED.items():
        assert text in sentences[case], case
        assert "\n" not in sentences[case]
