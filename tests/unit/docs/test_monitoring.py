"""The alerts and the dashboard of the chart ask for metrics and labels that the operator exports."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest
import yaml
from tests.nonempty import some
from tests.unit.docs.metric_names import operator_metrics
from tests.unit.docs.pages import ROOT

from elastipod_operator.core.phase_accounting import Phase

CHART = ROOT / "charts/elastipod"
SERIES = {name: labels for metric in operator_metrics() for name, labels in metric.series.items()}
GROUPS: list[dict[str, Any]] = yaml.safe_load((CHART / "alerts/elastipod.yaml").read_text(encoding="utf-8"))["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD: dict[str, Any] = json.loads((CHART / "dashboards/elastipod.json").read_text(encoding="utf-8"))
NAMES = yaml.safe_load((CHART / "alerts/hyperpod-names.yaml").read_text(encoding="utf-8"))["groups"]
RECORDS: list[tuple[str, str]] = [(rule["record"], rule["expr"]) for group in NAMES for rule in group["rules"]]
TARGETS = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
# What Grafana puts in place of its variables.
VARIABLES = {"$__rate_interval": "1m", "$namespace": ".*", "$job": ".*"}


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Give what an expression selects. Raises ValueError for an expression that Prometheus would refuse."""
    found: list[promql_parser.VectorSelector] = []

    def visit(part: promql_parser.Expr) -> None:
        if isinstance(part, promql_parser.VectorSelector):
            found.append(part)
        if isinstance(part, promql_parser.MatrixSelector):
            found.append(part.vector_selector)

    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def asks_for_what_is_exported(expression: str) -> None:
    for selector in some(selectors(expression)):
        assert selector.name in SERIES
        assert {matcher.name for matcher in selector.matchers.matchers} <= SERIES[selector.name], selector.name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_alerts_ask_for_what_the_operator_exports(alert: dict[str, Any]) -> None:
    asks_for_what_is_exported(alert["expr"])
    labels = frozenset().union(*(SERIES[str(selector.name)] for selector in selectors(alert["expr"])))
    texts = " ".join(alert["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels
    assert alert["labels"]["severity"] in ("critical", "warning", "info")


def test_the_names_of_hyperpod_ask_for_what_the_operator_exports_and_are_listed() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    for name, expression in some(RECORDS):
        asks_for_what_is_exported(expression)
        assert name.removeprefix("hyperpod_training_operator_jobs_") in text


@pytest.mark.parametrize(("title", "expression", "legend"), TARGETS)
def test_panels_ask_for_what_the_operator_exports(title: str, expression: str, legend: str) -> None:
    asks_for_what_is_exported(expression)
    labels = frozenset().union(*(SERIES[str(selector.name)] for selector in selectors(expression)))
    assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, title


def test_phases_in_alerts_exist() -> None:
    named = [
        phase
        for alert in ALERTS
        for selector in selectors(alert["expr"])
        for matcher in selector.matchers.matchers
        if matcher.name == "phase"
        for phase in matcher.value.split("|")
    ]
    assert set(some(named)) <= set(Phase)


def test_every_panel_fits_beside_the_others() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(some(cells))) == len(cells)
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("wrong", ["elastipod_jobz > 0", 'elastipod_jobs{phase="x"} > 0'])
def test_a_wrong_name_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        asks_for_what_is_exported(wrong)


def test_an_expression_that_is_none_is_found() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        selectors("sum(elastipod_jobs by")
