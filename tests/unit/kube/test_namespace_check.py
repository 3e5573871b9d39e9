"""Which of the watched namespaces may not be read is told once, and so is that one may be read again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.agents.fake_agent import until

from elastipod_operator.kube import namespace_check
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.namespace_check import NamespaceCheck

FORBIDDEN = ApiError(403, "hyperpodpytorchjobs is forbidden")


class Jobs:
    """Lists jobs, unless there is an error for the namespace."""

    def __init__(self, **errors: Exception) -> None:
        self.errors = dict(errors)
        self.asked: list[str] = []

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        assert (method, more) == ("GET", {"query": [("limit", "1")]})
        namespace = path.split("/")[5]
        assert path == f"/apis/sagemaker.amazonaws.com/v1/namespaces/{namespace}/hyperpodpytorchjobs"
        self.asked.append(namespace)
        if namespace in self.errors:
            raise self.errors[namespace]
        return {"items": []}

    def watch(self, path: str, query: list[tuple[str, str]], limit_s: float) -> AsyncIterator[dict[str, Any]]:
        raise AssertionError("nothing is watched")


async def test_a_namespace_that_is_gone_is_told_once_and_so_is_its_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(namespace_check, "CHECK_EVERY_S", 0.0)
    caplog.set_level("INFO")
    jobs = Jobs(gone=FORBIDDEN)
    check = NamespaceCheck(jobs, ["team", "gone"])
    await check.first()
    running = asyncio.create_task(check.run())
    await until(lambda: jobs.asked.count("gone") > 3)
    assert caplog.text.count("the jobs of namespace gone cannot be read") == 1
    jobs.errors["gone"] = TimeoutError()
    asked = len(jobs.asked)
    await until(lambda: len(jobs.asked) > asked + 4)
    assert "again" not in caplog.text, "no answer says nothing"
    jobs.errors.clear()
    await until(lambda: caplog.text.count("the jobs of namespace gone can be read again") == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert "team" not in caplog.text


async def test_an_operator_that_may_read_none_of_its_namespaces_ends() -> None:
    with pytest.raises(ApiError, match="forbidden"):
        await NamespaceCheck(Jobs(a=FORBIDDEN, b=FORBIDDEN), ["a", "b"]).first()


async def test_an_api_server_that_does_not_answer_yet_ends_nothing() -> None:
    await NamespaceCheck(Jobs(a=TimeoutError(), b=FORBIDDEN), ["a", "b"]).first()
    await NamespaceCheck(Jobs(), []).first()
