"""What the operator has of kopf: which objects it watches, whom their events reach, and whose credentials it uses."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import kopf
import pytest
from aiohttp import web
from tests import web_servers
from tests.unit.agents.fake_agent import until

from elastipod_operator import kopf_handlers
from elastipod_operator.core.names import GROUP, PLURAL
from elastipod_operator.kopf_handlers import handlers, run_kopf, settings
from elastipod_operator.options import Options


def watched() -> tuple[dict[str, Any], Any, Any]:
    """Give the handlers by the plural of what they watch, and what their events reach."""
    events, missed = mock.Mock(), mock.Mock()
    found: list[Any] = [*handlers(events, missed)._watching.get_all_handlers()]
    return {handler.selector.plural or handler.selector.any_name: handler for handler in found}, events, missed


def test_jobs_their_pods_and_all_nodes_are_watched() -> None:
    by_kind, _, _ = watched()
    selected = [(each.selector.group, each.selector.version, kind) for kind, each in by_kind.items()]
    job = ("sagemaker.amazonaws.com", "v1", "hyperpodpytorchjobs")
    assert sorted(selected) == [("", "v1", "nodes"), ("", "v1", "pods"), job]
    labels = {kind: each.labels for kind, each in by_kind.items() if each.labels}
    assert labels == {"pods": {"HPJob": kopf.PRESENT}}


@pytest.mark.parametrize("kind", [None, "ADDED", "MODIFIED", "DELETED"])
@pytest.mark.parametrize(("plural", "method"), [("hyperpodpytorchjobs", "job"), ("pods", "pod"), ("nodes", "node")])
async def test_an_event_is_handed_on_with_its_object_and_whether_that_is_gone(
    plural: str, method: str, kind: str | None
) -> None:
    by_kind, events, missed = watched()
    body = {"metadata": {"name": "a"}}
    await by_kind[plural].fn(type=kind, body=body, logger=None)
    assert events.mock_calls == [getattr(mock.call, method)(body, is_gone=kind == "DELETED")]
    assert missed.mock_calls == ([mock.call.observe("a", is_listed=kind is None)] if plural == "nodes" else [])


async def test_nodes_need_nobody_who_misses_deletions() -> None:
    events = mock.Mock()
    found: list[Any] = [*handlers(events)._watching.get_all_handlers()]
    for handler in found:
        await handler.fn(type="ADDED", body={"metadata": {"name": "a"}})
    assert len(events.mock_calls) == 3


async def test_an_object_on_which_a_handler_fails_is_told_as_the_operators_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_kind, events, _ = watched()
    told: list[Any] = []
    monkeypatch.setattr(kopf_handlers, "log_operator_error", lambda *given: told.append(given))
    events.job.side_effect = error = ZeroDivisionError()
    await by_kind["hyperpodpytorchjobs"].fn(type="ADDED", body={})
    assert told == [("object", error)]


@pytest.mark.parametrize(
    ("environ", "server"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://10.0.0.1:6443"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "https://10.0.0.1:443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}, "https://[fd00::1]:443"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("has_token", [True, False])
def test_in_a_pod_its_service_account_logs_in_and_elsewhere_the_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], server: str | None, has_token: bool
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(kopf_handlers, "SERVICE_ACCOUNT", tmp_path)
    if has_token:
        (tmp_path / "token").write_text("secret\n")
    kubeconfig = mock.Mock(return_value="of the kubeconfig")
    monkeypatch.setattr(kopf, "login_with_kubeconfig", kubeconfig)
    (login,) = handlers(mock.Mock())._activities.get_all_handlers()
    login_in: Any = login.fn
    found = login_in(logger="a logger")
    if server is None or not has_token:
        assert found == "of the kubeconfig"
        assert kubeconfig.mock_calls == [mock.call(logger="a logger")]
        return
    assert (found.server, found.ca_path, found.token) == (server, str(tmp_path / "ca.crt"), "secret")
    assert kubeconfig.mock_calls == []


def labels_of(wanted: kopf.OperatorSettings) -> dict[str | None, Any]:
    return {getattr(kind, "any_name", None): label for kind, label in wanted.watching.label_selectors.items()}


def test_kopf_writes_nothing_and_gets_the_pods_of_jobs_only() -> None:
    wanted = settings()
    assert (wanted.posting.enabled, wanted.scanning.disabled) == (False, True)
    assert labels_of(wanted) == {"pods": "HPJob"}


@pytest.mark.parametrize("namespaces", [(), ("a", "b")])
async def test_kopf_runs_in_the_namespaces_under_the_pods_name_and_signals_are_ours(
    monkeypatch: pytest.MonkeyPatch, namespaces: tuple[str, ...]
) -> None:
    stop = asyncio.Event()
    asked: list[dict[str, Any]] = []
    ran: list[Any] = []

    async def spawn(**given: Any) -> list[str]:
        asked.append(given)
        return ["a task"]

    async def run(tasks: Any, *, ignored: Any) -> None:
        ran.append((tasks, ignored))
        os.kill(os.getpid(), signal.SIGTERM)
        await until(stop.is_set)

    monkeypatch.setattr(kopf, "spawn_tasks", spawn)
    monkeypatch.setattr(kopf, "run_tasks", run)
    registry, others = kopf.OperatorRegistry(), asyncio.all_tasks()
    try:
        await run_kopf(Options(namespaces, 0, "info", "operator-0", "ops"), registry, stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
    (given,) = asked
    assert labels_of(given.pop("settings")) == {"pods": "HPJob"}
    assert given == {
        "registry": registry, "standalone": True, "identity": "operator-0", "clusterwide": not namespaces, "namespaces": namespaces,
    }  # fmt: skip
    assert ran == [(["a task"], others)]


class Discovered:
    """As much of an API server as kopf asks: jobs in two namespaces. refused: those whose jobs may not be read, and how often they were."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        self.is_over = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        namespace = request.match_info.get("namespace", "")
        if namespace in self.refused:
            self.refused[namespace] += 1
            return web.json_response({"kind": "Status", "code": 403, "message": "jobs is forbidden"}, status=403)
        if "watch" in request.query:
            stream = web.StreamResponse()
            await stream.prepare(request)
            await self.is_over.wait()
            return stream
        if namespace:
            found = {"metadata": {"name": "llm", "namespace": namespace, "uid": f"uid-{namespace}"}}
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [found]})
        return web.json_response(DISCOVERY[request.path])


def resource(plural: str, kind: str, *, is_namespaced: bool = False) -> dict[str, Any]:
    verbs = ["list", "watch"]
    return {"name": plural, "singularName": "", "namespaced": is_namespaced, "kind": kind, "verbs": verbs}


V1 = {"version": "v1"}
DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [resource("namespaces", "Namespace")]},
    "/apis": {"groups": [{"name": GROUP, "versions": [V1], "preferredVersion": V1}]},
    f"/apis/{GROUP}/v1": {"resources": [resource(PLURAL, "HyperPodPyTorchJob", is_namespaced=True)]},
}


async def test_a_namespace_that_may_not_be_read_keeps_no_other_from_being_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was deleted, for example, and the operator's Role with it. It is watched again as soon as it may be read."""
    monkeypatch.setattr(kopf_handlers, "BACKOFFS_S", (0.0, 0.0, 0.01))
    server, seen, registry = Discovered(), set[str](), kopf.OperatorRegistry()
    application = web.Application()
    application.add_routes([
        web.get(f"/apis/{GROUP}/v1/namespaces/{{namespace}}/{PLURAL}", server.answer), web.get("/{any:.*}", server.answer),
    ])  # fmt: skip
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=web_servers.SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")

    @kopf.on.event(GROUP, "v1", PLURAL, registry=registry)
    async def job_seen(body: Any, **_: Any) -> None:
        seen.add(body["metadata"]["namespace"])

    server.refused["gone"] = 0
    options = Options(("team", "gone"), 0, "info", "operator-0", "ops")
    running = asyncio.create_task(run_kopf(options, registry, asyncio.Event()))
    try:
        await until(lambda: running.done() or (server.refused["gone"] > 20 and seen == {"team"}))
        assert not running.done()
        server.refused.clear()
        await until(lambda: seen == {"team", "gone"})
    finally:
        server.is_over.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
        await web_servers.end(runner)
