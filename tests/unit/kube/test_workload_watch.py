"""The watch of Workloads: Kueue may be missing, come later, be away, or go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest
from aiohttp import web
from kubernetes.aio import client
from tests import web_servers
from tests.patience import PATIENCE_S
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.kube.queue_bodies import workload_body

from elastipod_operator.kube import workload_watch
from elastipod_operator.kube.api import Api, ApiError, lines_of
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.store import Store
from elastipod_operator.kube.workload_watch import WorkloadWatch

Body = dict[str, Any]
MISSING = ApiError(404, "the server could not find the requested resource")


class Script:
    """Gives prepared answers to list calls, and for each list the events of a watch; then waits for ever."""

    def __init__(self, *answers: tuple[list[Body], list[Body]] | Exception) -> None:
        self.answers = list(answers)
        self.events: list[Body] = []
        self.lists: list[str] = []
        self.versions: list[int] = []

    async def list_workloads(self, namespace: str) -> tuple[list[Body], int]:
        self.lists.append(namespace)
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        bodies, self.events = answer
        return bodies, 30 + 10 * len(self.lists)

    async def watch_workloads(self, namespace: str, version: int, seconds: int) -> AsyncIterator[Body]:
        self.versions.append(version)
        for event in self.events:
            yield event


class Followed:
    """A watch with its store, until the script is through. log: what it told, in order."""

    def __init__(self, script: Script) -> None:
        self.store = Store()
        self.store.put_job(job_body())
        self.store.replace_workloads(JOB_UID, (), 1)
        self.told: list[str] = []
        self.script = script

    async def run(self, namespaces: Iterable[str] = ()) -> list[str]:
        wanted = asyncio.Event()
        watch = WorkloadWatch(
            cast(QueueApi, self.script), self.store, self.told.append, lambda: self.told.append("back"), wanted
        )
        asked = len(self.script.answers)
        task = asyncio.create_task(watch.run(list(namespaces)))
        await asyncio.sleep(0)
        assert self.script.lists == [], "nothing is asked before a job has a queue"
        wanted.set()
        await until(lambda: len(self.script.lists) > asked)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return self.told

    def numbers(self) -> list[int]:
        return [one.fact.number for one in self.store.jobs[JOB_UID].workloads.items]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_watch, "FIRST_PAUSE_S", 0.0)


def event(kind: str, body: Body) -> Body:
    return {"type": kind, "object": body}


async def test_a_list_and_what_comes_after_it() -> None:
    events = [
        event("BOOKMARK", {"metadata": {"resourceVersion": "60"}}),
        event("ADDED", workload_body(1, version=61)),
        event("MODIFIED", workload_body(1, version=62)),
        event("DELETED", workload_body(0, version=63)),
    ]
    followed = Followed(Script(([workload_body(0)], events)))
    assert await followed.run() == [JOB_UID, JOB_UID, JOB_UID], "the list, what was added, what went"
    assert followed.numbers() == [1]
    assert followed.script.versions == [40]


async def test_a_version_that_is_too_old_leads_to_another_list() -> None:
    events = [event("ERROR", {"code": 410}), event("ADDED", workload_body(1, version=61))]
    followed = Followed(Script(([], events), ([workload_body(0, version=45)], [])))
    await followed.run()
    assert followed.numbers() == [0]


async def test_kueue_may_come_later() -> None:
    followed = Followed(Script(MISSING, MISSING, MISSING, ([workload_body(0)], [])))
    assert await followed.run() == ["back", JOB_UID]
    assert followed.numbers() == [0]


async def test_kueue_may_go_but_one_answer_does_not_prove_it() -> None:
    seen: tuple[list[Body], list[Body]] = ([workload_body(0)], [])
    followed = Followed(Script(seen, MISSING))
    await followed.run()
    assert followed.numbers() == [0]
    followed = Followed(Script(seen, MISSING, MISSING))
    assert await followed.run() == [JOB_UID, JOB_UID]
    assert followed.numbers() == []


async def test_kueue_may_be_away_and_nothing_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    away = ApiError(500, "conversion webhook for kueue.x-k8s.io/v1beta1, TransitionKind=Workload failed")
    lost: list[Exception] = [ConnectionResetError("reset"), TimeoutError()]
    followed = Followed(
        Script(([workload_body(0)], []), away, away, *lost, MISSING, away, MISSING, ([workload_body(0)], []))
    )
    assert await followed.run() == [JOB_UID, "back"]
    assert followed.numbers() == [0]
    said = [record.getMessage() for record in caplog.records if "cannot be read now" in record.getMessage()]
    assert said == [f"Workloads cannot be read now: ApiError {away}"], "once, not with every attempt"


async def test_what_cannot_be_read_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(Script(([], [cast(Body, "no event")]), ([workload_body(0, version=45)], [])))
    await followed.run()
    assert followed.numbers() == [0]
    assert "the watch of Workloads failed" in caplog.text


@pytest.mark.parametrize("nonsense", ["nonsense", None, {}, {"metadata": 7}, {"metadata": {"labels": [1]}}])
async def test_an_object_that_cannot_be_read_does_not_keep_the_others_away(nonsense: Any) -> None:
    listed = Followed(Script(([nonsense, workload_body(0)], []), ([nonsense, workload_body(0)], [])))
    await listed.run()
    assert listed.numbers() == [0]
    events = [{"type": "ADDED", "object": nonsense}, {"type": "ADDED", "object": workload_body(1, version=45)}]
    watched = Followed(Script(([], events)))
    await watched.run()
    assert watched.numbers() == [1]
    assert len(watched.script.versions) == 1, "the watch went on"


async def test_namespaces_are_watched_one_by_one() -> None:
    script = Script(([], []), ([], []))
    await Followed(script).run(["a", "b"])
    assert {*script.lists} == {"a", "b"}


# -- the stream


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_lines_are_put_together_from_any_pieces() -> None:
    found = [line async for line in lines_of(chunks(b'{"a"', b': 1}\n\n{"b', b'": 2}\n{"c": 3}\n', b'{"half'))]
    assert found == [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}']


async def test_watches_leave_other_calls_their_connections() -> None:
    """There may be more watched namespaces than connections in a pool."""
    watched: list[str] = []
    is_over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"answer": 1})
        stream = web.StreamResponse()
        await stream.prepare(request)
        watched.append(request.path)
        await is_over.wait()
        return stream

    application = web.Application()
    application.add_routes([web.get("/{any:.*}", answer)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=web_servers.SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    clients = [client.ApiClient(client.Configuration(host=host, connection_pool_maxsize=most)) for most in (2, 0)]
    api = Api(*clients)

    async def follow(namespace: str) -> None:
        async for _ in QueueApi(api).watch_workloads(namespace, 1, 300):
            pass

    watches = [asyncio.create_task(follow(namespace)) for namespace in ("a", "b", "c")]
    try:
        await until(lambda: len(watched) == 3)
        async with asyncio.timeout(PATIENCE_S):
            assert await api.call("GET", "/version") == {"answer": 1}
    finally:
        is_over.set()
        for one in watches:
            one.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for one_client in clients:
            await one_client.close()  # type: ignore[no-untyped-call]  # the client has no annotations here
        await web_servers.end(runner)


async def test_a_watch_is_a_stream_of_events_and_a_refusal_is_an_error() -> None:
    asked: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(dict(request.query))
        if request.match_info["namespace"] == "gone":
            return web.json_response({"message": "no such thing"}, status=404)
        stream = web.StreamResponse()
        await stream.prepare(request)
        # Longer than any buffer that somebody might have set for a line.
        await stream.write(json.dumps(event("ADDED", {"metadata": {"name": "x" * 300_000}})).encode() + b"\n")
        return stream

    application = web.Application()
    application.add_routes([web.get("/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads", answer)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=web_servers.SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    calls = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    try:
        api = QueueApi(Api(calls))
        (found,) = [one async for one in api.watch_workloads("team", 7, 300)]
        assert len(found["object"]["metadata"]["name"]) == 300_000
        assert asked[0] == {
            "labelSelector": "elastipod.io/share", "resourceVersion": "7", "timeoutSeconds": "300",
            "allowWatchBookmarks": "true", "watch": "true",
        }  # fmt: skip
        with pytest.raises(ApiError, match="no such thing"):
            async for _ in api.watch_workloads("gone", 7, 300):
                pass
    finally:
        await calls.close()  # type: ignore[no-untyped-call]  # the client has no annotations here
        await web_servers.end(runner)
