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
METRICS = operator_metrics()
SERIES = {name: labels for metric in METRICS for name, labels in metric.series.items()}
GAUGES = {metric.name for metric in METRICS if metric.kind == "gauge"}
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


def parsed(expression: str) -> promql_parser.Expr:
    """Parse an expression. Raises ValueError for one that Prometheus would refuse."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return promql_parser.parse(expression)


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Give what an expression selects. Raises ValueError for an expression that Prometheus would refuse."""
    found: list[promql_parser.VectorSelector] = []

    def visit(part: promql_parser.Expr) -> None:
        if isinstance(part, promql_parser.VectorSelector):
            found.append(part)
        if isinstance(part, promql_parser.MatrixSelector):
            found.append(part.vector_selector)

    promql_parser.walk(parsed(expression), visit)
    return found


def labelled_by_pod(expression: str) -> list[str]:
    """Give the metrics in an expression whose labels of the scraped pod reach its result: no aggregation takes them away."""
    found: list[str] = []
    depth = 0

    def enter(part: promql_parser.Expr) -> None:
        nonlocal depth
        depth += takes_labels(part)
        if isinstance(part, promql_parser.VectorSelector) and not depth:
            found.append(str(part.name))

    def leave(part: promql_parser.Expr) -> None:
        nonlocal depth
        depth -= takes_labels(part)

    promql_parser.walk(parsed(expression), enter, leave)
    return found


def takes_labels(part: promql_parser.Expr) -> bool:
    if isinstance(part, promql_parser.AggregateExpr):
        return part.modifier is None or part.modifier.type == promql_parser.AggModifierType.By
    return isinstance(part, promql_parser.Call) and part.func.name == "absent"


def gauges_added_up(expression: str) -> list[str]:
    """Give the gauges in an expression that are added up over the scraped pods, of which two may tell about the same for a while."""
    found: list[str] = []
    above: list[str] = []

    def enter(part: promql_parser.Expr) -> None:
        if isinstance(part, promql_parser.AggregateExpr):
            above.append(re.split(r"\W", str(part))[0])
        if isinstance(part, promql_parser.VectorSelector) and part.name in GAUGES and above[-1:] == ["sum"]:
            found.append(str(part.name))

    def leave(part: promql_parser.Expr) -> None:
        if isinstance(part, promql_parser.AggregateExpr):
            above.pop()

    promql_parser.walk(parsed(expression), enter, leave)
    return found


def gauges_as_counters(expression: str) -> list[str]:
    """Give the gauges in an expression whose falls are taken for restarts of a counter."""
    found: list[str] = []

    def visit(part: promql_parser.Expr) -> None:
        if isinstance(part, promql_parser.Call) and part.func.name in ("rate", "irate", "increase"):
            found.extend(str(one.vector_selector.name) for one in part.args if one.vector_selector.name in GAUGES)

    promql_parser.walk(parsed(expression), visit)
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


EXPRESSIONS = [alert["expr"] for alert in ALERTS] + [expression for _, expression, _ in TARGETS]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_is_told_does_not_depend_on_which_pod_leads(expression: str) -> None:
    assert labelled_by_pod(expression) == []


@pytest.mark.parametrize(
    ("expression", "labelled"),
    [
        ("elastipod_jobs > 0", ["elastipod_jobs"]),
        ("sum by (state) (elastipod_jobs) / elastipod_job_step", ["elastipod_job_step"]),
        ("sum without (state) (elastipod_jobs)", ["elastipod_jobs"]),
        ("deriv(elastipod_job_step[5m])", ["elastipod_job_step"]),
        ("sum(elastipod_jobs) or absent(elastipod_jobs)", []),
    ],
)
def test_what_depends_on_the_pod_that_leads_is_found(expression: str, labelled: list[str]) -> None:
    assert labelled_by_pod(expression) == labelled


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_two_pods_tell_about_a_job_is_counted_once(expression: str) -> None:
    """As for some minutes after another one began to lead. Whether it leads, each tells of itself alone."""
    assert set(gauges_added_up(expression)) <= {"elastipod_leading"}


def test_what_is_counted_twice_is_found() -> None:
    assert gauges_added_up("sum by (state) (elastipod_jobs) > 0") == ["elastipod_jobs"]
    assert gauges_added_up("sum(max by (state) (elastipod_jobs))") == []


@pytest.mark.parametrize("expression", EXPRESSIONS + [expression for _, expression in RECORDS])
def test_no_rate_is_asked_of_a_gauge(expression: str) -> None:
    """A job that begins again from a checkpoint has fewer steps, which would look like very many new ones."""
    assert gauges_as_counters(expression) == []


def test_a_rate_of_a_gauge_is_found() -> None:
    assert gauges_as_counters("sum(rate(elastipod_job_step[5m])) > 1") == ["elastipod_job_step"]
    assert gauges_as_counters("increase(elastipod_generations_total[5m])") == []


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
