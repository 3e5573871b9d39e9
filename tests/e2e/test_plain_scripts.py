"""The examples of the first two tiers with real processes: a script as it is, and one with the event and a save."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun, wait_until
from tests.slow import all_but_first

STEPS, CHECKPOINT_EVERY = 50, 10  # two epochs
LOSS_TOLERANCE = 1e-4
TOLD = "each resize and recovery restarts the processes of this job"


class PlainRun:
    """A job of one of these scripts, which write no sample log and report nothing: what it did is what it printed."""

    def __init__(self, fork_server: TorchForkServer, folder: Path, example: str) -> None:
        script = REPOSITORY / "examples" / example / "train.py"
        arguments = [f"--steps={STEPS}", f"--checkpoint-every={CHECKPOINT_EVERY}"]
        self.run = TrainingRun(fork_server, folder, script, arguments, has_sample_log=False)

    def steps(self, generation: int) -> dict[int, float]:
        """Give the losses that a generation printed."""
        printed = re.findall(r"^step (\d+) loss (\S+) workers", self.run.output(0, generation), re.MULTILINE)
        return {int(step): float(loss) for step, loss in printed}

    def losses(self) -> dict[int, float]:
        """Give the loss of each step, of the last generation that made it."""
        found: dict[int, float] = {}
        for generation in range(1, self.run.generation + 1):
            found |= self.steps(generation)
        return found

    def start(self, world_size: int, *, until_step: int) -> None:
        self.run.start(world_size, "--min-step-time=0.15")  # leaves a test time to act between two steps
        wait_until(
            lambda: self.run.alive() and max(self.steps(self.run.generation), default=0) >= until_step,
            f"step {until_step} at {world_size} workers",
        )

    def state(self) -> tuple[int, list[torch.Tensor]]:
        saved = torch.load(self.run.checkpoints / "newest.pt")
        return saved["step"], list(saved["model"].values())


@pytest.fixture(scope="module")
def undisturbed(fork_server: TorchForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainRun]:
    """Both scripts train the same when nothing happens."""
    alone = PlainRun(fork_server, tmp_path_factory.mktemp("undisturbed") / "job", "plain")
    alone.run.start(2)
    alone.run.finish()
    yield alone
    alone.run.close()


@pytest.mark.parametrize("example", all_but_first(["plain", "two_lines"]))
def test_a_script_with_its_own_checkpoint_goes_on_at_other_sizes(
    fork_server: TorchForkServer, undisturbed: PlainRun, tmp_path: Path, example: str
) -> None:
    resized = PlainRun(fork_server, tmp_path / "resized", example)
    try:
        for size, until_step in ((2, 12), (3, 26)):
            resized.start(size, until_step=until_step)
            if example == "plain":
                resized.run.kill(rank=size - 1)  # it never asks, so nobody waits for it
            else:
                resized.run.drain(rank=size - 1)
        resized.run.start(1)
        resized.run.finish()
        assert f"done: {STEPS} steps" in resized.run.output(0)
        made = [sorted(resized.steps(generation)) for generation in (1, 2, 3)]
        told = [resized.run.output(*place).count(TOLD) for place in ((0, 1), (0, 2), (1, 2), (0, 3))]
        (step, weights), (same_step, same_weights) = undisturbed.state(), resized.state()
    finally:
        resized.run.close()
    assert told == ([0, 0, 0, 0] if example == "plain" else [0, 1, 0, 0]), (
        "who asks for the event, once: rank 0, generation 2"
    )
    for before, after in itertools.pairwise(made):
        if example == "plain":
            assert after[0] % CHECKPOINT_EVERY == 1, "it resumes after its newest checkpoint"
            assert 1 < after[0] <= before[-1] + 1 <= after[0] + CHECKPOINT_EVERY
        else:
            assert after[0] == before[-1] + 1, "no step is lost and none repeated"
    expected, found = undisturbed.losses(), resized.losses()
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] * 0.8, "it learns, so that equal losses say something"
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert step == same_step == STEPS
    torch.testing.assert_close(same_weights, weights, rtol=1e-3, atol=1e-5)
