"""Real failures of jobs and of the operator fire the chart's alerts in a real Prometheus, each for the one that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.agent_client import free_port
from tests.api.compat_lives import OPERATOR, operator
from tests.api.compat_nodes import PlayedNodes
from tests.api.queue_jobs import KIND, Team
from tests.long_runs import LongRun
from tests.patience import PATIENCE_S
from tests.prometheus import Prometheus, hurried, prometheus

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

CHART = Path(__file__).resolve().parents[2] / "charts/elastipod"
FAILING = (str(Path(__file__).with_name("failing_operator.py")),)
# Half an hour takes nine seconds.
HASTE = 200


class Watched:
    """An operator for one namespace, which a Prometheus scrapes at the same port whenever there is one."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self._cluster, self._namespace, self._folder = cluster, namespace, folder
        self._port = free_port()
        self.target = f"127.0.0.1:{self._port}"
        self._running = ExitStack()

    def start(self, name: str, program: tuple[str, ...] = OPERATOR) -> None:
        folder = self._folder / name
        folder.mkdir()
        more = {"METRICS_PORT": str(self._port)}
        self._running.enter_context(operator(self._cluster, folder, (self._namespace,), more, program))

    def stop(self) -> None:
        self._running.close()


@pytest.fixture
def watched(api_server: Cluster, namespace: str, tmp_path: Path) -> Iterator[Watched]:
    found = Watched(api_server, namespace, tmp_path)
    found.start("working")
    yield found
    found.stop()


@pytest.fixture
def alarms(watched: Watched, tmp_path: Path) -> Iterator[Prometheus]:
    rules = tmp_path / "alerts.yaml"
    rules.write_text(hurried(CHART / "alerts/elastipod.yaml", HASTE), encoding="utf-8")
    with prometheus(tmp_path, watched.target, rules) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.long("alerts")
def test_failures_fire_their_alerts(
    api_server: Cluster, namespace: str, watched: Watched, alarms: Prometheus, long_run: LongRun
) -> None:
    team = Team(api_server, namespace)

    def firing(alert: str) -> list[str]:
        """Give the summaries of an alert that fires."""
        return sorted(one["annotations"]["summary"] for one in alarms.firing() if one["labels"]["alertname"] == alert)

    def until_firing(alert: str, *summaries: str) -> None:
        what = f"{alert} to say {list(summaries)}"
        wait_until(lambda: firing(alert) == list(summaries), deadline_s=PATIENCE_S, what=what, every_s=0.2)

    # The steps of played workers do not go on; and a container that runs something else than an agent answers nothing.
    with PlayedNodes(api_server.kubeconfig, {KIND: 4}, {"mute": "mute"}):
        for name in ("hung", "mute"):
            team.submit(name, queue="", elasticPolicy=None)
        until_firing("ElastipodJobNoProgress", f"Job {namespace}/hung makes no progress")
        until_firing("ElastipodJobStuck", f"Job {namespace}/mute is stuck in a start or a resize")
        errors = 'ALERTS{alertname="ElastipodOperatorErrors", alertstate="firing"}[1h]'
        assert alarms.query(f"max_over_time({errors})") == []
        until_firing("ElastipodNoLeader")

        watched.stop()
        until_firing("ElastipodNoLeader", "No Elastipod operator leads")
        until_firing("ElastipodJobNoProgress")

        watched.start("failing", FAILING)
        until_firing("ElastipodNoLeader")

        def failed() -> list[str]:
            return [one["metric"]["what"] for one in alarms.query(f"max_over_time({errors})")]

        wait_until(
            lambda: failed() == ["pass"], deadline_s=PATIENCE_S, what="failing decisions to be told", every_s=0.2
        )
    long_run.count(alerts=4)
