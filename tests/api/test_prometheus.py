"""A real Prometheus scrapes the operator while jobs in a queue train, grow, are preempted and end: the dashboard has data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.compat_lives import operator
from tests.api.compat_nodes import PlayedNodes
from tests.api.kueue_objects import API, apply, queues
from tests.api.queue_jobs import FLAVOR_LABELS, KIND, Team
from tests.dashboard_page import panels
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.prometheus import Prometheus, prometheus

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

CHART = Path(__file__).resolve().parents[2] / "charts/elastipod"
CLASS = "kueue.x-k8s.io/priority-class"


@pytest.fixture
def team(kueue_server: Cluster, kueue_namespace: str) -> Team:
    """A namespace with a queue for four pods."""
    high = {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": "high"}, "value": 1000}
    flavor, *others = queues(
        kueue_namespace, kueue_namespace, cpu="4", preemption={"withinClusterQueue": "LowerPriority"}
    )
    flavor["spec"] = {"nodeLabels": FLAVOR_LABELS}
    apply(kueue_server, high, flavor, *others)
    return Team(kueue_server, kueue_namespace)


@pytest.fixture
def nodes(kueue_server: Cluster) -> Iterator[PlayedNodes]:
    with PlayedNodes(kueue_server.kubeconfig, {KIND: 8}, {}) as played:
        yield played


@pytest.fixture
def scraped(team: Team, nodes: PlayedNodes, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus with the chart's alerts, which scrapes an operator for the namespace."""
    port = free_port()
    more = {"METRICS_PORT": str(port)}
    with (
        operator(team.cluster, tmp_path, (team.namespace,), more),
        prometheus(tmp_path, f"127.0.0.1:{port}", CHART / "alerts/elastipod.yaml") as running,
    ):
        yield running


def value(running: Prometheus, expression: str) -> float | None:
    samples = running.query(expression)
    return float(samples[0]["value"][1]) if samples else None


@pytest.mark.long("variants")
def test_the_dashboard_has_data_and_no_alert_fires(team: Team, nodes: PlayedNodes, scraped: Prometheus) -> None:
    team.submit("elastic")
    team.trains("elastic", 4)
    team.submit("urgent", labels={CLASS: "high"}, elasticPolicy=None)
    team.trains("urgent", 2)
    team.trains("elastic", 2)

    def sees(name: str, job: str, expected: float) -> None:
        expression = f'elastipod_job_{name}{{namespace="{team.namespace}", job="{job}"}}'
        wait_until(
            lambda: value(scraped, expression) == expected, deadline_s=PATIENCE_S, what=f"{expression} == {expected:g}"
        )

    sees("replicas", "elastic", 2)
    sees("max_replicas", "elastic", 4)
    sees("replicas", "urgent", 2)
    sees("step", "elastic", 1)
    nodes.complete({"urgent"})
    team.trains("elastic", 4)
    sees("replicas", "elastic", 4)

    def panels_without_data() -> list[str]:
        asked = {
            panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels() if "targets" in panel
        }
        return [title for title, texts in asked.items() if not any(scraped.query(text) for text in texts)]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in scraped.get("rules")["groups"] for rule in group["rules"]]

    def health() -> set[str]:
        return {rule["health"] for rule in rules()}

    # A rate needs two scrapes within its window; a rule is unknown until it was evaluated.
    wait_until(lambda: panels_without_data() == [], deadline_s=PATIENCE_S, what=f"{panels_without_data()} to have data")
    wait_until(lambda: health() == {"ok"}, deadline_s=PATIENCE_S, what=f"all rules to be ok, which are {health()}")
    assert [rule["name"] for rule in rules() if rule["state"] != "inactive"] == []
    assert value(scraped, "sum(elastipod_leading)") == 1
    assert value(scraped, 'sum(elastipod_quota_evictions_total{cause="Preempted"})') == 2
    for counted in ('quota_evictions_total{cause="Preempted"}', 'changes_total{kind="resize"}'):
        assert value(scraped, f"sum(increase(elastipod_{counted}[10m]))"), "the first is seen too"
