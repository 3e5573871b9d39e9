"""Reading sample logs while they are being written and after a kill."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.demo.runs import log

from elastipod_local.demo.run_log import find_logs, generations, parse_log, read_run


def test_a_line_torn_by_a_kill_is_left_out() -> None:
    assert parse_log(b'{"kind":"start"}\n{"kind":"step","st') == [{"kind": "start"}]


def test_a_log_that_was_only_opened_counts_for_nothing() -> None:
    assert parse_log(b"") == []
    assert generations([[]]) == ()


def test_a_step_is_made_when_its_slowest_rank_has_made_it() -> None:
    [generation] = generations([log(1, 0, 2, steps={1: 5.0}), log(1, 1, 2, steps={1: 5.5})])
    assert generation.steps[0].at - 1_700_000_000 == 5.5


def test_generations_come_in_order_from_their_files(tmp_path: Path) -> None:
    for generation in (10, 2):
        lines = log(generation, 0, 1, steps={1: float(generation)})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"gen-{generation:06}-rank-00000.jsonl").write_text(text)
    assert [generation.number for generation in read_run(tmp_path)] == [2, 10]


def test_nothing_is_read_before_anything_is_written(tmp_path: Path) -> None:
    assert read_run(tmp_path / "not-yet") == ()


def test_each_job_has_logs_of_its_own_below_the_shared_folder(tmp_path: Path) -> None:
    for job in ("urgent", "lm"):
        (tmp_path / "shared-1" / job / "samples").mkdir(parents=True)
        (tmp_path / "shared-1" / job / "samples" / "gen-000001-rank-00000.jsonl").touch()
    assert find_logs(tmp_path, "lm") == tmp_path / "shared-1" / "lm" / "samples"
    assert find_logs(tmp_path, "urgent") == tmp_path / "shared-1" / "urgent" / "samples"
    assert find_logs(tmp_path, "another") is None
