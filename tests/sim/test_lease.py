"""The leader lease: whatever happens to operators and to the API server, no two of them act at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.sim.invariant_state import Violation
from tests.sim.lease_simulation import LeaseSimulation
from tests.slow import all_but_first

from elastipod_operator import clock
from elastipod_operator.kube import lease as shipped

SEEDS, SEEDS_OF_A_TEST, TRIES = 200, 50, 200
MUST_MEET = (
    "409",
    "an answer is lost",
    "a call that nobody waited for arrived",
    "an operator leads",
    "the lease is lost",
    "a leader that stands still is replaced",
)


@pytest.mark.parametrize("first", all_but_first(range(0, SEEDS, SEEDS_OF_A_TEST)))
def test_no_two_operators_lead_at_once_and_in_the_end_one_does(first: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_OF_A_TEST):
        try:
            met += LeaseSimulation(seed).run()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}", pytrace=False)
    assert [what for what in MUST_MEET if not met[what]] == []


def violation_of(seed: int) -> Violation | None:
    """Run a seed; give what was wrong."""
    try:
        LeaseSimulation(seed).run()
    except Violation as violation:
        return violation
    return None


def count_from_the_answer(self: Any, what: str) -> Any:
    """The deadline begins when the answer arrives, not when the request was sent."""

    async def tried() -> bool:
        held: bool = await TRY(self, what)
        if held:
            self._held_since = asyncio.get_running_loop().time()
        return held

    return tried()


def expire_early(self: Any, lease: dict[str, Any]) -> bool:
    """A lease counts as expired before its holder has given up."""
    holder = lease["spec"].get("holderIdentity")
    if not holder or holder == self.holder:
        return True
    version = str(lease["metadata"]["resourceVersion"])
    if version != self._seen:
        self._seen, self._seen_at = version, clock.steady()
    return bool(clock.steady() - self._seen_at > shipped.RENEW_DEADLINE_S - 3.0)


def take_whatever_came_between(self: Any, lease: dict[str, Any] | None) -> dict[str, Any]:
    """The lease is written over what others wrote since it was read."""
    body = BODY(self, lease)
    if lease is not None:
        body["metadata"]["resourceVersion"] = _Any()
    return body


async def never_give_up(self: Any) -> None:
    """A leader goes on though it cannot renew."""
    while await self._try("renew") or not self._is_foreign:  # noqa: ASYNC110  # as the rule that it replaces
        await asyncio.sleep(shipped.RETRY_S)


class _Any(str):
    """Equal to every version."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


TRY, BODY = shipped.Lease._try, shipped.Lease._body


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("_try", count_from_the_answer),
        ("_is_free", expire_early),
        ("_body", take_whatever_came_between),
        ("hold", never_give_up),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.__name__,
)
def test_a_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch, name: str, mistake: Callable[..., Any]) -> None:
    monkeypatch.setattr(shipped.Lease, name, mistake)
    found = filter(None, map(violation_of, range(TRIES)))
    assert "lead" in str(next(found, "nothing is found"))
