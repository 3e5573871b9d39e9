"""The load benchmark's own parts: fake agents keep the contract, quantiles and rows say what was measured."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import operator as bench_operator
from bench.common.processes import Failed
from bench.common.samples import Samples, quantile
from bench.operator_load.cluster import Call, LoadCluster, count_by_kind
from bench.operator_load.fake_agent import FakeAgent
from bench.operator_load.fleet import Fleet
from bench.operator_load.jobs import BARE_LABEL, batch_job
from bench.operator_load.load import Times
from bench.operator_load.parts import BARE, JOB_CONTROLLER, OURS, Sizes
from bench.operator_load.rows import rows
from bench.operator_load.timed_operator import read_times
from tests.unit.core.builders import job

from elastipod_agent.authentication import Credentials, challenge_in, signed
from elastipod_agent.server.http_messages import Head, RequestRefused
from elastipod_operator.core.names import LABEL_JOB, LABEL_UID
from elastipod_operator.kube.job_keys import JobKeys, key_entries

SIZES = Sizes(starts=(64, 1000, 4000), restart=1000, jobs=100, pods=1000, repeat=1, churn=5.0)


def said(agent: FakeAgent) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(agent.answer())
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
    assert agent.crash("it broke")
    assert said(agent)["failure"]["exitcode"] == 1
    assert agent.call("/stop", {"generation": 2, "is_graceful": False}) == 200
    assert agent.call("/start", {"generation": 3, "rank": 0}) == 200
    assert agent.call("/stop", {"generation": 3, "is_graceful": True, "timeout": 5}) == 200
    assert (said(agent)["status"], said(agent)["drained"], said(agent)["reason"]) == ("ready", True, "Drained")
    assert agent.call("/shutdown", {}) == 200
    assert said(agent)["status"] == "shutdown"
    assert not agent.crash("it broke")


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


def test_times_are_of_what_ended_between_two_moments_and_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "times"
    lines = [
        "1.0 reconcile 0.5",
        "2.0 reconcile 0.03",
        "2.5 api_write record 0.07",
        "2.6 api_write status 0.01",
        "3.0 reconcile 9.0",
    ]
    path.write_text("\n".join(lines) + "\n2.9 reconc")
    times = Times(read_times(path, 2.0, 3.0))
    assert times.seconds == {
        "reconcile": [0.03], "api_write": [0.07, 0.01], "api_write record": [0.07], "api_write status": [0.01]
    }  # fmt: skip
    assert (times.count("api_write"), times.count("decision")) == (2, 0)
    assert (times.quantile_ms("api_write", 0.5), times.quantile_ms("api_write", 0.99)) == (10, 70)
    with pytest.raises(Failed, match="did no decision"):
        times.quantile_ms("decision", 0.5)


def test_the_timed_operator_notes_what_its_histograms_observe(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from bench.operator_load import timed_operator\n"
        "timed_operator.note_times(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT))\n"
        "from elastipod_operator import metrics\n"
        "with metrics.API_SECONDS.labels('record').time(): time.sleep(0.01)\n"
        "metrics.RECONCILE_SECONDS.observe(0.0725)\n"
    )
    path, began = tmp_path / "times", time.monotonic()
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    found = read_times(path, began, time.monotonic())
    assert found.keys() == {"api_write", "api_write record", "reconcile"}
    assert found["reconcile"] == [0.0725], "no limit of a bucket"
    assert found["api_write record"][0] >= 0.01


def test_a_fleet_is_measured_as_often_as_is_asked_each_time_from_an_empty_control_plane(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    brought_up: list[Path] = []

    @asynccontextmanager
    async def load(folder: Path, nodes: int) -> AsyncIterator[None]:
        brought_up.append(folder)
        yield

    async def part(it: object, sizes: Sizes, samples: Samples) -> None:
        samples.add(OURS, "runs", 1)

    monkeypatch.setattr(bench_operator, "RUN", tmp_path)
    monkeypatch.setattr(bench_operator, "load", load)
    monkeypatch.setattr(bench_operator, "PARTS", {"starts": part, "fleet": part})
    samples = Samples()
    waits: list[int] = []
    sizes = replace(SIZES, repeat=5)
    asyncio.run(bench_operator._measure(["starts", "fleet"], sizes, samples, lambda: waits.append(len(brought_up))))
    assert waits == [0, 1, 2, 3, 4, 5], "before each control plane, while the machine is not yet busy with it"
    assert [folder.relative_to(tmp_path / "operator") for folder in brought_up] == [
        Path("starts/0"), *(Path("fleet") / str(number) for number in range(5))
    ]  # fmt: skip
    assert len(samples.values[OURS, "runs"]) == 6
    assert bench_operator.WHOLE.repeat >= 5


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
    samples.fail(JOB_CONTROLLER, "pods created", "the Job was refused")
    every = rows(samples, SIZES, ["starts", "creations"])
    drawn = {row.metric: row for row in every if row.peer in (None, BARE)}
    assert (drawn["start of 1000 agents"].met, drawn["start of 4000 agents"].met) == (True, False)
    assert not drawn["start of 64 agents"].met
    assert drawn["pods created"].ratio == pytest.approx(0.9)
    assert drawn["pods created"].met is True
    assert drawn["all pods recreated"].met is False
    beside_jobs = [row for row in every if row.peer == JOB_CONTROLLER]
    assert [row.metric for row in beside_jobs] == ["pods created", "all pods recreated"]
    assert [row.is_measured for row in beside_jobs] == [False, False]
    assert "the Job was refused" in beside_jobs[0].how


def test_a_part_that_was_given_up_is_told_on_its_rows() -> None:
    samples = Samples(repeat=5)
    samples.add(OURS, "pods created", 90.0)
    samples.add(BARE, "pods created", 100.0)
    samples.fail(OURS, "creations", "waited 160 s in vain")
    drawn = {row.metric: row for row in rows(samples, SIZES, ["creations", "fleet"]) if row.peer in (None, BARE)}
    assert (drawn["pods created"].missing, drawn["pods created"].met) == (4, False)
    assert "waited 160 s in vain" in drawn["pods created"].how
    assert "waited 160 s in vain" not in drawn["idle memory"].how


def test_a_job_of_kubernetes_makes_the_same_pods_without_what_its_controller_sets() -> None:
    like: dict[str, Any] = {
        "metadata": {"name": "one-pods-0", "annotations": {"size": "of the pod"}},
        "spec": {
            "hostname": "one-pods-0",
            "restartPolicy": "Always",
            "nodeName": "node-1",
            "containers": [{"name": "a"}],
        },
    }
    body = batch_job(like, "batch-0", 1000)
    assert (body["spec"]["parallelism"], body["spec"]["completions"]) == (1000, 1000)
    template = body["spec"]["template"]
    assert template["metadata"]["labels"] == {BARE_LABEL: "batch-0"}, "the fleet counts them by it"
    assert template["spec"] == {"restartPolicy": "Never", "nodeName": "node-1", "containers": [{"name": "a"}]}
    assert like["spec"]["restartPolicy"] == "Always", "what is copied stays as it is"
