"""Operators whose clocks are five minutes from the API server's and ten from each other's: real ones, with a faked clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.compat_nodes import PlayedNodes
from tests.api.operator_processes import LEASE, Operators, operators
from tests.api.queue_jobs import KIND, Team
from tests.api.test_admission import CONFIGURATION, tried, webhook_at
from tests.api.test_high_availability import is_standing_by
from tests.debian import unpacked
from tests.free_ports import free_port
from tests.long_runs import LongRun
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

SKEW_S = 300
RENEWALS = 6  # of a lease of 15 s: longer than it takes to expire


def wrong_clock(seconds: int) -> dict[str, str]:
    """Give the environment of a program whose clock is wrong by so much; time passes as it does."""
    (library,) = unpacked("libfaketime").glob("usr/lib/*/faketime/libfaketime.so.1")
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{seconds:+d}s", "DONT_FAKE_MONOTONIC": "1"}


@pytest.fixture
def ours(api_server: Cluster, namespace: str, tmp_path: Path) -> Iterator[Operators]:
    with operators(api_server, tmp_path, namespace) as found:
        yield found


def lease(ours: Operators) -> tuple[str, str]:
    """Give who leads, and when that was said last."""
    (found,) = list_objects(ours.cluster, "leases", ours.namespace, fieldSelector=f"metadata.name%3D{LEASE}")
    return found["spec"]["holderIdentity"], found["spec"]["renewTime"]


def leads_on(ours: Operators, name: str) -> None:
    """See the leader renew its lease for longer than the lease lasts, and nobody else take it."""
    renewals: set[str] = set()

    def has_renewed() -> bool:
        holder, at = lease(ours)
        assert holder == name
        renewals.add(at)
        return len(renewals) > RENEWALS

    wait_until(has_renewed, deadline_s=PATIENCE_S, what=f"{name} to lead on", every_s=0.2)


@pytest.mark.timeout(900)
@pytest.mark.long("clocks")
@pytest.mark.parametrize("skew_s", [SKEW_S, -SKEW_S], ids=["the leader is ahead", "the leader is behind"])
def test_a_job_trains_under_two_wrong_clocks(ours: Operators, tmp_path: Path, skew_s: int, long_run: LongRun) -> None:
    """The standby waits for its turn, the webhook is trusted, and the job grows, shrinks and ends."""
    key, port = tmp_path / "install-key", free_port()
    key.write_text("0123456789abcdef" * 4 + "\n", encoding="utf-8")
    more = {"ELASTIPOD_INSTALL_KEY_FILE": str(key), "LOG_LEVEL": "info"}
    serves = {"WEBHOOK_PORT": str(port), "WEBHOOK_NAME": "127.0.0.1", "WEBHOOK_CONFIGURATION": CONFIGURATION}
    team = Team(ours.cluster, ours.namespace)
    with PlayedNodes(ours.cluster.kubeconfig, {KIND: 4}, {}) as nodes, webhook_at(ours.cluster, ours.namespace, port):
        ours.start("first", **wrong_clock(skew_s), **more, **serves)
        ours.leads("first")
        team.submit("elastic", queue="")
        team.trains("elastic", 4)
        wait_until(
            lambda: tried(ours.cluster, ours.namespace) != [], deadline_s=PATIENCE_S, what="warnings of the webhook"
        )
        ours.start("second", **wrong_clock(-skew_s), **more)
        wait_until(lambda: is_standing_by(ours, "second"), deadline_s=PATIENCE_S, what="a standby", every_s=0.1)
        leads_on(ours, "first")
        ours.kill("first")
        team.patch("elastic", replicas=2)
        team.trains("elastic", 2)
        assert lease(ours)[0] == "second"
        team.patch("elastic", replicas=0)
        team.trains("elastic", 4)
        nodes.complete({"elastic"})
        team.until(lambda: team.state("elastic").get("type") == "Completed", "elastic to complete", "elastic")
    assert "Traceback" not in ours.log("second")
    long_run.count(skews=2)
