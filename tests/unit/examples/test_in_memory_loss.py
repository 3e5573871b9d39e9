"""The loss that the example with its state in memory reports: the mean over the global batch, as every other script does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from numpy.random import default_rng
from tests.unit.examples.scripts import load_script


def test_the_loss_of_a_step_is_the_mean_over_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, package = default_rng(0), ModuleType("sklearn.datasets")  # which takes seconds to import
    digits = numbers.random((1797, 64)), numbers.integers(10, size=1797)
    monkeypatch.setattr(package, "load_digits", lambda return_X_y: digits, raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", package)
    script = load_script("in_memory", monkeypatch)
    passes: list[tuple[int, float]] = []  # samples, and the mean over them
    cross_entropy = script.cross_entropy

    def noted(chosen: Any, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = cross_entropy(chosen, labels)
        passes.append((len(labels), loss.item()))
        return loss

    monkeypatch.setattr(script, "cross_entropy", noted)
    arguments = [f"--checkpoint-dir={tmp_path / 'checkpoints'}", f"--sample-log-dir={tmp_path / 'samples'}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, "--epochs=1", "--global-batch=600"])
    threads = torch.get_num_threads()
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
    (log,) = (tmp_path / "samples").iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    told = {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}
    for step, samples in enumerate((600, 600, 300), 1):  # the last batch of an epoch is short
        of_step: list[tuple[int, float]] = []
        while sum(size for size, _ in of_step) < samples:
            of_step.append(passes.pop(0))
        assert told[step] == pytest.approx(sum(size * loss for size, loss in of_step) / samples)
