"""The elastic event in the last step of a training: there is nothing to continue, so the training ends as completed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.integrations.test_accelerate_scaler import train
from tests.unit.integrations.test_elastic_run import run_in

from elastipod.data.elastic_batches import ElasticBatches
from elastipod.integrations import elastic_run

PLAN = ElasticBatches(20, 6, epochs=2)  # eight steps


def test_a_loop_of_accelerate_ends_as_completed(
    integration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])  # of its two steps
    monkeypatch.setattr(integration, "elastic_event_detected", lambda: next(answers))
    train(integration, tmp_path / "checkpoints", None, sample_log=tmp_path / "log")
    (log,) = (tmp_path / "log").iterdir()
    assert [json.loads(line) for line in log.read_text().splitlines()][-1]["why"] == "completed"


def test_a_loop_of_accelerate_that_is_started_again_after_its_end_makes_no_step(
    integration: Any, tmp_path: Path
) -> None:
    assert [train(integration, tmp_path, None) for _ in range(2)] == [2, 0]


def test_a_framework_does_not_leave_in_the_last_step_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path, PLAN)
    monkeypatch.setattr(elastic_run, "elastic_event_detected", lambda: True)
    assert run.step_done(7)
    assert run.is_leaving
    assert not run.step_done(8)
    assert not run.is_leaving


def test_nor_in_the_last_step_that_it_makes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path, PLAN)
    monkeypatch.setattr(elastic_run, "elastic_event_detected", lambda: True)
    assert not run.step_done(3, is_last=True)
