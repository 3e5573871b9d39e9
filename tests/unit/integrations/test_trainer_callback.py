"""Which checkpoints of Hugging Face's Trainer count, played in the order in which it evaluates, saves and calls back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastipod.data.elastic_batches import ElasticBatches
from elastipod.integrations.elastic_run import ElasticRun
from elastipod.integrations.marks import MarkedCheckpoints

PLAN = ElasticBatches(8, 4, epochs=2)


class PlayedTrainer:
    """Two epochs of two steps. Strategies as in TrainingArguments; best: the steps whose evaluation finds a better model."""

    def __init__(
        self, integration: Any, folder: Path, save_strategy: str, eval_strategy: str, best: tuple[int, ...] = ()
    ) -> None:
        self.run = ElasticRun(PLAN, MarkedCheckpoints(folder, integration.CHECKPOINT), max_micro_batch=4)
        self.own = integration.ElasticTrainerCallback(
            SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[])), self.run
        )
        self.args = SimpleNamespace(save_strategy=save_strategy, eval_strategy=eval_strategy)
        self.state = SimpleNamespace(global_step=0, max_steps=4)
        self.control = SimpleNamespace(should_save=False, should_evaluate=False, should_training_stop=False)
        self.best = best
        self.during_evaluations: list[int] = []  # the steps that a process would resume from that starts then

    def train(self) -> list[int]:
        """Give the steps whose checkpoints count at the end."""
        for _ in range(2):
            for _ in range(2):
                self.state.global_step += 1
                self._end("steps", self.own.on_step_end)
            self._end("epoch", self.own.on_epoch_end)
        folder = self.run.checkpoints.directory
        return sorted(int(mark.parent.name.partition("-")[2]) for mark in folder.glob("*/elastipod.json"))

    def _end(self, of: str, call: Any) -> None:
        self.control.should_save = self.args.save_strategy == of
        self.control.should_evaluate = self.args.eval_strategy == of
        call(self.args, self.state, self.control)
        if self.control.should_evaluate:
            newest = self.run.checkpoints.newest()
            self.during_evaluations.append(newest.step if newest else 0)
            if self.args.save_strategy == "best":
                self.control.should_save = self.state.global_step in self.best
        if self.control.should_save:
            (self.run.checkpoints.directory / f"checkpoint-{self.state.global_step}").mkdir(exist_ok=True)
            self.own.on_save(self.args, self.state, self.control)


@pytest.mark.parametrize(
    ("save", "evaluate", "best", "counts", "meanwhile"),
    [
        pytest.param("steps", "epoch", (), [1, 2, 3, 4], [2, 4], id="an evaluation after the save of its step"),
        pytest.param("steps", "steps", (), [1, 2, 3, 4], [0, 1, 2, 3], id="an evaluation before the save of its step"),
        pytest.param("epoch", "steps", (), [2, 4], [0, 0, 2, 2], id="a save after the evaluation of its step"),
        pytest.param("epoch", "epoch", (), [2, 4], [0, 2], id="both at the end of an epoch"),
        pytest.param("best", "steps", (1, 4), [1, 4], [0, 1, 1, 1], id="saves of the best steps"),
        pytest.param("best", "epoch", (2,), [2], [0, 2], id="a save of the best epoch"),
    ],
)
def test_a_checkpoint_that_is_complete_counts_through_evaluations(
    tmp_path: Path,
    trainer_integration: Any,
    save: str,
    evaluate: str,
    best: tuple[int, ...],
    counts: list[int],
    meanwhile: list[int],
) -> None:
    trainer = PlayedTrainer(trainer_integration, tmp_path, save, evaluate, best)
    assert trainer.train() == counts
    assert trainer.during_evaluations == meanwhile


def test_a_step_that_the_best_strategy_may_save_again_does_not_count_meanwhile(
    tmp_path: Path, trainer_integration: Any
) -> None:
    """The save would overwrite its files."""
    trainer = PlayedTrainer(trainer_integration, tmp_path, "best", "epoch", best=(2,))
    trainer.state.global_step = 2
    trainer.run.step_done(2)
    path = tmp_path / "checkpoint-2"
    trainer.run.begin_save(path)
    path.mkdir()
    trainer.run.finish_save(path)
    trainer._end("epoch", trainer.own.on_epoch_end)
    assert trainer.during_evaluations == [0]
    assert trainer.run.checkpoints.newest() is not None
