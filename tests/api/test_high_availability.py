"""Several operators on one API server: takeover, releases that refuse each other, and other controllers on the same CRD."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.conftest import CHECKOUT
from tests.api.jobs import apply, get, job
from tests.api.operator_processes import Operators, operators
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.errors import CommandError
from elastipod_local.host import wait_until
from elastipod_operator.core.names import FIELD_MANAGER

TAKEOVER_S = 20.0
# A machine that is busy with other tests may stall a process for seconds; then the next takeover counts.
TRIES = 5
CRD = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
CONTROLLER = "elastipod.io/controller"


@pytest.fixture
def ours(api_server: Cluster, namespace: str, tmp_path: Path) -> Iterator[Operators]:
    with operators(api_server, tmp_path, namespace) as found:
        yield found


def state(cluster: Cluster, namespace: str, name: str) -> str:
    """Give the last condition of a job; empty without any."""
    conditions = get(cluster, namespace, name).get("status", {}).get("conditions") or [{}]
    return str(conditions[-1].get("type", ""))


def becomes(cluster: Cluster, namespace: str, name: str, wanted: str) -> None:
    wait_until(
        lambda: state(cluster, namespace, name) == wanted,
        deadline_s=PATIENCE_S,
        what=f"{name} to be {wanted}",
        every_s=0.1,
    )


def suspend(cluster: Cluster, namespace: str, name: str, *, wanted: bool) -> None:
    patch = json.dumps({"spec": {"runPolicy": {"suspend": wanted}}})
    cluster.kubectl("-n", namespace, "patch", "hpjob", name, "--type=merge", "-p", patch)


def test_the_standby_takes_over_in_twenty_seconds(
    ours: Operators, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the kill of the leader until its successor has acted on an edit that was made after it.

    When it acted is read from the job, in whole seconds: to look for it may take longer.
    """
    apply(ours.cluster, ours.namespace, job())
    ours.start("op-0")
    ours.leads("op-0")
    becomes(ours.cluster, ours.namespace, "llm", "Created")
    took: list[float] = []
    for number in range(TRIES):
        leader, standby = f"op-{number}", f"op-{number + 1}"
        ours.start(standby)
        wait_until(lambda: is_standing_by(ours, standby), deadline_s=PATIENCE_S, what="a standby", every_s=0.1)  # noqa: B023  # called in this turn
        ours.kill(leader)
        killed = time.time()
        suspend(ours.cluster, ours.namespace, "llm", wanted=number % 2 == 0)
        becomes(ours.cluster, ours.namespace, "llm", "Suspended" if number % 2 == 0 else "Created")
        took.append(last_write(ours) + 1 - killed)
        if took[-1] < TAKEOVER_S:
            break
    record_property("takeover_s", [round(seconds, 1) for seconds in took])
    with capsys.disabled():
        print(f"\ntakeovers: {[round(seconds, 1) for seconds in took]} s")
    assert min(took) < TAKEOVER_S
    assert "lease acquired" in ours.log(standby)


def last_write(ours: Operators) -> float:
    """Give when an operator wrote the status of the job last, in Unix time."""
    text = ours.cluster.kubectl("-n", ours.namespace, "get", "hpjob", "llm", "--show-managed-fields", "-o", "json")
    writes = json.loads(text)["metadata"]["managedFields"]
    times = [one["time"] for one in writes if (one["manager"], one.get("subresource")) == (FIELD_MANAGER, "status")]
    return max(datetime.fromisoformat(time).timestamp() for time in times)


def is_standing_by(ours: Operators, name: str) -> bool:
    """Whether it has begun, and waits for the lease: it has read it more than once by then."""
    assert ours.running[name].poll() is None, ours.log(name)
    return "cannot remove label" in ours.log(name)


@pytest.mark.slow
def test_a_release_does_not_run_the_jobs_of_another(ours: Operators, api_server: Cluster) -> None:
    """The second one ends with a sentence, whatever its namespace, and the first one does not notice."""
    other = f"{ours.namespace}-b"
    api_server.kubectl("create", "namespace", other)
    ours.start("first", RELEASE_NAME="one")
    ours.leads("first")
    ours.start("beside", RELEASE_NAME="two")
    assert f"release one has its operator in namespace {ours.namespace} already" in ours.refusal("beside")
    ours.start("elsewhere", RELEASE_NAME="two", POD_NAMESPACE=other, WATCH_NAMESPACES="")
    said = ours.refusal("elsewhere")
    assert f"release one in namespace {ours.namespace} runs the jobs in namespaces {ours.namespace}" in said
    holder = api_server.kubectl(
        "-n", other, "get", "lease", "elastipod-operator", "-o", "jsonpath={.spec.holderIdentity}"
    )
    assert holder == "", "it has given its own lease back"
    ours.leads("first")
    ours.kill("first")
    ours.start("elsewhere", RELEASE_NAME="two", POD_NAMESPACE=other)
    ours.leads("elsewhere", other)


@pytest.mark.slow
def test_two_releases_share_a_namespace_by_the_controller_that_jobs_name(ours: Operators, api_server: Cluster) -> None:
    other = f"{ours.namespace}-b"
    api_server.kubectl("create", "namespace", other)
    for name, controller in (("ours", None), ("canary", "canary"), ("foreign", "somebody-else")):
        body = job(name)
        body["metadata"]["annotations"] = {CONTROLLER: controller} if controller else {}
        apply(api_server, ours.namespace, body)
    named = {"RELEASE_NAME": "canary", "ELASTIPOD_CONTROLLER_NAME": "canary", "ELASTIPOD_ONLY_NAMED": "true"}
    ours.start("canary", POD_NAMESPACE=other, **named)
    ours.leads("canary", other)
    becomes(api_server, ours.namespace, "canary", "Created")
    assert state(api_server, ours.namespace, "ours") == ""
    ours.start("ours", RELEASE_NAME="elastipod")
    ours.leads("ours")
    becomes(api_server, ours.namespace, "ours", "Created")
    assert get(api_server, ours.namespace, "foreign").get("status") is None
    assert "finalizers" not in get(api_server, ours.namespace, "foreign")["metadata"]


@pytest.fixture
def foreign_crd(api_server: Cluster) -> Iterator[None]:
    """The CRD as another controller would have it: without our fields."""
    path = next((CHECKOUT / "crds").glob("*.yaml"))
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    body["spec"]["versions"][0]["schema"] = {"openAPIV3Schema": schema}
    api_server.kubectl("replace", "-f", "-", input=json.dumps(body))
    yield
    api_server.kubectl("replace", "-f", str(path))


@pytest.mark.slow
def test_a_crd_of_another_controller_is_refused_unless_it_is_taken_over(
    foreign_crd: None, ours: Operators, api_server: Cluster
) -> None:
    apply(api_server, ours.namespace, job())
    ours.start("refused")
    assert f"CRD {CRD} belongs to another controller: its spec has no field elastipod" in ours.refusal("refused")
    chart = ("elastipod", str(CHECKOUT / "charts/elastipod"), "--namespace", ours.namespace)
    with pytest.raises(CommandError) as refused:
        api_server.helm("install", *chart, "--dry-run=server")
    assert f"CRD {CRD} belongs to another controller" in refused.value.output
    assert state(api_server, ours.namespace, "llm") == ""
    ours.start("successor", ELASTIPOD_TAKE_OVER="true")
    ours.leads("successor")
    becomes(api_server, ours.namespace, "llm", "Created")
