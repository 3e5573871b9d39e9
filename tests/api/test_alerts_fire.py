"""Real failures of jobs and of the operator fire the chart's alerts in a real Prometheus, each for the one that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.api.compat_lives import OPERATOR, operator
from tests.api.compat_nodes import PlayedNodes
from tests.api.queue_jobs import KIND, Team
from tests.api.test_prometheus import CLASS, nodes, team  # noqa: F401 fixtures
from tests.free_ports import free_port
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


class Alarms:
    """A Prometheus with the chart's alerts, hurried."""

    def __init__(self, running: Prometheus) -> None:
        self.query = running.query
        self._firing = running.firing

    def firing(self, alert: str) -> list[str]:
        """Give the summaries of an alert that fires."""
        return sorted(one["annotations"]["summary"] for one in self._firing() if one["labels"]["alertname"] == alert)

    def until_firing(self, alert: str, *summaries: str) -> None:
        what = f"{alert} to say {list(summaries)}"
        wait_until(lambda: self.firing(alert) == list(summaries), deadline_s=PATIENCE_S, what=what, every_s=0.2)


@contextmanager
def alarms_of(folder: Path, target: str) -> Iterator[Alarms]:
    rules = folder / "alerts.yaml"
    rules.write_text(hurried(CHART / "alerts/elastipod.yaml", HASTE), encoding="utf-8")
    with prometheus(folder, target, rules) as running:
        yield Alarms(running)


@pytest.fixture
def alarms(watched: Watched, tmp_path: Path) -> Iterator[Alarms]:
    with alarms_of(tmp_path, watched.target) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.long("alerts")
def test_failures_fire_their_alerts(
    api_server: Cluster, namespace: str, watched: Watched, alarms: Alarms, long_run: LongRun
) -> None:
    team, until_firing = Team(api_server, namespace), alarms.until_firing  # noqa: F811

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


@pytest.fixture
def watched_queue(team: Team, nodes: PlayedNodes, tmp_path: Path) -> Iterator[tuple[Team, PlayedNodes, Alarms]]:  # noqa: F811
    """A namespace with a queue for four pods, the nodes of these, and who watches its operator."""
    watched = Watched(team.cluster, team.namespace, tmp_path)
    watched.start("working")
    try:
        with alarms_of(tmp_path, watched.target) as running:
            yield team, nodes, running
    finally:
        watched.stop()


@pytest.mark.timeout(600)
@pytest.mark.long("alerts")
def test_quota_that_is_not_given_back_fires_its_alert(
    watched_queue: tuple[Team, PlayedNodes, Alarms], long_run: LongRun
) -> None:
    """The kubelets do not end the pods of evicted increments."""
    alert = "ElastipodEvictionOverdue"
    queue_team, kubelets, alarms = watched_queue
    queue_team.submit("elastic")
    queue_team.trains("elastic", 4)
    kubelets.end_pods(False)
    queue_team.submit("urgent", labels={CLASS: "high"}, elasticPolicy=None)
    queue_team.until(
        lambda: alarms.firing(alert) == ["Evicted Workloads still use their quota"], f"{alert} to fire", "elastic"
    )
    assert "EvictionOverdue" in queue_team.warned_of("elastic")
    assert "it is blocked by pod elastic-" in queue_team.warning("elastic")
    assert queue_team.state("urgent")["type"] != "Running"

    kubelets.end_pods(True)
    queue_team.trains("urgent", 2)
    queue_team.trains("elastic", 2)
    alarms.until_firing(alert)
    long_run.count(alerts_of_queues=1)
