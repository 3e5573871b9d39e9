"""The load benchmark's own parts: fake agents keep the contract, quantiles and rows say what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.common.samples import Samples
from bench.operator_load.cluster import Call, LoadCluster, count_by_kind
from bench.operator_load.fake_agent import FakeAgent
from bench.operator_load.fleet import Fleet
from bench.operator_load.load import DECISION, RECONCILE, Usage, buckets_of
from bench.operator_load.parts import BARE, OURS, Sizes, quantile
from bench.operator_load.rows import rows
from tests.unit.core.builders import job

from elastipod_agent.authentication import Credentials, challenge_in, signed
from elastipod_agent.server.http import Head, RequestRefused
from elastipod_operator.core.names import LABEL_JOB, LABEL_UID
from elastipod_operator.kube.job_keys import JobKeys, key_entries

SIZES = Sizes(starts=(64, 1000, 4000), restart=1000, jobs=100, pods=1000, repeat=1, churn=5.0)


def said(agent: FakeAgent) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(agent.status())
    return value


def test_a_fake_agent_lives_as_the_contract_says() -> None:
    agent = FakeAgent(held=True)
    assert said(agent)["status"] == "init"
    agent.release()
    assert agent.call("/start", {"generation": 2, "rank": 0}) == 200
    assert (said(agent)["status"], said(agent)["generation"], "step" in said(agent)["worker"]) == ("running", 2, True)
    version = agent.version
    assert agent.call("/start", {"generation": 2, "rank": 0}) == 200
    assert agent.call("/start", {"generation": 1, "rank": 0}) == 409
    assert agent.version == version
    assert agent.crash()
    assert said(agent)["failure"]["exitcode"] == 1
    assert agent.call("/stop", {"generation": 2, "is_graceful": False}) == 200
    assert agent.call("/start", {"generation": 3, "rank": 0}) == 200
    assert agent.call("/stop", {"generation": 3, "is_graceful": True, "timeout": 5}) == 200
    assert (said(agent)["status"], said(agent)["drained"], said(agent)["reason"]) == ("ready", True, "Drained")
    assert agent.call("/shutdown", {}) == 200
    assert said(agent)["status"] == "shutdown"
    assert not agent.crash()


def pod(uid: str, address: str = "", job: str = "one") -> dict[str, Any]:
    status = {"phase": "Running", "podIP": address} if address else {"phase": "Pending"}
    spec = {"containers": [{"name": "trainer"}]}
    return {"metadata": {"uid": uid, "labels": {"HPJob": job}}, "spec": spec, "status": status}


def test_a_fleet_gives_an_address_to_the_agent_of_the_pod_that_has_it_now() -> None:
    fleet = Fleet(JobKeys())
    fleet.take("ADDED", pod("a"))
    fleet.take("MODIFIED", pod("a", "127.128.0.1"))
    first = fleet.by_address["127.128.0.1"].agent
    fleet.take("MODIFIED", pod("a", "127.128.0.1"))
    assert fleet.by_address["127.128.0.1"].agent is first
    fleet.take("DELETED", pod("a", "127.128.0.1"))
    assert not fleet.by_address
    fleet.take("ADDED", pod("b", "127.128.0.1"))
    assert fleet.by_address["127.128.0.1"].agent is not first
    seen = fleet.about("one")
    assert (seen["pods"], seen["ran"], seen["states"]) == (1, 1, {"ready": 1})


def test_a_fleets_agent_holds_the_key_of_the_pods_secret() -> None:
    tokens = JobKeys((b"k" * 32,))
    body = pod("a", "127.128.0.1")
    body["metadata"] |= {"name": "one-workers-0", "labels": {LABEL_JOB: "one", LABEL_UID: "uid"}}
    key = tokens.of(replace(job(), name="one", uid="uid"))
    assert key is not None
    body["spec"]["containers"][0]["env"] = key_entries(key.secret)
    fleet = Fleet(tokens)
    fleet.take("ADDED", body)
    guard = fleet.by_address["127.128.0.1"].guard
    assert guard is not None
    with pytest.raises(RequestRefused) as refused:
        guard.admit(Head("GET", "/status", {}, True))
    challenge = challenge_in(refused.value.response.headers["WWW-Authenticate"])
    proof = signed(Credentials(key=key.key, pod="one-workers-0"), challenge, "GET", "/status")
    guard.admit(Head("GET", "/status", {"authorization": proof["Authorization"]}, True))


def test_quantiles_are_of_the_decisions_since() -> None:
    inf = float("inf")
    before = Usage(0, 0, 0, {RECONCILE: {0.01: 50, 0.1: 50, inf: 50}})
    after = Usage(1, 0, 0, {RECONCILE: {0.01: 140, 0.1: 150, inf: 150}, DECISION: {0.01: 7, inf: 7}})
    assert after.decisions_since(before) == 100
    assert after.quantile_since(before, 0.45) == pytest.approx(0.005)
    assert after.quantile_since(before, 0.95) == pytest.approx(0.055)
    assert after.quantile_since(before, 0.5, DECISION) == pytest.approx(0.005)
    assert Usage(1, 0, 0, {RECONCILE: {0.01: 50, 0.1: 50, inf: 60}}).quantile_since(before, 0.99) == 0.1


def test_writes_are_counted_together_and_by_their_kind() -> None:
    page = """# HELP elastipod_api_write_seconds Time of one write to the API server
elastipod_api_write_seconds_bucket{le="0.01",what="record"} 3.0
elastipod_api_write_seconds_bucket{le="+Inf",what="record"} 4.0
elastipod_api_write_seconds_bucket{le="0.01",what="event"} 5.0
elastipod_api_write_seconds_bucket{le="+Inf",what="event"} 5.0
elastipod_reconcile_seconds_bucket{le="+Inf"} 2.0
elastipod_api_write_seconds_count{what="record"} 4.0
"""
    inf = float("inf")
    assert buckets_of(page) == {
        "api_write": {0.01: 8, inf: 9}, "api_write record": {0.01: 3, inf: 4}, "api_write event": {0.01: 5, inf: 5},
        "reconcile": {inf: 2},
    }  # fmt: skip


def test_a_quantile_of_times_is_one_of_them() -> None:
    times = [float(number) for number in range(100, 0, -1)]
    assert (quantile(times, 0.5), quantile(times, 0.99), quantile(times, 1.0), quantile([7.0], 0.5)) == (50, 99, 100, 7)


def test_calls_are_counted_once_and_a_watch_when_it_begins(tmp_path: Path) -> None:
    def event(verb: str, stage: str, resource: str, subresource: str = "") -> str:
        reference = {"resource": resource, **({"subresource": subresource} if subresource else {})}
        return json.dumps(
            {
                "verb": verb,
                "stage": stage,
                "objectRef": reference,
                "responseStatus": {"code": 200},
                "stageTimestamp": "t",
            }
        )

    cluster = LoadCluster("load", tmp_path)
    cluster.audit_log.parent.mkdir()
    lines = [
        event("update", "ResponseComplete", "leases"), event("watch", "ResponseStarted", "pods"),
        event("watch", "ResponseComplete", "pods"), event("patch", "ResponseComplete", "hyperpodpytorchjobs", "status"),
    ]  # fmt: skip
    cluster.audit_log.write_text("\n".join(lines) + "\n")
    assert cluster.calls()[0] == Call("update", "leases", 200, "t")
    assert count_by_kind(cluster.calls()) == {
        "update leases": 1, "watch pods": 1, "patch hyperpodpytorchjobs/status": 1
    }  # fmt: skip
    assert len(cluster.calls(offset=len(lines[0]) + 1)) == 2


def test_what_was_not_measured_counts_as_missed_and_limits_are_those_of_the_size() -> None:
    samples = Samples()
    samples.add(OURS, "start of 1000 agents", 1.5)
    samples.add(OURS, "start of 4000 agents", 9.0)
    samples.add(OURS, "pods created", 90.0)
    samples.add(BARE, "pods created", 100.0)
    drawn = {row.metric: row for row in rows(samples, SIZES, ["starts", "creations"])}
    assert (drawn["start of 1000 agents"].met, drawn["start of 4000 agents"].met) == (True, False)
    assert not drawn["start of 64 agents"].met
    assert (drawn["pods created"].ratio, drawn["pods created"].met) == (pytest.approx(0.9), True)
    assert not drawn["all pods made anew"].met
