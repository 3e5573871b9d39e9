"""A job whose decisions take long leaves most of the event loop to the others."""

from __future__ import annotations

import asyncio

from tests.unit.operator_shell.test_in_flight import turn

from elastipod_operator.decision_limiter import IDLE_FACTOR, SLOW_S, DecisionLimiter


class Loop:
    """A clock of the event loop that stands still until it is moved."""

    def __init__(self) -> None:
        self.no_pass_running = asyncio.Event()
        self.limiter = DecisionLimiter(self.no_pass_running)
        self.order: list[str] = []

    def begin(self, name: str, decision_s: float) -> asyncio.Task[None]:
        async def decide() -> None:
            await self.limiter.wait(decision_s)
            self.order.append(name)

        return asyncio.create_task(decide())


async def test_quick_jobs_never_wait_and_slow_ones_follow_each_other() -> None:
    """Two hostile jobs, whose decisions would take a thousand seconds, do not keep a quick one waiting at all."""
    loop = Loop()
    slow = [loop.begin(name, 1000.0) for name in ("first", "second")]
    await turn()
    assert loop.order == ["first"], "nobody has been slow before it"
    quick = [loop.begin(f"quick {n}", SLOW_S / 2) for n in range(3)]
    await asyncio.gather(*quick)
    assert loop.order == ["first", "quick 0", "quick 1", "quick 2"]
    loop.no_pass_running.set()
    await asyncio.gather(*slow)
    assert loop.order[-1] == "second", "while nobody else has anything to do it need not wait"


async def test_slow_jobs_rest_for_as_long_as_their_decisions_take_and_longer() -> None:
    loop, clock = Loop(), asyncio.get_running_loop()
    began = clock.time()
    for n in range(3):
        await loop.begin(str(n), SLOW_S)
    assert clock.time() - began >= 2 * (1 + IDLE_FACTOR) * SLOW_S
    assert loop.order == ["0", "1", "2"]


async def test_a_job_that_is_gone_while_it_waits_keeps_no_other_from_its_turn() -> None:
    loop = Loop()
    await loop.begin("first", 1000.0)
    waiting = [loop.begin(name, 1000.0) for name in ("gone", "next")]
    await turn()
    waiting[0].cancel()
    loop.no_pass_running.set()
    await waiting[1]
    assert loop.order == ["first", "next"]
