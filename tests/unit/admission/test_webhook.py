"""The webhook's server: TLS with certificates that change while it serves, lookups of queues, and bodies of any shape."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.unit.admission.test_review import good
from tests.unit.agents.fake_agent import until

from elastipod_operator.admission import authority_bundle
from elastipod_operator.admission import webhook as admission_webhook
from elastipod_operator.admission.authority_bundle import refresh_bundle
from elastipod_operator.admission.certificates import SERVES_FOR, Certificates, Files, SelfMade
from elastipod_operator.admission.webhook import CHECK_AGAIN_S, PATH, Webhook
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.scope import Scope
from elastipod_operator.queueing.workload_control import KUEUE_MISSING

KEY = b"k" * 32


class Calls:
    """Answers the calls of the webhook, and keeps what is written."""

    def __init__(self, answer: dict[str, Any] | Exception | None = None) -> None:
        self.answer, self.calls = answer or {}, [("", "", "")][:0]
        self.configuration: dict[str, Any] = {"webhooks": [{"name": "jobs.elastipod.io", "clientConfig": {}}]}

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        self.calls.append((method, path, str(more.get("content_type", ""))))
        if method == "PATCH":
            self.configuration = body
        if "validatingwebhookconfigurations" in path:
            return self.configuration
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def read_local_queue(self, namespace: str, name: str) -> dict[str, Any]:
        return await self.call("GET", f"{namespace}/{name}")

    async def effective_job(self, namespace: str, name: str) -> dict[str, Any]:
        return await self.call("GET", f"{namespace}/{name}")


@asynccontextmanager
async def serving(webhook: Webhook) -> AsyncIterator[None]:
    task = asyncio.create_task(webhook.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def post(port: int, trusted: bytes, body: bytes) -> tuple[int, str]:
    context = ssl.create_default_context(cadata=trusted.decode())
    async with aiohttp.ClientSession() as session:
        call = session.post(f"https://127.0.0.1:{port}{PATH}", data=io.BytesIO(body), ssl=context)
        async with call as answer:
            return answer.status, await answer.text()


async def is_served(port: int, trusted: bytes) -> bool:
    try:
        return (await post(port, trusted, b"{}"))[0] == 200
    except aiohttp.ClientError:
        return False


async def eventually(holds: Callable[[], Any]) -> None:
    """Wait for an asynchronous condition."""
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110  # nothing tells when another connection would succeed
            await asyncio.sleep(0.02)


def webhook(port: int, certificates: Certificates, calls: Calls | None = None, **more: Any) -> Webhook:
    calls = calls or Calls()
    scope = more.pop("scope", Scope("mine"))
    return Webhook(port, certificates, calls, calls, scope, check_again_s=0.02, **more)  # type: ignore[arg-type]  # as much of QueueApi as it calls


async def test_an_expired_certificate_is_replaced_while_the_webhook_serves() -> None:
    port, now = free_port(), [datetime.now(UTC) - 2 * SERVES_FOR]
    certificates = SelfMade([KEY], "127.0.0.1")
    trusted = certificates.bundle(datetime.now(UTC))
    async with serving(webhook(port, certificates, clock=lambda: now[0])):

        async def expired() -> bool:
            with suppress(aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorError):
                await post(port, trusted, b"{}")
            with suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return not await is_served(port, trusted)
            return False

        await eventually(expired)
        now[0] = datetime.now(UTC)
        await eventually(lambda: is_served(port, trusted))


async def test_it_waits_for_its_files_and_takes_renewed_ones(tmp_path: Path) -> None:
    port, first, second = free_port(), SelfMade([KEY], "127.0.0.1"), SelfMade([b"s" * 32], "127.0.0.1")
    now = datetime.now(UTC)

    def issue(authority: SelfMade) -> None:
        pair = authority.pair(now)
        (tmp_path / "tls.key").write_bytes(pair.key)
        (tmp_path / "tls.crt").write_bytes(pair.certificate)

    async with serving(webhook(port, Files(tmp_path))):
        issue(first)
        await eventually(lambda: is_served(port, first.bundle(now)))
        issue(second)  # for a moment the key of one and the certificate of the other
        await eventually(lambda: is_served(port, second.bundle(now)))
        assert not await is_served(port, first.bundle(now))


async def test_a_port_in_use_is_told_once_and_taken_when_it_is_free(caplog: pytest.LogCaptureFixture) -> None:
    port, certificates = free_port(), SelfMade([KEY], "127.0.0.1")
    taken = await asyncio.start_server(lambda reader, writer: None, port=port)
    async with serving(webhook(port, certificates)):
        await until(lambda: "jobs are accepted without warnings" in caplog.text)
        taken.close()
        await taken.wait_closed()
        await eventually(lambda: is_served(port, certificates.bundle(datetime.now(UTC))))
    assert caplog.text.count("jobs are accepted without warnings") == 1


async def test_with_a_full_disk_there_is_no_webhook_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The TLS library reads certificates from files only. Without the webhook, jobs are created all the same."""
    port, certificates, has_room = free_port(), SelfMade([KEY], "127.0.0.1"), [False]
    with_room = tempfile.NamedTemporaryFile

    def made(*arguments: Any, **options: Any) -> Any:
        if not has_room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return with_room(*arguments, **options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", made)
    async with serving(webhook(port, certificates)):
        await until(lambda: "jobs are accepted without warnings: [Errno 28] No space left on device" in caplog.text)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        has_room[0] = True
        await eventually(lambda: is_served(port, certificates.bundle(datetime.now(UTC))))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"{", 400, id="no JSON"),
        pytest.param(b"[" * 200_000, 400, id="nested too deep"),
        pytest.param(b"7", 200, id="no object"),
        pytest.param(b'{"request": {"object": {"spec": {"replicaSpecs": [7]}}}}', 200, id="a job of another shape"),
        pytest.param(b'"' + b"x" * (9 * 1024 * 1024) + b'"', 413, id="too large"),
    ],
)
async def test_bodies_of_any_shape_are_answered(body: bytes, status: int) -> None:
    port, certificates = free_port(), SelfMade([KEY], "127.0.0.1")
    trusted = certificates.bundle(datetime.now(UTC))
    async with serving(webhook(port, certificates)):
        await eventually(lambda: is_served(port, trusted))
        assert (await post(port, trusted, body))[0] == status
        assert await is_served(port, trusted)


MISSING = ApiError(404, 'localqueues.kueue.x-k8s.io "fast" not found')
ACTIVE = {"metadata": {"name": "fast", "namespace": "team"}, "spec": {"clusterQueue": "all", "stopPolicy": "Hold"}}


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        pytest.param(MISSING, "LocalQueue fast does not exist in namespace team", id="missing"),
        pytest.param(ApiError(404, "404 page not found"), KUEUE_MISSING, id="no Kueue"),
        pytest.param(ACTIVE, "LocalQueue fast admits nothing more", id="stopped"),
        pytest.param(ApiError(403, "forbidden"), "", id="no permission"),
        pytest.param(TimeoutError(), "", id="no answer"),
    ],
)
async def test_the_queue_of_a_job_is_looked_up(found: dict[str, Any] | Exception, sentence: str) -> None:
    calls = Calls(found)
    request = {"operation": "CREATE", "namespace": "team", "object": good(labels={"kueue.x-k8s.io/queue-name": "fast"})}
    given = await webhook(1, SelfMade([KEY], "x"), calls).review({"request": request})
    assert [path for _, path, _ in calls.calls] == ["team/fast"]
    assert [one[: len(sentence)] for one in given["response"]["warnings"]] == ([sentence] if sentence else [])


NAMED = {"annotations": {"elastipod.io/controller": "blue"}}
SCALE = {"operation": "UPDATE", "subResource": "scale", "namespace": "team", "name": "job"}
TO_ZERO = {**SCALE, "object": {"spec": {"replicas": 0}}, "oldObject": {"spec": {"replicas": 2}}}
RELEASES = [
    pytest.param(Scope("a", controller="blue"), NAMED, True, id="it is named"),
    pytest.param(Scope("a", controller="green"), NAMED, False, id="another is named"),
    pytest.param(Scope("a", controller="green"), {}, True, id="none is named"),
    pytest.param(
        Scope("a", controller="green", only_named=True), {}, False, id="none is named, and it runs named ones only"
    ),
    pytest.param(Scope("a", ("other",), controller="blue"), NAMED, False, id="it watches other namespaces"),
    pytest.param(Scope("a", ("other", "team"), controller="blue"), NAMED, True, id="it watches this namespace"),
]


@pytest.mark.parametrize(("scope", "meta", "is_told"), RELEASES)
async def test_a_release_is_silent_about_the_jobs_of_others(scope: Scope, meta: dict[str, Any], is_told: bool) -> None:
    calls = Calls(MISSING)
    body = good({"runPolicy": {"ttlSecondsAfterFinished": 0}}, labels={"kueue.x-k8s.io/queue-name": "fast"}, **meta)
    request = {"uid": "u", "operation": "CREATE", "namespace": "team", "object": body}
    given = await webhook(1, SelfMade([KEY], "x"), calls, scope=scope).review({"request": request})
    assert (given["response"]["uid"], given["response"]["allowed"]) == ("u", True)
    assert len(given["response"]["warnings"]) == (2 if is_told else 0)
    assert len(calls.calls) == (1 if is_told else 0), "nor is anything looked up for them"


@pytest.mark.parametrize(("scope", "meta", "is_told"), RELEASES)
async def test_whose_job_is_scaled_is_looked_up(scope: Scope, meta: dict[str, Any], is_told: bool) -> None:
    """A scale does not show the annotations of its job."""
    calls = Calls(good(**meta))
    given = await webhook(1, SelfMade([KEY], "x"), calls, scope=scope).review({"request": TO_ZERO})
    assert len(given["response"]["warnings"]) == (1 if is_told else 0)
    assert {path for _, path, _ in calls.calls} <= {"team/job"}


@pytest.mark.parametrize(
    ("found", "scaled"),
    [
        pytest.param(ApiError(404, "not found"), TO_ZERO, id="it is gone"),
        pytest.param(TimeoutError(), TO_ZERO, id="no answer"),
        pytest.param(good(), {**TO_ZERO, "name": "../secrets/x"}, id="a name that cannot be one"),
        pytest.param(good(), {**TO_ZERO, "name": None}, id="no name"),
    ],
)
async def test_where_the_scaled_job_is_unknown_nothing_is_said(
    found: dict[str, Any] | Exception, scaled: dict[str, Any]
) -> None:
    calls = Calls(found)
    given = await webhook(1, SelfMade([KEY], "x"), calls).review({"request": scaled})
    assert (given["response"]["allowed"], given["response"]["warnings"]) == (True, [])
    assert {path for _, path, _ in calls.calls} <= {"team/job"}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(TO_ZERO, id="whose job is scaled"),
        pytest.param({"namespace": "team", "object": good(labels={"kueue.x-k8s.io/queue-name": "fast"})}, id="the queue"),
    ],
)  # fmt: skip
async def test_a_look_up_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]) -> None:
    class Hangs(Calls):
        async def call(self, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
            return await asyncio.Future[dict[str, Any]]()

    monkeypatch.setattr(admission_webhook, "LOOKUP_LIMIT_S", 0.01)
    async with asyncio.timeout(PATIENCE_S):
        given = await webhook(1, SelfMade([KEY], "x"), Hangs()).review({"request": asked})
    assert (given["response"]["allowed"], given["response"]["warnings"]) == (True, [])


async def test_a_scale_of_which_there_is_nothing_to_say_costs_no_call() -> None:
    calls = Calls(good())
    scaled = {**SCALE, "object": {"spec": {"replicas": 3}}, "oldObject": {"spec": {"replicas": 2}}}
    given = await webhook(1, SelfMade([KEY], "x"), calls).review({"request": scaled})
    assert (given["response"]["warnings"], calls.calls) == ([], [])


async def test_the_leader_writes_the_authority_when_it_has_to() -> None:
    calls, certificates, now = Calls(), SelfMade([KEY], "x"), datetime(2026, 3, 1, tzinfo=UTC)
    assert await refresh_bundle(calls, "mine", certificates, now)  # type: ignore[arg-type]  # as much of RawCalls as it calls
    assert calls.calls[-1][0::2] == ("PATCH", "application/strategic-merge-patch+json")
    written = json.dumps(calls.configuration)
    assert not await refresh_bundle(calls, "mine", certificates, now + timedelta(days=90))  # type: ignore[arg-type]
    assert json.dumps(calls.configuration) == written
    assert await refresh_bundle(calls, "mine", certificates, now + timedelta(days=200))  # type: ignore[arg-type]
    assert json.dumps(calls.configuration) != written


async def test_a_bundle_that_someone_damaged_is_replaced() -> None:
    calls, certificates = Calls(), SelfMade([KEY], "x")
    calls.configuration["webhooks"][0]["clientConfig"]["caBundle"] = "%%%"
    assert await refresh_bundle(calls, "mine", certificates, datetime(2026, 3, 1, tzinfo=UTC))  # type: ignore[arg-type]


async def test_a_leader_keeps_the_authority_written_and_says_once_why_it_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each entry of the story is a look: what the call raised, or None for the standby; and for how long it rests afterwards."""
    refused = ApiError(403, "forbidden")
    story: list[Exception | str] = ["standby", refused, refused, OSError("no route"), "works", refused]
    looks, rests = iter(story), [0.0][:0]
    current: list[Exception | str] = []
    now = datetime(2026, 3, 1, tzinfo=UTC)

    async def refresh(*given: Any) -> bool:
        assert given == (calls, "mine", certificates, now)
        if isinstance(current[0], Exception):
            raise current[0]
        return True

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    def leads() -> bool:
        current[:] = [next(looks, asyncio.CancelledError())]  # type: ignore[list-item]
        if isinstance(current[0], asyncio.CancelledError):
            raise current[0]
        return current[0] != "standby"

    calls, certificates = Calls(), SelfMade([KEY], "x")
    monkeypatch.setattr(authority_bundle, "refresh_bundle", refresh)
    monkeypatch.setattr(asyncio, "sleep", rest)
    with pytest.raises(asyncio.CancelledError):
        await authority_bundle.keep_bundle(calls, "mine", certificates, leads, lambda: now)  # type: ignore[arg-type]
    assert rests == [1.0, *[CHECK_AGAIN_S] * 5]
    said = "the authority of the admission webhook cannot be written to mine: "
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{said}ApiError forbidden", f"{said}OSError no route", f"{said}ApiError forbidden",
    ]  # fmt: skip


async def test_every_webhook_of_the_configuration_gets_the_authority() -> None:
    calls, certificates, now = Calls(), SelfMade([KEY], "x"), datetime(2026, 3, 1, tzinfo=UTC)
    calls.configuration["webhooks"].append({"name": "other", "clientConfig": {}})
    assert await refresh_bundle(calls, "mine", certificates, now)  # type: ignore[arg-type]
    written = calls.configuration["webhooks"]
    assert [each["name"] for each in written] == ["jobs.elastipod.io", "other"]
    bundles = [base64.b64decode(each["clientConfig"]["caBundle"]) for each in written]
    assert bundles[0] == bundles[1]
    assert certificates.is_current(bundles[0], now)
    assert [call[1] for call in calls.calls] == [f"{authority_bundle.CONFIGURATIONS}/mine"] * 2
