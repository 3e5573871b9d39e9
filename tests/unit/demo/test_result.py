"""The end of a demo: files that are written and the summary for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.demo.runs import (
    BOTH_ACTS_LOGS,
    CREATED_AT,
    FORCED,
    GROW_SHRINK_CRASH,
    GROW_SHRINK_CRASH_LOGS,
    WORDS,
    elastic_run,
    log,
    urgent_run,
)
from tests.unit.torch_processes import TorchProcesses

from elastipod_local.demo.report import Run, build_report, parse_history
from elastipod_local.demo.result import (
    MODEL_PARAMETERS,
    PAUSE_IS,
    Audit,
    collect_diagnostics,
    depth_lines,
    queue_lines,
    samples_line,
    table,
    write_result,
)
from elastipod_local.demo.run_log import generations
from elastipod_local.demo.urgent_job import queue_report
from elastipod_local.errors import LocalClusterError

ROOT = Path(__file__).resolve().parents[3]
AUDIT = {"samples_total": 96, "samples_unique": 64, "samples_expected": 64}
STORY = Run(CREATED_AT, parse_history(GROW_SHRINK_CRASH), generations(GROW_SHRINK_CRASH_LOGS), ())


@pytest.fixture
def without_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: a picture takes seconds, and one test looks at it."""
    monkeypatch.setattr("elastipod_local.demo.result.draw", lambda timeline, *paths: None)


def test_the_table_has_a_line_for_each_change() -> None:
    heads = "depth   detected after  training gap  work lost  pause    target      steps repeated  reason for the depth"
    assert table(build_report(STORY, AUDIT)).splitlines() == [
        f"generation  replicas  cause              {heads}",
        "2           2 -> 4    CapacityAvailable  memory  -               1.800 s       -          0.000 s  0.3 s, met  0",
        "3           4 -> 2    NodeDrained        memory  -               1.250 s       -          0.000 s  0.3 s, met  0",
        "4           2 -> 2    WorkerCrash        memory  -               1.000 s       -          0.000 s  0.3 s, met  1",
    ]


def test_the_table_says_whether_pauses_in_memory_met_their_target_and_why_others_went_deeper() -> None:
    report = build_report(elastic_run(), AUDIT)
    report["resizes"][0].update(pause_s=0.301, pause_target_met=False, depth_code="WorkersKept")
    lines = table(report).splitlines()
    assert lines[1].endswith(
        "0.301 s  0.3 s, missed  0               those who stay keep their processes and their state"
    )
    assert lines[2].endswith("0.000 s  0.3 s, met     0")
    assert lines[-1].endswith(f"6.000 s  -              0               {FORCED}")
    assert "the target of 0.3 s for a pause in memory was met by 5 of 6" in depth_lines(report)


def test_the_summary_compares_changes_in_memory_with_the_forced_restart() -> None:
    assert depth_lines(build_report(elastic_run(), AUDIT)) == [
        PAUSE_IS,
        "6 changes in memory: pauses of 0.00 to 0.00 s; no worker that stayed was restarted",
        "the target of 0.3 s for a pause in memory was met by 6 of 6",
        f"4 -> 2 with new processes, for comparison: a pause of 6.00 s ({FORCED})",
    ]
    assert depth_lines(build_report(elastic_run([], []), AUDIT)) == [PAUSE_IS]


def test_a_good_run_leaves_a_report_and_a_picture(tmp_path: Path) -> None:
    result = write_result(
        elastic_run(), Audit(0, AUDIT), "Completed", urgent_run(), {"cluster": 12.5}, tmp_path / "demo"
    )
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert (report["ok"], report["shortcomings"], result.shortcomings) == (True, [], [])
    assert report["demo_seconds"] == {"cluster": 12.5}
    assert report["queue"]["given_up"]["kueue_said"] == WORDS
    assert {"elastipod", "torch", "python"} <= report["versions"].keys()
    assert (tmp_path / "demo" / "timeline.svg").read_text().startswith("<?xml")


@pytest.mark.usefixtures("without_picture")
def test_what_the_audit_could_not_say_is_a_shortcoming(tmp_path: Path) -> None:
    result = write_result(elastic_run(), Audit(2, {}, "no logs"), "Completed", urgent_run(), {}, tmp_path)
    assert result.shortcomings[-1] == "no logs"
    assert samples_line("lm", result.report) == "samples of lm: the audit gave no verdict"


@pytest.mark.usefixtures("without_picture")
def test_shortcomings_of_both_acts_count(tmp_path: Path) -> None:
    repeats = log(6, 0, 2, resumed_step=11, steps={12: 61.5, 13: 66.0, 14: 80.2}, drained_s=80.4)
    run = elastic_run(logs=[*BOTH_ACTS_LOGS[:6], repeats, *BOTH_ACTS_LOGS[-2:]])
    result = write_result(run, Audit(0, AUDIT), "Completed", urgent_run(state="Failed"), {}, tmp_path)
    assert result.shortcomings == [
        "the resize 4 -> 2 repeated 2 steps, not 0",
        "urgent ended as Failed, not Completed",
    ]
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is False


def test_the_summary_tells_the_second_act_and_quotes_kueue() -> None:
    lines = queue_lines(queue_report(elastic_run(), urgent_run()))
    assert lines == [
        "urgent: had its quota 3.5 s after it was applied and made its first step after 4.5 s; while it made 3 steps, "
        "the elastic job made 3",
        f"Kueue's reason: {WORDS}",
    ]


def test_the_summary_is_silent_about_a_second_act_that_was_not() -> None:
    assert queue_lines(queue_report(elastic_run(), urgent_run([], []))) == []


@pytest.mark.usefixtures("without_picture")
def test_the_summary_says_what_its_figures_are_taken_from(tmp_path: Path) -> None:
    result = write_result(elastic_run(), Audit(0, AUDIT), "Completed", urgent_run(), {}, tmp_path)
    assert "CPU workers on one machine that train a model of 2.7 million parameters" in result.summary


@pytest.mark.slow
def test_the_models_size_is_the_examples(torch_processes: TorchProcesses) -> None:
    script = (
        "import sys; sys.path.insert(0, 'examples/lm');"
        "import settings, torch, train;"
        "options = settings.options_of('').parse_args(['--checkpoint-dir=x', '--sample-log-dir=x']);"
        "model = train.build(options, 1, torch.device('cpu'))['model'];"
        "print(sum(parameter.numel() for parameter in model.parameters()))"
    )
    assert int(torch_processes.run(script, folder=str(ROOT)).stdout) == pytest.approx(MODEL_PARAMETERS, rel=0.02)


def test_a_cluster_that_cannot_be_asked_still_gives_its_answer(tmp_path: Path) -> None:
    def kubectl(*arguments: str, timeout_s: float) -> str:
        if arguments[0] == "logs":
            raise LocalClusterError("connection refused")
        return "described\n"

    folder = collect_diagnostics(kubectl, tmp_path)
    assert (folder / "jobs.txt").read_text() == "described\n"
    assert (folder / "operator.log").read_text() == "connection refused\n"
