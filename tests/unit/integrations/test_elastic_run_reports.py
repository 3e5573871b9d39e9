"""What a framework's run tells: the agent, the sample log, and the framework about the passes that are made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.integrations.test_elastic_run import NAME, save

from elastipod.data.elastic_batches import ElasticBatches
from elastipod.errors import BatchSizeError, SampleLogError
from elastipod.integrations import elastic_run
from elastipod.integrations.elastic_run import ElasticRun
from elastipod.integrations.marks import MarkedCheckpoints
from elastipod.worker_file import WORKER_FILE_ENV, EventLevel, Progress, WorkerFile

PLAN = ElasticBatches(20, 6, epochs=2)  # steps of 6, 6, 6 and 2 samples


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFile]:
    with WorkerFile.create(tmp_path / "worker-file", 1) as file:
        monkeypatch.setenv(WORKER_FILE_ENV, str(tmp_path / "worker-file"))
        for name in ("ELASTIPOD_LOCAL_RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        yield file


def begin(tmp_path: Path, *, log: bool = False, **options: Any) -> ElasticRun:
    (tmp_path / "out").mkdir(exist_ok=True)
    checkpoints = MarkedCheckpoints(tmp_path / "out", NAME)
    return ElasticRun(PLAN, checkpoints, max_micro_batch=4, sample_log=tmp_path / "log" if log else None, **options)


def told(agent: WorkerFile) -> Progress:
    progress = agent.progress(0)
    assert progress is not None
    return progress


def test_the_agent_is_told_steps_samples_and_the_last_known_loss(tmp_path: Path, agent: WorkerFile) -> None:
    run = begin(tmp_path)
    run.step_done(1, 0.5)
    first = told(agent)
    assert (first.step, first.samples, first.loss, first.total_steps) == (1, 6, 0.5, 8)
    assert first.samples_per_s is not None
    assert first.samples_per_s > 0
    run.step_done(2)
    assert (told(agent).step, told(agent).samples, told(agent).loss) == (2, 12, 0.5)
    run.note_loss(0.25)
    run.step_done(4)
    assert (told(agent).step, told(agent).samples, told(agent).loss) == (4, 20, 0.25)


def test_the_rate_is_that_of_the_whole_batch_since_the_last_step(
    tmp_path: Path, agent: WorkerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 103.0, 105.0])
    monkeypatch.setattr("elastipod.integrations.elastic_run.time.monotonic", lambda: next(times))
    run = begin(tmp_path)
    run.step_done(1)
    assert told(agent).samples_per_s == 2.0
    run.step_done(4)  # the last one of an epoch has 2 samples
    assert told(agent).samples_per_s == 1.0


def test_a_sign_of_life_repeats_where_the_run_stands(tmp_path: Path, agent: WorkerFile) -> None:
    run = begin(tmp_path)
    run.sign_of_life()
    assert (told(agent).step, told(agent).samples, told(agent).loss) == (0, 0, None)
    run.step_done(4, 0.5)
    before = agent.num_reports(0)
    run.sign_of_life()
    assert agent.num_reports(0) == before + 1
    assert (told(agent).step, told(agent).samples, told(agent).loss, told(agent).samples_per_s) == (4, 20, 0.5, None)


def test_an_event_says_to_leave_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: WorkerFile) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(elastic_run, "elastic_event_detected", lambda: next(answers))
    run = begin(tmp_path)
    assert not run.is_leaving
    assert not run.step_done(1)
    assert run.step_done(2)
    assert run.is_leaving
    assert agent.event().level == EventLevel.NONE


def test_the_passes_of_completed_steps_are_counted_within_their_epoch(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert run.passes_per_epoch == 7  # 2 for each full step, 1 for the last
    assert run.passes_made() == 0
    for step, made in ((1, 2), (3, 6), (4, 7), (5, 2), (8, 7)):
        run.step_done(step)
        assert run.passes_made() == made
    assert list(run.epoch_passes(1, made=3)) == list(run.epoch_passes(1))[6:]
    assert [len(each) for each in run.epoch_passes(0)] == [3] * 6 + [2]


def test_equal_passes_are_asked_for(tmp_path: Path) -> None:
    assert [len(part.indices) for part in begin(tmp_path).passes(1)] == [3, 3]
    with pytest.raises(BatchSizeError, match="all passes must have the same number of samples"):
        begin(tmp_path, equal_passes=True)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    (file,) = sorted((tmp_path / "log").iterdir())[-1:]
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("why", ["drained", "completed", None])
def test_the_log_has_steps_checkpoints_and_how_the_run_ended(tmp_path: Path, why: Any) -> None:
    run = begin(tmp_path, log=True)
    run.step_done(1, 0.5)
    save(run)
    run.end(why)
    found = lines(tmp_path)
    kinds = [(each["kind"], each.get("step"), each.get("why")) for each in found]
    assert kinds == [
        ("start", None, None),
        ("step", 1, None),
        ("saved", 1, None),
        *([] if why is None else [("end", 1, why)]),
    ]
    assert found[1]["loss"] == 0.5
    with pytest.raises(SampleLogError, match="is closed"):
        run.step_done(2)


def test_a_log_names_what_its_generation_resumed_from(tmp_path: Path) -> None:
    first = begin(tmp_path, log=True)
    first.step_done(1)
    save(first)
    first.end("drained")
    start = lines(tmp_path)[0]
    assert (start["generation"], start["resumed_step"], start["resumed_generation"]) == (1, 0, 0)
    begin(tmp_path, log=True).end(None)
    start = lines(tmp_path)[0]
    assert (start["generation"], start["rank"], start["world_size"]) == (2, 0, 1)
    assert (start["resumed_step"], start["resumed_generation"]) == (1, 1)


@pytest.mark.parametrize("is_certain", [True, False])
def test_a_save_that_is_certain_is_no_silence(tmp_path: Path, agent: WorkerFile, is_certain: bool) -> None:
    run = begin(tmp_path)
    run.step_done(1)
    path = run.checkpoints.directory / "checkpoint-1"
    run.begin_save(path, is_certain=is_certain)
    assert agent.is_in_checkpoint(0) == is_certain
    path.mkdir()
    run.finish_save(path)
    assert not agent.is_in_checkpoint(0)


def test_a_save_that_never_came_ends_with_the_next_step(tmp_path: Path, agent: WorkerFile) -> None:
    run = begin(tmp_path)
    run.begin_save(run.checkpoints.directory / "checkpoint-0")
    run.begin_save(run.checkpoints.directory / "checkpoint-0")
    run.step_done(1)
    assert not agent.is_in_checkpoint(0)


def test_a_mark_keeps_what_the_integration_adds(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.step_done(1)
    path = run.checkpoints.directory / "checkpoint-1"
    run.begin_save(path)
    path.mkdir()
    run.finish_save(path, {"scaler": 3})
    resumed = begin(tmp_path).resumed
    assert resumed is not None
    assert resumed.extra == {"global_batch": 6, "scaler": 3}
    assert resumed.data == PLAN.state_dict(1)
