"""The audit: what it accepts, what it finds, and what it refuses to judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.library.sample_logs import PLAN, Job

from elastipod.audit.command import main
from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import AuditReport, audit
from elastipod.data import Batch, even_part
from elastipod.errors import UnusableLogsError

LAST = PLAN.total_steps


def judge(directory: Path) -> AuditReport:
    return audit(read_logs(directory))


def test_a_job_that_grew_and_shrank_is_exact(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 5))
    job.run(2, 4, range(5, 10), resumed_from=1)
    job.run(3, 2, range(10, LAST + 1), resumed_from=2, end="completed")
    report = judge(tmp_path)
    assert report.exact
    assert report.completed
    assert report.lineage == [[1, 1, 4], [2, 5, 9], [3, 10, LAST]]
    assert report.samples_total == report.samples_unique == report.samples_expected == 100
    assert report.steps_repeated == {1: 0, 2: 0, 3: 0}


def test_steps_lost_in_a_crash_are_repeated_and_not_in_the_lineage(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 3, range(1, 9), end=None)
    job.run(2, 2, range(6, LAST + 1), resumed_from=1, end="completed")
    report = judge(tmp_path)
    assert report.exact
    assert report.lineage == [[1, 1, 5], [2, 6, LAST]]
    assert report.steps_repeated == {1: 0, 2: 3}
    assert report.samples_total > report.samples_unique == 100


def test_a_generation_that_crashed_at_once_changes_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 6))
    job.run(2, 2, range(6, 6), resumed_from=1, end=None)
    job.run(3, 2, range(6, LAST + 1), resumed_from=1, end="completed")
    job.file(2, 1).unlink()
    assert judge(tmp_path).exact


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "missing"])
def test_a_lost_log_of_a_generation_that_left_nothing_changes_no_verdict(
    tmp_path: Path, is_empty: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node lost power, and what its ranks wrote last was not on its disk. The generation had saved no checkpoint."""
    job = Job(tmp_path)
    job.run(1, 2, range(1, 6))
    job.run(2, 2, range(6, 9), resumed_from=1, end=None)
    job.run(3, 2, range(6, LAST + 1), resumed_from=1, end="completed")
    job.file(2, 1).unlink()
    if is_empty:
        job.file(2, 1).touch()
    report = judge(tmp_path)
    assert report.exact
    assert report.lineage == [[1, 1, 5], [3, 6, LAST]]
    assert (report.steps_repeated, report.incomplete) == ({1: 0, 2: 0, 3: 3}, [2])
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == [
        "  steps repeated: 0 by generation 1, 0 by generation 2, 3 by generation 3",
        "  logs of generation 2 are missing, which left nothing in the final weights: at least so many steps were repeated",
    ]


def test_a_lost_log_of_a_generation_that_saved_makes_the_logs_unusable(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 6))
    job.run(2, 2, range(6, LAST + 1), resumed_from=1, end="completed")
    job.file(1, 1).unlink()
    with pytest.raises(UnusableLogsError, match="generation 1 ran on 2 ranks, but the logs of 1 are missing"):
        judge(tmp_path)


def test_when_a_step_was_done_changes_no_verdict(tmp_path: Path) -> None:
    """Of an interrupted step only the beginning is logged; it counts as repeated, as long as nobody knows better."""
    job = Job(tmp_path)
    job.run(1, 1, range(1, 7), end=None)
    with job.file(1, 0).open("a") as file:
        file.writelines(json.dumps({"kind": "done", "step": step, "t": 0, "loss": 1.0}) + "\n" for step in range(1, 6))
    job.run(2, 1, range(6, LAST + 1), resumed_from=1, end="completed")
    report = judge(tmp_path)
    assert report.exact
    assert report.steps_repeated == {1: 0, 2: 1}


def test_a_resume_from_an_image_older_than_the_generation_that_offered_it_leaves_that_one_out(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 7), end=None)
    job.run(2, 2, range(7, 8), resumed_from=1, end=None)
    job.run(3, 2, range(5, LAST + 1), resumed_from=2, end="completed")
    report = judge(tmp_path)
    assert report.lineage == [[1, 1, 4], [3, 5, LAST]]
    assert report.exact


def test_a_restart_from_nothing_leaves_the_first_attempt_out(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 4), end=None)
    job.run(2, 2, range(1, LAST + 1), end="completed")
    report = judge(tmp_path)
    assert report.exact
    assert report.lineage == [[2, 1, LAST]]
    assert report.steps_repeated == {1: 0, 2: 3}


def test_a_planted_off_by_one_sampler_is_found(tmp_path: Path) -> None:
    def off_by_one(step: int, rank: int, world_size: int) -> Batch:
        batch = PLAN.batch(step, rank, world_size)
        if step < 6:
            return batch
        first = PLAN.samples_after(step - 1) - 1  # the bug: one too early after the resize
        own = even_part(batch.global_size, rank, world_size)
        return replace(batch, indices=order[first + own.start : first + own.stop])

    order = [index for step in range(1, LAST + 1) for index in PLAN.batch(step, 0, 1).indices]
    job = Job(tmp_path, sampler=off_by_one)
    job.run(1, 2, range(1, 6))
    job.run(2, 4, range(6, LAST + 1), resumed_from=1, end="completed")
    report = judge(tmp_path)
    assert not report.exact
    assert report.duplicates > 0
    assert report.missing > 0
    assert main([str(tmp_path)]) == 1


def test_a_resume_one_step_late_leaves_a_gap(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 5))
    job.run(2, 2, range(6, LAST + 1), resumed_from=1, end="completed")
    report = judge(tmp_path)
    assert (report.duplicates, report.missing) == (0, PLAN.global_batch)
    assert len(report.missing_first) == PLAN.global_batch


def test_a_rank_that_repeats_the_part_of_another_is_found(tmp_path: Path) -> None:
    job = Job(tmp_path, sampler=lambda step, rank, world_size: PLAN.batch(step, 0, world_size))
    job.run(1, 2, range(1, LAST + 1), end="completed")
    report = judge(tmp_path)
    assert report.duplicates > 0
    assert report.missing > 0


def test_samples_that_do_not_exist_are_found(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 1, range(1, LAST + 1), end="completed")
    lines = job.file(1, 0).read_text().splitlines()
    lines.insert(-1, json.dumps({"kind": "step", "step": LAST, "epoch": 7, "ids": [[0, 3]], "t": 0, "loss": None}))
    lines.insert(-1, json.dumps({"kind": "step", "step": LAST, "epoch": 0, "ids": [[48, 52]], "t": 0, "loss": None}))
    job.file(1, 0).write_text("\n".join(lines) + "\n")
    report = judge(tmp_path)
    assert (report.foreign, report.duplicates) == (5, 2)
    assert "5 outside the dataset" in report.sentence


def test_two_generations_at_the_same_steps_count_once_by_lineage(tmp_path: Path) -> None:
    """A partitioned old generation trained on; its work after the fork is in the total and not in the weights."""
    job = Job(tmp_path)
    job.run(1, 2, range(1, LAST + 1), end=None)
    job.run(2, 2, range(4, LAST + 1), resumed_from=1, end="completed")
    report = judge(tmp_path)
    assert report.exact
    assert report.steps_repeated[2] == LAST - 3


def test_one_generation_that_logs_a_step_twice_is_found(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 1, range(1, LAST + 1), end="completed")
    lines = job.file(1, 0).read_text().splitlines()
    job.file(1, 0).write_text("\n".join([*lines[:2], lines[1], *lines[2:]]) + "\n")
    assert judge(tmp_path).duplicates == PLAN.global_batch


def test_a_job_that_has_not_ended_is_not_exact_yet(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 6))
    report = judge(tmp_path)
    assert not report.exact
    assert report.duplicates == 0
    assert report.final_step == 5
    assert "the job has not completed" in report.sentence


@pytest.mark.parametrize(
    ("saved", "lineage"),
    [
        pytest.param([6, 8], [[1, 1, 4], [2, 5, 8]], id="its newest checkpoint"),
        pytest.param([], [[1, 1, 4]], id="the step at which it resumed, without one"),
    ],
)
def test_the_weights_of_a_job_that_was_killed_are_those_of_its_newest_checkpoint(
    tmp_path: Path, saved: list[int], lineage: list[list[int]]
) -> None:
    job = Job(tmp_path)
    job.run(1, 1, range(1, 5))
    job.run(2, 1, range(5, 10), resumed_from=1, end=None)
    with job.file(2, 0).open("a") as file:
        file.writelines(json.dumps({"kind": "saved", "step": step, "optimizer_norm": 1.5}) + "\n" for step in saved)
    report = judge(tmp_path)
    assert (report.lineage, report.final_step, report.completed) == (lineage, lineage[-1][-1], False)


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 9), end=None)
    job.run(2, 2, range(6, LAST + 1), resumed_from=1, end="completed")
    with open(job.file(1, 0), "ab") as file:
        file.write(b'{"kind":"step","step":9,"epo')
    assert judge(tmp_path).exact


def test_a_bad_line_in_the_middle_is_not(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 1, range(1, LAST + 1), end="completed")
    text = job.file(1, 0).read_text()
    job.file(1, 0).write_text(text.replace('{"kind":"step","step":3', '{"kind":"st', 1))
    with pytest.raises(UnusableLogsError, match=r"line 4 is not JSON"):
        judge(tmp_path)


def test_a_missing_rank_makes_the_logs_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path)
    job.run(1, 3, range(1, LAST + 1), end="completed")
    job.file(1, 1).unlink()
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "elastipod audit: generation 1 ran on 3 ranks, but the logs of 1 are missing, the first of rank 1\n"
    )


def test_a_missing_generation_makes_the_logs_unusable(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2, 2, range(6, LAST + 1), resumed_from=1, end="completed")
    with pytest.raises(
        UnusableLogsError, match="generation 2 resumed from generation 1 at step 5, whose logs are not here"
    ):
        judge(tmp_path)


def test_ranks_that_contradict_each_other_make_the_logs_unusable(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 2, range(1, 5))
    text = job.file(1, 1).read_text()
    job.file(1, 1).write_text(text.replace('"resumed_step":0', '"resumed_step":2'))
    with pytest.raises(UnusableLogsError, match="contradicts the other ranks"):
        judge(tmp_path)


def test_other_data_in_a_later_generation_makes_the_logs_unusable(tmp_path: Path) -> None:
    Job(tmp_path).run(1, 1, range(1, 5))
    Job(tmp_path, replace(PLAN, dataset_size=60)).run(2, 1, range(5, 8), resumed_from=1)
    with pytest.raises(UnusableLogsError, match="do not train on the same data"):
        judge(tmp_path)


def test_a_start_with_other_data_that_was_refused_leaves_no_trace(tmp_path: Path) -> None:
    """The log is made before the data is looked at; the mistake is put right and the job goes on."""
    job, mistake = Job(tmp_path), Job(tmp_path, replace(PLAN, dataset_size=60))
    job.run(1, 2, range(1, 5))
    mistake.run(2, 2, range(5, 5), resumed_from=1, end=None)
    job.run(3, 1, range(5, 5), resumed_from=1, end=None)  # and here the data is longer on one node
    mistake.run(4, 1, range(5, 5), resumed_from=1, end=None)
    job.file(4, 0).rename(job.file(3, 1))
    job.file(3, 1).write_text(
        job.file(3, 1).read_text().replace('"generation":4', '"generation":3').replace('"rank":0', '"rank":1')
    )
    assert judge(tmp_path).final_step == 4
    job.run(5, 3, range(5, LAST + 1), resumed_from=1, end="completed")
    assert judge(tmp_path).exact


def test_a_job_may_get_more_epochs(tmp_path: Path) -> None:
    Job(tmp_path, replace(PLAN, epochs=1)).run(1, 2, range(1, 8), end="completed")
    Job(tmp_path).run(2, 3, range(8, LAST + 1), resumed_from=1, end="completed")
    report = judge(tmp_path)
    assert report.exact
    assert report.samples_expected == 100


@pytest.mark.parametrize("name", [".", "nothing-there"])
def test_a_directory_without_logs_is_said(tmp_path: Path, name: str) -> None:
    assert main([str(tmp_path / name)]) == 2


def test_changed_optimizer_moments_are_reported(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1, 1, range(1, 5))
    job.run(2, 1, range(5, LAST + 1), resumed_from=1, end="completed")
    assert judge(tmp_path).optimizer_norms_differ == []
    text = job.file(2, 0).read_text()
    job.file(2, 0).write_text(
        text.replace('"loaded","step":4,"optimizer_norm":1.5', '"loaded","step":4,"optimizer_norm":1.6')
    )
    assert judge(tmp_path).optimizer_norms_differ == [2]


def test_the_report_as_json_has_the_names_that_others_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Job(tmp_path).run(1, 2, range(1, LAST + 1), end="completed")
    assert main([str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps_repeated"] == {"1": 0}
    assert {"samples_total", "samples_unique", "samples_expected", "duplicates", "missing"} <= set(report)


def test_the_report_for_people_begins_with_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Job(tmp_path).run(1, 2, range(1, LAST + 1), end="completed")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("every one of 100 samples was trained exactly once over 14 steps\n")


@given(starts=st.lists(st.tuples(st.integers(0, LAST), st.integers(0, LAST), st.integers(1, 5)), max_size=6))
def test_any_resizes_and_crashes_are_exact(
    starts: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """starts: by generation, the steps that it makes, how many of them it saves, and its world size."""
    directory = tmp_path_factory.mktemp("logs")
    job = Job(directory)
    step = parent = reached = repeated = 0
    for generation, (made, kept, world_size) in enumerate([*starts, (LAST, LAST, 2)], start=1):
        last = min(step + made, LAST)
        saved = min(step + kept, last)
        end = "completed" if last == saved == LAST else ("drained" if saved == last else None)
        job.run(generation, world_size, range(step + 1, last + 1), resumed_from=parent, end=end)
        repeated += max(0, min(reached, last) - step)
        reached = max(reached, last)
        if saved > step:
            step, parent = saved, generation
    report = judge(directory)
    assert report.exact
    assert report.completed
    assert report.final_step == LAST
    assert sum(report.steps_repeated.values()) == repeated
