"""One holder at a time, and the end at once for who is none any more. In virtual time, on an API server in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from tests.stored_lease import StoredLease
from tests.unit.operator_shell.virtual_time import run_in_virtual_time

from elastipod_operator import clock
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.lease import LEASE_S, RENEW_DEADLINE_S, RETRY_S, Lease
from elastipod_operator.kube.preflight import Refusal
from elastipod_operator.kube.scope import Scope, scope_of

NAME = "operator"
Scenario = Callable[["LeaseServer"], Coroutine[Any, Any, None]]


def now() -> float:
    return asyncio.get_running_loop().time()


class LeaseServer(StoredLease):
    """Keeps a lease as the API server does. takes_s: from a request to its arrival, and from there to the answer.

    asked: when each write was asked for, and by whom. cut_off: whose writes fail, while others' succeed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False
        self.cut_off: str | None = None
        self.takes_s = (0.0, 0.0)
        self.asked: list[tuple[float, str]] = []

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])

    async def read_lease(self, namespace: str, name: str) -> dict[str, Any]:
        await self._arrives()
        return await self._answer(self.read())

    async def create_lease(self, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._write(body, must_exist=False)

    async def replace_lease(self, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._write(body, must_exist=True)

    async def _write(self, body: dict[str, Any], *, must_exist: bool) -> dict[str, Any]:
        by = body["spec"]["holderIdentity"]
        self.asked.append((now(), by))
        await self._arrives()
        if by == self.cut_off:
            raise ApiError(503, "etcd is away")
        return await self._answer(self.write(body, must_exist=must_exist))

    async def _arrives(self) -> None:
        await asyncio.sleep(self.takes_s[0])
        if self.is_broken:
            raise ApiError(503, "etcd is away")

    async def _answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self.takes_s[1])
        return answer

    def lease_of(self, holder: str, release: str = "") -> Lease:
        return Lease(cast(Api, self), "team", NAME, holder, Scope(release))


def play(monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    """Run a scenario, with the loop's clock in place of the machine's in the lease, too."""

    async def all_of_it() -> None:
        monkeypatch.setattr(clock, "steady", now)
        await scenario(LeaseServer())

    run_in_virtual_time(all_of_it())


def test_the_first_takes_it_and_a_restarted_one_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: LeaseServer) -> None:
        await server.lease_of("a").acquire()
        await server.lease_of("a").acquire()
        assert server.lease is not None
        spec = server.lease["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("a", 0)

    play(monkeypatch, scenario)


def test_the_standby_waits_until_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: LeaseServer) -> None:
        first = server.lease_of("a")
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        standby = asyncio.create_task(server.lease_of("b").acquire())
        assert not (await asyncio.wait([standby], timeout=100 * LEASE_S))[0], "the lease was renewed all the time"
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await first.release()
        released_at = now()
        await standby
        assert now() - released_at <= RETRY_S
        assert server.holder == "b"

    play(monkeypatch, scenario)


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        pytest.param("one", "two", True, id="another release"),
        pytest.param("one", "one", False, id="the same"),
        pytest.param("", "two", False, id="an operator of an earlier version, or started by hand"),
    ],
)
def test_a_second_release_in_a_namespace_does_not_stand_by(
    monkeypatch: pytest.MonkeyPatch, first: str, second: str, is_refused: bool
) -> None:
    async def scenario(server: LeaseServer) -> None:
        await server.lease_of("a", first).acquire()
        with pytest.raises(Refusal if is_refused else TimeoutError) as ended:
            async with asyncio.timeout(1.0):
                await server.lease_of("b", second).acquire()
        told = "release one has its operator in namespace team already. Uninstall one of the two" if is_refused else ""
        assert str(ended.value).startswith(told)

    play(monkeypatch, scenario)


def test_the_lease_tells_others_when_its_holder_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: LeaseServer) -> None:
        lease = server.lease_of("a", "one")
        await lease.acquire()
        assert scope_of(server.lease or {}) == (Scope("one"), False)
        lease.leads = True
        await lease.acquire()
        assert scope_of(server.lease or {}) == (Scope("one"), True)

    play(monkeypatch, scenario)


def test_the_standby_takes_over_from_one_that_died_after_the_whole_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: LeaseServer) -> None:
        await server.lease_of("a").acquire()
        seen_at = now()
        await server.lease_of("b").acquire()
        assert LEASE_S < now() - seen_at <= LEASE_S + RETRY_S

    play(monkeypatch, scenario)


def test_who_cannot_renew_ends_when_its_time_since_the_last_good_request_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(server: LeaseServer) -> None:
        mine = server.lease_of("a")
        await mine.acquire()
        server.takes_s = (0.5, 1.5)
        holding = asyncio.create_task(mine.hold())
        await asyncio.sleep(8)
        last_good = server.asked[-1][0]
        server.is_broken = True
        await holding
        assert now() == pytest.approx(last_good - 2.0 + RENEW_DEADLINE_S), "from the read before it on"

    play(monkeypatch, scenario)


@pytest.mark.parametrize("there_s", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("back_s", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.0, 3.3, 5.1, 7.7])
@pytest.mark.parametrize("later_s", [0.0, 0.3, 1.0, 1.7], ids="standby {} s later".format)
def test_two_never_hold_it_however_slow_the_api_server_is(
    monkeypatch: pytest.MonkeyPatch, there_s: float, back_s: float, after_s: float, later_s: float
) -> None:
    """later_s: where between two renewals the standby looks at the lease."""

    async def scenario(server: LeaseServer) -> None:
        mine = server.lease_of("a")
        await mine.acquire()
        server.takes_s = (there_s, back_s)
        holding = asyncio.create_task(mine.hold())
        await asyncio.sleep(later_s)
        standby = asyncio.create_task(server.lease_of("b").acquire())
        ends: dict[str, float] = {}
        holding.add_done_callback(lambda _: ends.setdefault("holder", now()))
        standby.add_done_callback(lambda _: ends.setdefault("standby", now()))
        await asyncio.sleep(20 + after_s)
        assert ends == {}
        server.cut_off = "a"
        await asyncio.gather(holding, standby)
        assert ends["holder"] < ends["standby"]

    play(monkeypatch, scenario)


@pytest.mark.parametrize("prepares_s", [0.0, 4.0, 7.0, 13.0])
@pytest.mark.parametrize("back_s", [0.0, 2.4])
def test_the_time_between_taking_and_holding_it_counts(
    monkeypatch: pytest.MonkeyPatch, prepares_s: float, back_s: float
) -> None:
    """An operator looks for other releases and labels its pod in between, which takes long while the API server is slow."""

    async def scenario(server: LeaseServer) -> None:
        mine = server.lease_of("a")
        server.takes_s = (0.0, back_s)
        await mine.acquire()
        server.cut_off = "a"
        standby = asyncio.create_task(server.lease_of("b").acquire())
        await asyncio.sleep(prepares_s)
        await mine.hold()
        assert not standby.done(), "nobody acts for it while another one holds it"
        await standby
        assert server.holder == "b"

    play(monkeypatch, scenario)


def test_who_sees_another_holder_ends_at_its_next_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: LeaseServer) -> None:
        mine = server.lease_of("a")
        await mine.acquire()
        holding = asyncio.create_task(mine.hold())
        await asyncio.sleep(5)
        assert server.lease is not None
        server.lease["spec"]["holderIdentity"] = "b"
        server.put(server.lease)
        taken_at = now()
        await holding
        assert now() - taken_at <= RETRY_S

    play(monkeypatch, scenario)


def test_the_lease_of_another_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: LeaseServer) -> None:
        await server.lease_of("a").acquire()
        await server.lease_of("b").release()
        assert server.holder == "a"

    play(monkeypatch, scenario)
