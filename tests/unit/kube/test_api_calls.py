"""Each call to the API server: method, path, query, body and type of content; and what comes of any answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client
from tests import web_servers
from tests.unit.core.builders import job

from elastipod_operator.core.actions import JobEvent
from elastipod_operator.core.reasons import Reason
from elastipod_operator.kube.api import EVENT_MESSAGE_LIMIT, Api, ApiError, _message
from elastipod_operator.kube.queue_api import QueueApi

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
WORKLOADS = f"{KUEUE}/namespaces/team/workloads"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/team/leases"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml; charset=utf-8"
BODY = {"metadata": {"name": "x", "namespace": "team"}, "a": 1}
ANSWER = {"items": ["an item"], "metadata": {"resourceVersion": "7"}}
LIST = (["an item"], 7)


@dataclass
class Calls:
    """Keeps calls in place of making them: method and path, then what else was given."""

    answer: dict[str, Any] = field(default_factory=lambda: dict(ANSWER))
    made: list[Any] = field(default_factory=list)

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        self.made.append((f"{method} {path}", {**({} if body is None else {"body": body}), **more}))
        return self.answer

    def watch(self, path: str, query: list[tuple[str, str]], limit_s: float) -> Any:
        self.made.append((f"WATCH {path}", {"query": query, "limit_s": limit_s}))
        return "the events"


class RecordedApi(Api):
    """The operator's calls, kept."""

    def __init__(self, calls: Calls) -> None:
        self.call = calls.call  # type: ignore[method-assign]


# What is called; the target, what goes with it, and what is given back.
OF_API: list[tuple[Callable[[Api], Awaitable[Any]], str, dict[str, Any], Any]] = [
    (
        lambda api: api.list_pods("team", "u"), "GET /api/v1/namespaces/team/pods",
        {"query": [("labelSelector", "elastipod.io/job-uid=u")]}, LIST,
    ),
    (lambda api: api.list_nodes(), "GET /api/v1/nodes", {"query": [("resourceVersion", "0")]}, ["an item"]),
    (
        lambda api: api.effective_job("team", "llm"),
        "GET /apis/sagemaker.amazonaws.com/v1/namespaces/team/hyperpodpytorchjobs/llm", {}, ANSWER,
    ),
    (lambda api: api.create_pod(BODY), "POST /api/v1/namespaces/team/pods", {"body": BODY}, ANSWER),
    (lambda api: api.create_secret(BODY), "POST /api/v1/namespaces/team/secrets", {"body": BODY}, None),
    (
        lambda api: api.label_pod("team", "p", {"a": "b", "c": None}), "PATCH /api/v1/namespaces/team/pods/p",
        {"body": {"metadata": {"labels": {"a": "b", "c": None}}}, "content_type": MERGE}, None,
    ),
    (lambda api: api.read_lease("team", "l"), f"GET {LEASES}/l", {}, ANSWER),
    (
        lambda api: api.list_leases("l"), "GET /apis/coordination.k8s.io/v1/leases",
        {"query": [("fieldSelector", "metadata.name=l")]}, ["an item"],
    ),
    (lambda api: api.create_lease("team", BODY), f"POST {LEASES}", {"body": BODY}, None),
    (lambda api: api.replace_lease("team", "l", BODY), f"PUT {LEASES}/l", {"body": BODY}, None),
    (
        lambda api: api.read_crd(),
        "GET /apis/apiextensions.k8s.io/v1/customresourcedefinitions/hyperpodpytorchjobs.sagemaker.amazonaws.com", {}, ANSWER,
    ),
]  # fmt: skip
JOBS = "elastipod.io/share"
OF_QUEUES: list[tuple[Callable[[QueueApi], Any], str, dict[str, Any], Any]] = [
    (
        lambda api: api.list_workloads("team", "u"), f"GET {WORKLOADS}",
        {"query": [("labelSelector", f"kueue.x-k8s.io/job-uid=u,{JOBS}")]}, LIST,
    ),
    (lambda api: api.list_workloads(""), f"GET {KUEUE}/workloads", {"query": [("labelSelector", JOBS)]}, LIST),
    (lambda api: api.read_workload("team", "w"), f"GET {WORKLOADS}/w", {}, ANSWER),
    (lambda api: api.create_workload(BODY), f"POST {WORKLOADS}", {"body": BODY}, ANSWER),
    (
        lambda api: api.delete_workload("team", "w", "u"), f"DELETE {WORKLOADS}/w",
        {"body": {"preconditions": {"uid": "u"}}}, ANSWER,
    ),
    (
        lambda api: api.patch_workload_status("team", "w", BODY), f"PATCH {WORKLOADS}/w/status",
        {"body": BODY, "content_type": MERGE}, ANSWER,
    ),
    (lambda api: api.patch_workload("team", "w", BODY), f"PATCH {WORKLOADS}/w", {"body": BODY, "content_type": MERGE}, ANSWER),
    (
        lambda api: api.apply_workload_status("me", BODY), f"PATCH {WORKLOADS}/x/status",
        {
            "body": '{"metadata": {"name": "x", "namespace": "team"}, "a": 1}', "content_type": APPLY,
            "query": [("fieldManager", "me"), ("force", "true")],
        }, ANSWER,
    ),
    (lambda api: api.read_local_queue("team", "q"), f"GET {KUEUE}/namespaces/team/localqueues/q", {}, ANSWER),
    (lambda api: api.list_local_queues("team"), f"GET {KUEUE}/namespaces/team/localqueues", {}, ["an item"]),
    (lambda api: api.list_local_queues(""), f"GET {KUEUE}/localqueues", {}, ["an item"]),
    (lambda api: api.list_cluster_queues(), f"GET {KUEUE}/clusterqueues", {}, ["an item"]),
    (lambda api: api.read_flavor("f"), f"GET {KUEUE}/resourceflavors/f", {}, ANSWER),
    (
        lambda api: api.read_class("WorkloadPriorityClass", "c"), f"GET {KUEUE}/workloadpriorityclasses/c", {}, ANSWER,
    ),
    (lambda api: api.read_class("PriorityClass", "c"), "GET /apis/scheduling.k8s.io/v1/priorityclasses/c", {}, ANSWER),
    (lambda api: api.list_priority_classes(), "GET /apis/scheduling.k8s.io/v1/priorityclasses", {}, ["an item"]),
    (lambda api: api.read_node("n"), "GET /api/v1/nodes/n", {}, ANSWER),
]  # fmt: skip


@pytest.mark.parametrize(("make", "target", "given", "answer"), OF_API, ids=[each[1] for each in OF_API])
async def test_calls_of_the_operator(
    make: Callable[[Api], Awaitable[Any]], target: str, given: dict[str, Any], answer: Any
) -> None:
    calls = Calls()
    assert await make(RecordedApi(calls)) == answer
    assert calls.made == [(target, given)]


@pytest.mark.parametrize(("make", "target", "given", "answer"), OF_QUEUES, ids=[each[1] for each in OF_QUEUES])
async def test_calls_about_queues(
    make: Callable[[QueueApi], Awaitable[Any]], target: str, given: dict[str, Any], answer: Any
) -> None:
    calls = Calls()
    assert await make(QueueApi(calls)) == answer
    assert calls.made == [(target, given)]


async def test_a_list_without_a_version_is_of_the_first() -> None:
    calls = Calls({"items": [], "metadata": {}})
    assert await RecordedApi(calls).list_pods("team", "u") == ([], 0)
    assert await QueueApi(calls).list_workloads("team") == ([], 0)


@pytest.mark.parametrize(("namespace", "path"), [("team", WORKLOADS), ("", f"{KUEUE}/workloads")])
def test_workloads_are_watched_from_a_version_on_with_a_margin_for_an_end_that_never_comes(
    namespace: str, path: str
) -> None:
    calls = Calls()
    assert QueueApi(calls).watch_workloads(namespace, 9, 300) == "the events"  # type: ignore[comparison-overlap]
    query = [
        ("labelSelector", JOBS),
        ("resourceVersion", "9"),
        ("timeoutSeconds", "300"),
        ("allowWatchBookmarks", "true"),
    ]
    assert calls.made == [(f"WATCH {path}", {"query": query, "limit_s": 330})]


@pytest.mark.parametrize(("reason", "type_"), [(Reason.RESIZING, "Normal"), (Reason.DRAIN_SHORTENED, "Warning")])
async def test_an_event_is_about_its_job_and_says_when_it_happened(reason: Reason, type_: str) -> None:
    calls, api = Calls(), None
    api = RecordedApi(calls)
    of, at = job(namespace="team", name="l" * 253), datetime(2026, 1, 2, 3, 4, 5, 678, timezone(timedelta(hours=2)))
    event = JobEvent(reason, "m" * 2000)
    for _ in range(2):
        await api.emit(of, event, at)
    (target, given), (_, again) = calls.made
    body = given["body"]
    name = body["metadata"].pop("name")
    assert target == "POST /api/v1/namespaces/team/events"
    assert (name[:201], len(name)) == ("l" * 200 + ".", 217)
    assert again["body"]["metadata"]["name"] != name, "no Event replaces another"
    assert given == {
        "body": {
            "apiVersion": "v1", "kind": "Event", "metadata": {"namespace": "team"},
            "involvedObject": {
                "apiVersion": "sagemaker.amazonaws.com/v1", "kind": "HyperPodPyTorchJob", "name": of.name, "namespace": "team",
                "uid": of.uid,
            },
            "type": type_, "reason": reason, "message": "m" * EVENT_MESSAGE_LIMIT,
            "source": {"component": "elastipod-operator"}, "reportingComponent": "elastipod-operator",
            "firstTimestamp": "2026-01-02T01:04:05Z", "lastTimestamp": "2026-01-02T01:04:05Z", "count": 1,
        }
    }  # fmt: skip


# ---- over HTTP


@asynccontextmanager
async def answered(status: int, text: str) -> AsyncIterator[tuple[Api, list[Any]]]:
    """Give the calls to a server that answers all of them in one way, and what it was asked."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        words = await request.text()
        asked.append(
            (request.method, request.path_qs, request.headers["Accept"], request.headers["Content-Type"], words)
        )
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=web_servers.SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")) as calls:
            yield Api(calls), asked
    finally:
        await web_servers.end(runner)


async def test_a_call_says_what_it_sends_and_wants_and_gives_the_answer() -> None:
    async with answered(200, '{"b": 2}') as (api, asked):
        assert await api.call("GET", "/one", query=[("a", "1"), ("a", "2")]) == {"b": 2}
        assert await api.call("PATCH", "/two", {"a": 1}, content_type=MERGE) == {"b": 2}
        assert await api.call("PATCH", "/three", '{"a": 1}', content_type=APPLY) == {"b": 2}
    assert asked == [
        ("GET", "/one?a=1&a=2", "application/json", "application/json", ""),
        ("PATCH", "/two", "application/json", MERGE, '{"a": 1}'),
        ("PATCH", "/three", "application/json", APPLY, '{"a": 1}'),
    ]


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (404, '{"message": "no such pod"}', "no such pod"),
        (300, '{"message": "elsewhere"}', "elsewhere"),
        (500, "<html>" + "x" * 400, "<html>" + "x" * 294),
        (200, "<html>", "the answer is not JSON; is there a proxy before the API server?"),
    ],
)
async def test_an_answer_that_is_none_is_an_error_with_its_code_and_words(status: int, text: str, said: str) -> None:
    async with answered(status, text) as (api, _):
        with pytest.raises(ApiError) as caught:
            await api.call("GET", "/one")
    assert (caught.value.status, str(caught.value)) == (status, said)


@pytest.mark.parametrize(
    ("raw", "said"), [(b'{"message": 5}', "5"), (b"{}", "{}"), (b"[]", "[]"), (b"\xff", "\ufffd"), (b"null", "null")]
)
def test_what_is_no_status_is_shown_as_it_is(raw: bytes, said: str) -> None:
    assert _message(raw) == said


async def test_the_lines_of_a_watch_are_events_and_the_request_says_that_it_is_one() -> None:
    async with answered(200, '{"type": "ADDED"}\n\n{"type": "DELETED"}\n{"half": ') as (api, asked):
        events = [event async for event in api.watch("/pods", [("a", "1")], 60)]
    assert events == [{"type": "ADDED"}, {"type": "DELETED"}]
    assert asked == [("GET", "/pods?a=1&watch=true", "application/json", "application/json", "")]
