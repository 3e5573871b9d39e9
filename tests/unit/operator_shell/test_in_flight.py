"""Calls beside decisions: known while they are under way, withdrawn while they wait, in turn with those of other jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from tests.unit.agents.fake_agent import until

from elastipod_operator.in_flight import WRITE_PARALLEL, InFlight


class Calls:
    """Calls by number that answer when they are let, and how they ended. slots: of all jobs; stops: whose failure ends the rest."""

    def __init__(
        self, slots: asyncio.Semaphore | None = None, log: list[int] | None = None, stops: set[int] | None = None
    ) -> None:
        self.made: list[int] = [] if log is None else log
        self.let = asyncio.Event()
        self.broken: set[int] = set()
        self.held: dict[int, asyncio.Event] = {}
        self.settled: list[dict[int, str]] = []
        self.while_settling: Callable[[], None] = lambda: None
        ends = None if stops is None else (lambda error: int(str(error).split()[-1]) in stops)
        self.flight: InFlight[int] = InFlight(slots or asyncio.Semaphore(WRITE_PARALLEL), self._settle, ends)

    async def _call(self, number: int) -> None:
        self.made.append(number)
        await self.held.get(number, self.let).wait()
        if number in self.broken:
            raise OSError(f"call {number}")

    async def _settle(self, failed: Mapping[int, Exception]) -> None:
        self.settled.append({number: str(error) for number, error in failed.items()})
        self.while_settling()
        await asyncio.sleep(0)

    def begin(self, *numbers: int) -> None:
        self.flight.begin({number: partial(self._call, number) for number in numbers})

    async def end(self) -> None:
        """Let all calls end, and wait until that is settled."""
        self.let.set()
        await until(lambda: self.flight.is_idle)


async def turn() -> None:
    """Let everything go on as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_calls_are_known_until_they_are_answered_and_so_many_are_under_way_at_a_time() -> None:
    calls = Calls()
    calls.begin(*range(40))
    await turn()
    assert calls.made == list(range(WRITE_PARALLEL))
    assert all(number in calls.flight for number in range(40))
    await calls.end()
    assert sorted(calls.made) == list(range(40))
    assert not any(number in calls.flight for number in range(40))
    assert calls.settled == [{}]


async def test_what_waits_is_withdrawn_and_what_is_under_way_is_waited_for() -> None:
    calls = Calls()
    calls.begin(*range(40))
    await turn()
    assert calls.flight.keep_only(range(20)), "all that is under way is wanted"
    assert [number in calls.flight for number in (0, 19, 20, 39)] == [True, True, False, False]
    assert not calls.flight.keep_only({3, 19}), "others are under way"
    waits = asyncio.create_task(calls.flight.wait_unwanted())
    await turn()
    assert not waits.done()
    await calls.end()
    await waits
    assert sorted(calls.made) == [*range(WRITE_PARALLEL), 19]
    assert calls.flight.keep_only(())


async def test_who_comes_while_others_are_under_way_has_lanes_of_its_own() -> None:
    calls = Calls()
    calls.begin(0)
    await turn()
    calls.begin(*range(1, 40))
    await turn()
    assert len(calls.made) == WRITE_PARALLEL
    await calls.end()
    assert calls.settled == [{}], "once, after the last of all"


async def test_what_failed_is_known_until_all_is_settled() -> None:
    calls = Calls()
    calls.broken = {1, 20}
    known: list[bool] = []
    calls.while_settling = lambda: known.append(1 in calls.flight and 20 in calls.flight)
    calls.begin(*range(30))
    await calls.end()
    assert calls.settled == [{1: "call 1", 20: "call 20"}]
    assert known == [True]
    assert 1 not in calls.flight


async def test_what_failed_and_is_not_wanted_any_more_is_not_told() -> None:
    calls = Calls()
    calls.broken, calls.held = {0, 1}, {2: asyncio.Event()}
    calls.begin(0, 1, 2)
    calls.let.set()
    await turn()
    calls.flight.keep_only((1, 2))
    calls.held[2].set()
    await calls.end()
    assert calls.settled == [{1: "call 1"}]


async def test_calls_that_come_while_the_others_are_settled_are_made_and_settled_too() -> None:
    calls = Calls()
    calls.let.set()
    more = iter([(5, 6)])
    calls.while_settling = lambda: calls.begin(*next(more, ()))
    calls.broken = {0, 6}
    calls.begin(0)
    await calls.end()
    assert calls.made == [0, 5, 6]
    assert calls.settled[:2] == [{0: "call 0"}, {6: "call 6"}]


async def test_a_mistake_in_settling_leaves_nothing_behind() -> None:
    calls = Calls()

    def fail() -> None:
        raise RuntimeError("a mistake")

    calls.while_settling, calls.broken = fail, {0}
    calls.begin(0)
    await calls.end()
    assert 0 not in calls.flight
    calls.begin(0)
    await calls.end()
    assert calls.made == [0, 0]


async def test_few_calls_of_one_job_do_not_wait_for_the_many_of_another() -> None:
    slots, log = asyncio.Semaphore(WRITE_PARALLEL), list[int]()
    many, few = Calls(slots, log), Calls(slots, log)
    many.begin(*range(1000))
    await turn()
    few.begin(-1, -2)
    many.let.set()
    await few.end()
    await many.end()
    assert {log.index(-1), log.index(-2)} <= set(range(3 * WRITE_PARALLEL))
    assert len(log) == 1002


async def test_closed_nothing_goes_on() -> None:
    calls = Calls()
    calls.begin(*range(40))
    await turn()
    await calls.flight.close()
    calls.let.set()
    await turn()
    assert len(calls.made) == WRITE_PARALLEL
    assert calls.flight.is_idle


async def test_a_slow_start_doubles_with_each_round_that_succeeds() -> None:
    calls = Calls(stops=set())
    calls.held = {number: asyncio.Event() for number in range(200)}
    calls.begin(*range(200))
    rounds: list[int] = []
    answered = 0
    for _ in range(7):
        await turn()
        rounds.append(len(calls.made) - answered)
        for number in calls.made[answered:]:
            calls.held[number].set()
        answered = answered + rounds[-1]
    assert rounds == [1, 2, 4, 8, 16, 16, 16]
    for event in calls.held.values():
        event.set()
    await calls.end()
    assert sorted(calls.made) == list(range(200))


async def test_a_failure_that_stops_the_others_ends_the_batch_and_the_next_one_starts_slowly_again() -> None:
    calls = Calls(stops={3})
    calls.broken = {1, 3}
    known: list[tuple[bool, int]] = []

    def order_another() -> None:
        calls.begin(100)
        known.append((all(number in calls.flight for number in (3, 50, 99, 100)), calls.flight.num_skipped))

    calls.while_settling = order_another
    calls.begin(*range(100))
    await calls.end()
    calls.while_settling = lambda: None
    assert calls.settled == [{1: "call 1", 3: "call 3"}]
    assert len(calls.made) < 4 + WRITE_PARALLEL
    assert known == [(True, 101 - len(calls.made))], "what is not made is known until that is settled"
    assert not any(number in calls.flight for number in range(101))
    calls.let.clear()
    before = len(calls.made)
    calls.begin(*range(200, 220))
    await turn()
    assert len(calls.made) == before + 1
    await calls.end()
    assert calls.flight.num_skipped == 0


async def test_what_was_skipped_is_withdrawn_with_the_rest() -> None:
    calls = Calls(stops={0})
    calls.broken = {0}
    calls.while_settling = lambda: kept.append((calls.flight.keep_only(range(10)), calls.flight.num_skipped))
    kept: list[tuple[bool, int]] = []
    calls.begin(*range(40))
    await calls.end()
    assert (calls.made, kept) == ([0], [(True, 9)])
