"""`helm install --wait` looks at the status of every object of a chart (kstatus): none of ours may make it wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.api.jobs import job
from tests.unit.core import builders as given

from elastipod_local.cluster import Cluster
from elastipod_local.errors import CommandError
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.snapshot import ObservedAgent, ObservedPod, Snapshot

NAME = "rendered"
PENDING = (
    given.pod(
        2, phase="Pending", node="", ip="", started=False, problem="no room", problem_reason=Reason.UNSCHEDULABLE
    ),
    None,
)
RUN: list[tuple[ObservedPod, ObservedAgent | None]] = [(given.pod(n), given.running()) for n in range(2)]
SNAPSHOTS: dict[str, Snapshot] = {
    "Created": given.observed(given.job()),
    "PodsRunning": given.observed(
        given.job(Record(transition=given.transition(TransitionKind.START))), [(given.pod(n), None) for n in range(2)]
    ),
    "Running": given.observed(given.job(given.trains()), [*RUN, PENDING]),
    "Suspended": given.observed(given.job(given.trains(), given.policy(suspend=True)), RUN),
    "Faulted": given.observed(
        given.job(
            given.trains(
                fault_at=given.LONG_AGO, consecutive_failures=3, transition=given.transition(TransitionKind.RECOVERY)
            )
        ),
        RUN,
    ),
    "Failed": given.observed(
        given.job(given.trains(outcome="Failed", outcome_reason="WorkerCrash", ended_at=given.NOW))
    ),
}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart as the recipes' launcher renders it."""
    folder = tmp_path_factory.mktemp("chart")
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text(f"apiVersion: v2\nname: {NAME}\nversion: 0.1.0\n")
    (folder / "templates" / "training.yaml").write_text(json.dumps(job(NAME)))
    return folder


def write_status(cluster: Cluster, namespace: str, status: dict[str, Any]) -> None:
    cluster.kubectl(
        "-n", namespace, "patch", "hpjob", NAME, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )  # fmt: skip


@pytest.mark.slow
def test_no_state_of_a_job_makes_helm_wait(api_server: Cluster, namespace: str, chart: Path) -> None:
    waiting = (NAME, str(chart), "--namespace", namespace, "--wait")
    api_server.helm("install", *waiting, "--timeout=240s")
    for state, seen in SNAPSHOTS.items():
        todo = plan(seen)
        assert todo.conditions[-1].type == state
        conditions = [
            {"type": c.type, "status": str(c.status), "reason": c.reason, "message": c.message} for c in todo.conditions
        ]
        write_status(api_server, namespace, {**todo.status, "conditions": conditions})
        api_server.helm("upgrade", *waiting, "--timeout=240s")
    releases = json.loads(api_server.helm("list", "--namespace", namespace, "-o", "json"))
    assert [(r["status"], r["revision"]) for r in releases] == [("deployed", str(1 + len(SNAPSHOTS)))]


@pytest.mark.slow
def test_helm_would_wait_for_conditions_that_we_do_not_use(api_server: Cluster, namespace: str, chart: Path) -> None:
    waiting = (NAME, str(chart), "--namespace", namespace, "--wait")
    api_server.helm("install", *waiting, "--timeout=240s")
    write_status(api_server, namespace, {"conditions": [{"type": "Ready", "status": "False"}]})
    with pytest.raises(CommandError):
        api_server.helm("upgrade", *waiting, "--timeout=3s")
