"""The rules, evaluated by Prometheus' own promtool: when each alert fires, when it does not, and what HyperPod's names give."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml
from tests.chart.rendered import CHART
from tests.patience import PATIENCE_S
from tests.prometheus import hurried, program

RULES = CHART / "alerts/elastipod.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")
NAMES = CHART / "alerts/hyperpod-names.yaml"
CASES_OF_NAMES = Path(__file__).with_name("hyperpod_names_test.yaml")


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(program("promtool")), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


def test_each_alert_fires_when_it_should_and_each_name_gives_what_it_says(tmp_path: Path) -> None:
    for file in (RULES, CASES, NAMES, CASES_OF_NAMES):
        shutil.copy(file, tmp_path)
    done = promtool(tmp_path, "test", "rules", CASES.name, CASES_OF_NAMES.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    rules = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == rules


def test_every_name_has_a_case_in_which_it_gives_something() -> None:
    rules = {rule["record"] for group in yaml.safe_load(NAMES.read_text())["groups"] for rule in group["rules"]}
    cases = yaml.safe_load(CASES_OF_NAMES.read_text())["tests"]
    given = {case["expr"] for test in cases for case in test["promql_expr_test"] if case.get("exp_samples")}
    assert given == rules


def test_a_changed_threshold_is_noticed(tmp_path: Path) -> None:
    """The check itself can fail."""
    changed = RULES.read_text().replace("> 900", "> 9000")
    assert changed != RULES.read_text()
    (tmp_path / RULES.name).write_text(changed)
    shutil.copy(CASES, tmp_path)
    assert promtool(tmp_path, "test", "rules", CASES.name).returncode != 0


def test_no_time_of_a_hurried_rule_is_left_as_it_was(tmp_path: Path) -> None:
    """The tests in which real failures fire the alerts would wait for it."""
    (tmp_path / RULES.name).write_text(hurried(RULES, 200), encoding="utf-8")
    done = promtool(tmp_path, "check", "rules", RULES.name)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = yaml.safe_load((tmp_path / RULES.name).read_text(encoding="utf-8"))["groups"]
    times = [text for group in groups for rule in group["rules"] for text in (rule["expr"], rule["for"])]
    assert [text for text in times if re.search(r"\b\d+[smh]\b|> \d{3}", text)] == []
