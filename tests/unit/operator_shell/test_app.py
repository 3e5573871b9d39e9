"""The operator's process: who ends first, with which exit code, and what the command line says."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import kopf
import pytest
from tests.patience import PATIENCE_S
from tests.unit.agents.fake_agent import until

from elastipod_operator import app, kopf_handlers, leadership
from elastipod_operator.api import crd
from elastipod_operator.kube import preflight
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.lease import Lease
from elastipod_operator.options import Options, parse
from elastipod_operator.reconciler import Reconciler

OPTIONS = Options(namespaces=(), metrics_port=0, log_level="info", pod_name="a", pod_namespace="team")


class FakeLease:
    """A lease that is lost when the test says so."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.released = False

    async def hold(self) -> None:
        await self.lost.wait()

    async def release(self) -> None:
        self.released = True


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("event", "code", "released"),
    [
        pytest.param(lambda lease, stop: stop.set(), 0, True, id="a signal"),
        pytest.param(lambda lease, stop: lease.lost.set(), 1, False, id="the lease is lost"),
    ],
)
async def test_how_the_leader_ends(
    monkeypatch: pytest.MonkeyPatch, event: Callable[[FakeLease, asyncio.Event], None], code: int, released: bool
) -> None:
    monkeypatch.setattr(app, "watch", never)
    lease, stop = FakeLease(), asyncio.Event()
    leading = asyncio.create_task(app._watch_while_leading(cast(Lease, lease), OPTIONS, cast(Api, None), stop))
    event(lease, stop)
    assert await leading == code
    assert lease.released is released


async def test_a_leader_that_may_not_watch_gives_the_lease_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forbidden(*_: Any) -> None:
        raise ApiError(403, "nodes is forbidden")

    monkeypatch.setattr(app, "watch", forbidden)
    lease = FakeLease()
    with pytest.raises(ApiError, match="forbidden"):
        await app._watch_while_leading(cast(Lease, lease), OPTIONS, cast(Api, None), asyncio.Event())
    assert lease.released


class NoNodes:
    """An API server without nodes. is_served: whether it serves jobs."""

    def __init__(self, *, is_served: bool) -> None:
        self.is_served = is_served

    async def list_nodes(self) -> list[dict[str, Any]]:
        return []

    async def call(self, method: str, path: str) -> dict[str, Any]:
        if path == "/apis":
            return {"groups": [{"name": "sagemaker.amazonaws.com"}]}
        return {"resources": [{"name": "hyperpodpytorchjobs"}] if self.is_served else []}

    async def read_crd(self) -> dict[str, Any]:
        return crd.build()


async def test_kopf_discovers_nothing_before_jobs_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It discovers once: it would never watch jobs."""
    watching = asyncio.Event()

    async def run_kopf(*_: Any) -> None:
        watching.set()
        await never()

    monkeypatch.setattr(app, "run_kopf", run_kopf)
    monkeypatch.setattr(preflight, "CRD_RETRY_S", 0.0)
    monkeypatch.setattr(preflight, "SETTLE_S", 0.0)
    server = NoNodes(is_served=False)
    task = asyncio.create_task(app.watch(OPTIONS, cast(Api, server), asyncio.Event()))
    await until(lambda: "kubectl apply" in caplog.text)
    await asyncio.sleep(0.05)
    assert not watching.is_set()
    server.is_served = True
    await until(watching.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("is_lost", "code"), [(True, 1), (False, 0)], ids=["the lease is lost", "a signal"])
async def test_who_waits_for_the_crd_still_ends(is_lost: bool, code: int, caplog: pytest.LogCaptureFixture) -> None:
    lease, stop, server = FakeLease(), asyncio.Event(), NoNodes(is_served=False)
    leading = asyncio.create_task(app._watch_while_leading(cast(Lease, lease), OPTIONS, cast(Api, server), stop))
    await until(lambda: "kubectl apply" in caplog.text)
    (lease.lost if is_lost else stop).set()
    assert await leading == code
    assert lease.released is not is_lost


async def test_decisions_end_before_the_watches_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []

    class NotedReconciler(Reconciler):
        async def close(self) -> None:
            ends.append("decisions")
            await super().close()

    async def slow(*_: Any) -> None:
        try:
            ends.append("watching")
            await asyncio.Event().wait()
        finally:
            ends.append("watches")

    monkeypatch.setattr(app, "run_kopf", slow)
    monkeypatch.setattr(app, "Reconciler", NotedReconciler)
    watching = asyncio.create_task(app.watch(OPTIONS, cast(Api, NoNodes(is_served=True)), asyncio.Event()))
    await until(lambda: ends == ["watching"])
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert ends == ["watching", "decisions", "watches"]


async def test_kopf_does_not_keep_the_signals() -> None:
    registry, is_up, stop = kopf.OperatorRegistry(), asyncio.Event(), asyncio.Event()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        is_up.set()
        return kopf.ConnectionInfo(server="https://127.0.0.1:1")

    watching = asyncio.create_task(kopf_handlers.run_kopf(OPTIONS, registry, stop))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await is_up.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class Nodes:
    """Answers the list of nodes with one error after the other, then with a node."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    async def list_nodes(self) -> list[dict[str, Any]]:
        if self._errors:
            raise self._errors.pop(0)
        return [{"metadata": {"name": "node-1"}}]


async def test_nodes_are_waited_for_while_the_api_server_is_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LIST_RETRY_S", 0.0)
    nodes = Nodes(
        ConnectionRefusedError(), TimeoutError(), ApiError(503, "starting"), ApiError(429, "too many requests")
    )
    assert await app._all_nodes(cast(Api, nodes)) == [{"metadata": {"name": "node-1"}}]


async def test_who_may_not_list_nodes_is_not_kept_waiting() -> None:
    with pytest.raises(ApiError, match="forbidden"):
        await app._all_nodes(cast(Api, Nodes(ApiError(403, "nodes is forbidden"))))


def test_an_operator_without_a_cluster_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr(app, "set_up_logging", lambda level: None)
    assert app.main(["--metrics-port", "0"]) == 1
    assert "neither a service account nor a kubeconfig" in caplog.text


def test_an_install_key_that_cannot_be_used_ends_the_operator_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("short")
    monkeypatch.setenv("ELASTIPOD_INSTALL_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setattr(app, "set_up_logging", lambda level: None)
    assert app.main(["--metrics-port", "0"]) == 1
    assert "the install key in" in caplog.text
    assert "at least 32 bytes" in caplog.text


def test_the_command_line_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCH_NAMESPACES", "team-a, team-b,")
    monkeypatch.setenv("POD_NAME", "operator-1")
    options = parse(["--metrics-port", "9"])
    assert (options.namespaces, options.metrics_port, options.pod_name) == (("team-a", "team-b"), 9, "operator-1")


class FakePods:
    """As much of the API as labels a pod."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.labels = error, {"hp-training-control-plane": "true"}

    async def label_pod(self, namespace: str, name: str, labels: dict[str, str | None]) -> None:
        if self.error:
            raise self.error
        assert (namespace, name) == ("team", "a")
        merged = {**self.labels, **labels}
        self.labels = {key: value for key, value in merged.items() if value is not None}


async def test_only_the_leader_bears_the_label_by_which_people_find_it() -> None:
    pods = FakePods()
    mine = dataclasses.replace(OPTIONS, is_pod=True)
    await leadership.mark_leader(cast(Api, pods), mine, leads=False)
    assert pods.labels == {}
    await leadership.mark_leader(cast(Api, pods), mine, leads=True)
    assert pods.labels == {"hp-training-control-plane": "true"}


async def test_outside_of_a_pod_nothing_is_labelled() -> None:
    await leadership.mark_leader(cast(Api, FakePods(AssertionError())), OPTIONS, leads=True)


async def test_a_label_that_cannot_be_set_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    refused = FakePods(ApiError(403, "pods is forbidden"))
    await leadership.mark_leader(cast(Api, refused), dataclasses.replace(OPTIONS, is_pod=True), leads=True)
    assert "pods is forbidden" in caplog.text
