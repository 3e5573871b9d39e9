"""One holder at a time, and the end at once for who is none any more."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.unit.operator_shell.api_server import ApiServer

from elastipod_operator.kube import lease as lease_module
from elastipod_operator.kube.api import Api
from elastipod_operator.kube.lease import Lease


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in fractions of a second."""
    monkeypatch.setattr(lease_module, "LEASE_S", 0.4)
    monkeypatch.setattr(lease_module, "RENEW_DEADLINE_S", 0.3)
    monkeypatch.setattr(lease_module, "RETRY_S", 0.02)


def lease(api: Api, holder: str) -> Lease:
    return Lease(api, "team", "operator", holder)


async def within(seconds: float, waiting: asyncio.Task[None]) -> None:
    async with asyncio.timeout(seconds):
        await waiting


async def test_the_first_takes_it_and_a_restarted_one_takes_it_back(api: Api, server: ApiServer) -> None:
    await lease(api, "a").acquire()
    await lease(api, "a").acquire()
    spec = server.leases["operator"]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("a", 0)


async def test_the_standby_waits_until_it_is_released(api: Api, server: ApiServer) -> None:
    first = lease(api, "a")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    standby = asyncio.create_task(lease(api, "b").acquire())
    assert not (await asyncio.wait([standby], timeout=0.6))[0], "the lease was renewed all the time"
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    await first.release()
    await within(1, standby)
    assert server.leases["operator"]["spec"]["holderIdentity"] == "b"


async def test_the_standby_takes_over_from_one_that_died(api: Api) -> None:
    await lease(api, "a").acquire()
    began = time.monotonic()
    await within(3, asyncio.create_task(lease(api, "b").acquire()))
    assert time.monotonic() - began >= 0.4


async def test_who_cannot_renew_ends_before_the_lease_can_pass_on(api: Api, server: ApiServer) -> None:
    mine = lease(api, "a")
    await mine.acquire()
    server.is_broken = True
    began = time.monotonic()
    await within(2, asyncio.create_task(mine.hold()))
    assert time.monotonic() - began < 0.4


async def test_who_sees_another_holder_ends_at_once(
    api: Api, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW_DEADLINE_S", 60.0)
    mine = lease(api, "a")
    await mine.acquire()
    holding = asyncio.create_task(mine.hold())
    server.leases["operator"]["spec"]["holderIdentity"] = "b"
    server.put(server.leases, server.leases["operator"])
    await within(2, holding)


async def test_the_lease_of_another_is_not_released(api: Api, server: ApiServer) -> None:
    await lease(api, "a").acquire()
    await lease(api, "b").release()
    assert server.leases["operator"]["spec"]["holderIdentity"] == "a"
