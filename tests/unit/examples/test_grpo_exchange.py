"""The folder in which GRPO's trainers and helpers exchange policies and rollouts, over several runs."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.unit.examples.scripts import load_script


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_script("grpo", monkeypatch)


def test_trainers_begin_with_an_empty_exchange(grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, policy = grpo.Exchange(tmp_path / "exchange"), grpo.Policy()
    exchange.offer("1-1", 1, [0], policy)  # by an earlier run, which was killed
    exchange.finish("1-1", 0, {"words": "of an earlier policy"})
    (exchange.folder / "done").touch()
    (exchange.folder / "mine").mkdir()
    seen: list[list[str]] = []
    offer = exchange.offer

    def first_offer(self: Any, *arguments: Any) -> None:
        seen.append(sorted(os.listdir(exchange.folder)))
        offer(*arguments)

    monkeypatch.setattr(grpo.Exchange, "offer", first_offer)
    train(grpo, tmp_path, epochs=1)
    assert seen[0] == ["mine"]
    assert sorted(os.listdir(exchange.folder)) == ["done", "mine"]


@pytest.mark.slow
def test_trainers_that_go_on_take_away_that_they_were_done(
    grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(grpo, tmp_path, epochs=1)
    was_done: list[bool] = []
    offer = grpo.Exchange.offer

    def next_offer(self: Any, *arguments: Any) -> None:
        was_done.append((self.folder / "done").exists())
        offer(self, *arguments)

    monkeypatch.setattr(grpo.Exchange, "offer", next_offer)
    train(grpo, tmp_path, epochs=2)
    assert was_done == [False]


@pytest.mark.slow
def test_trainers_save_every_so_many_steps(grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = grpo.CheckpointManager.save

    def noted(self: Any, step: int, **state: Any) -> None:
        saved.append(step)
        save(self, step, **state)

    monkeypatch.setattr(grpo.CheckpointManager, "save", noted)
    train(grpo, tmp_path, epochs=5, checkpoint_every=2)
    assert saved == [2, 4, 5]


def test_a_helper_waits_for_trainers_that_may_start_beside_it(
    grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    done.touch()  # of an earlier run
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        """Trainers start, train and end."""
        sleeps.append(seconds)
        if len(sleeps) == 2:
            done.unlink()
        if len(sleeps) == 4:
            done.touch()

    monkeypatch.setattr(grpo.time, "sleep", sleep)
    grpo.help_with_rollouts(Namespace(exchange_dir=tmp_path))
    assert len(sleeps) == 4


def test_a_helper_that_starts_after_the_end_ends_too(
    grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "done").touch()
    monkeypatch.setattr(grpo, "TRAINERS_START_S", 0.0)
    grpo.help_with_rollouts(Namespace(exchange_dir=tmp_path))


def train(grpo: Any, folder: Path, *, epochs: int, checkpoint_every: int = 100) -> None:
    """Train on one rank to the end; an epoch is one step."""
    options = Namespace(
        exchange_dir=folder / "exchange",
        checkpoint_dir=folder / "checkpoints",
        sample_log_dir=folder / "samples",
        prompts=2,
        epochs=epochs,
        checkpoint_every=checkpoint_every,
        rollout_time=0.0,
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        grpo.train(options)
    finally:
        dist.destroy_process_group()
