"""The webhook beside the operator: what runs for which settings, its end with the operator's, and an end of its own."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import pytest

from elastipod_operator.admission import authority_bundle
from elastipod_operator.admission.certificates import Files, SelfMade
from elastipod_operator.admission.serving import webhook_beside
from elastipod_operator.admission.webhook import Webhook
from elastipod_operator.kube.api import Api
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.options import Options

API = cast(Api, object())


class Running:
    """What has been started, with what it was given, and what has ended."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, ...]] = []
        self.ended: list[str] = []
        self.error: Exception | None = None

    async def run(self, name: str, *given: Any) -> None:
        self.begun.append((name, *given))
        try:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.ended.append(name)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    found = Running()

    async def serve(webhook: Webhook) -> None:
        await found.run("webhook", webhook._port, webhook._certificates, webhook._queues, webhook._scope)

    async def keep(*given: Any) -> None:
        await found.run("bundle", *given)

    monkeypatch.setattr(Webhook, "run", serve)
    monkeypatch.setattr(authority_bundle, "keep_bundle", keep)
    return found


def leads() -> bool:
    return True


def settings(tmp_path: Path, **more: Any) -> Options:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    given = {"webhook_port": 9443, "webhook_name": "hook.svc", "install_key_file": str(key), **more}
    return Options(("a",), 0, "info", "pod", "ops", **given)


async def begin(options: Options, running: Running) -> list[tuple[Any, ...]]:
    async with webhook_beside(options, API, leads):
        for _ in range(3):
            await asyncio.sleep(0)
        assert running.ended == []
    assert sorted(running.ended) == sorted(each[0] for each in running.begun), "all ends with the operator"
    return running.begun


async def test_without_a_port_there_is_no_webhook(tmp_path: Path, running: Running) -> None:
    assert await begin(settings(tmp_path, webhook_port=0, webhook_configuration="hook"), running) == []


async def test_certificates_of_somebody_else_are_served_and_nothing_is_written_of_them(
    tmp_path: Path, running: Running
) -> None:
    options = settings(tmp_path, webhook_certificates=str(tmp_path / "certs"), webhook_configuration="hook")
    ((name, port, certificates, queues, scope),) = await begin(options, running)
    assert (name, port, type(certificates), type(queues), scope) == ("webhook", 9443, Files, QueueApi, options.scope)
    assert certificates._folder == tmp_path / "certs"
    assert queues._api is API


@pytest.mark.parametrize("configuration", ["", "hook"])
async def test_the_operators_own_are_of_its_key_and_name_and_its_configuration_has_their_authority(
    tmp_path: Path, running: Running, configuration: str
) -> None:
    (_, port, own, queues, scope), *rest = await begin(settings(tmp_path, webhook_configuration=configuration), running)
    assert (port, type(own), type(queues), scope.namespaces) == (9443, SelfMade, QueueApi, ("a",))
    assert own._name == "hook.svc"
    (authority,), (same,) = own._authorities, SelfMade([b"k" * 32], "")._authorities
    assert authority.public_key == same.public_key
    assert rest == ([("bundle", API, "hook", own, leads)] if configuration else [])


async def test_an_end_of_its_own_is_an_error_with_its_cause_and_ends_nothing_else(
    tmp_path: Path, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.error = OSError("broken")
    async with webhook_beside(settings(tmp_path), API, leads):
        for _ in range(3):
            await asyncio.sleep(0)
    (said,) = caplog.records
    assert (said.levelno, said.exc_info and said.exc_info[1]) == (logging.ERROR, running.error)
    assert said.getMessage() == "the admission webhook ended; jobs are accepted without its warnings"
