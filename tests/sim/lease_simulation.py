"""Operators that take turns as leader: the lease as it is shipped, in virtual time, over a model of the API server that holds it.

Calls take long, arrive though nobody waits for them any more, and lose their answers. Operators die, are replaced, and stand still.
At no time may two of them act. One that stands still does not act, and notices that it has lost the lease before it acts again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, cast

from tests.sim.invariant_state import Violation
from tests.sim.kernel import EPOCH, Kernel
from tests.sim.process import VirtualLoop, raise_now
from tests.stored_lease import StoredLease

from elastipod_operator.clock import SteadyClock
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.lease import LEASE_S, RENEW_DEADLINE_S, RETRY_S, Lease
from elastipod_operator.kube.scope import Scope

TROUBLED_S = 600.0
SETTLE_S = LEASE_S + RENEW_DEADLINE_S + 5 * RETRY_S
Body = dict[str, Any]


class TroubledLeaseServer(StoredLease):
    """The API server, as far as one lease is concerned."""

    def __init__(self, kernel: Kernel, rng: Random, met: Counter[str]) -> None:
        super().__init__()
        self._kernel = kernel
        self._rng = rng
        self._met = met
        self.down_until = self.slow_until = self.lossy_until = 0.0

    async def read_lease(self, namespace: str, name: str) -> Body:
        return await self._call(self.read)

    async def create_lease(self, namespace: str, body: Body) -> Body:
        return await self._call(lambda: self.write(body, must_exist=False))

    async def replace_lease(self, namespace: str, name: str, body: Body) -> Body:
        return await self._call(lambda: self.write(body, must_exist=True))

    def _delay_s(self) -> float:
        return self._rng.uniform(0.0, 7.0 if self._kernel.now < self.slow_until else 0.05)

    async def _call(self, effect: Callable[[], Body]) -> Body:
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            error: Exception | None = None
            body: Body = {}
            if self._kernel.now < self.down_until:
                error = ConnectionRefusedError("connection refused")
            else:
                try:
                    body = effect()
                except ApiError as refused:
                    error = refused
                    self._met["409"] += "modified" in str(refused)
            if self._kernel.now < self.lossy_until and self._rng.random() < 0.4:
                self._met["an answer is lost"] += 1
                return
            self._kernel.after(self._delay_s(), lambda: settle(body, error))

        def settle(body: Body, error: Exception | None) -> None:
            if answer.done():
                self._met["a call that nobody waited for arrived"] += 1
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(body)

        self._kernel.after(self._delay_s(), arrive)
        return await answer


class Operator:
    """One process that wants to lead, and acts while it believes that it does."""

    def __init__(self, simulation: LeaseSimulation, holder: str) -> None:
        kernel = simulation.kernel
        self.holder = holder
        self.leads = False
        self.is_superseded = False
        """Another one has begun to lead while this one stood still."""
        self.alive = True
        self.held_until = 0.0
        """It stands still until then."""
        clock = SteadyClock(wall=lambda: EPOCH.timestamp() + kernel.now, steady=lambda: kernel.now)
        self._simulation = simulation
        self._loop = VirtualLoop(kernel, clock, lambda: self.held_until)  # type: ignore[abstract]  # no sockets are used
        self._loop.at_rest = self._look
        self._lease = Lease(cast(Api, simulation.server), "elastipod", "elastipod-operator", holder, Scope("release"))
        with self._loop.inside():
            self._task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        await self._lease.acquire()
        self.leads = True
        self._simulation.begins(self)
        await self._lease.hold()
        self.leads = False
        self._simulation.met["the lease is lost"] += 1
        self.die()

    def _look(self) -> None:
        if self.leads and self.is_superseded:
            raise Violation(f"{self.holder} stood still, has lost the lease meanwhile, and goes on as leader")

    def leave(self) -> None:
        """It is asked to end: it acts no more, and gives the lease back."""
        self.leads = False
        self._task.cancel()
        with self._loop.inside():
            release = asyncio.create_task(self._lease.release())
        release.add_done_callback(lambda _: self.die())

    def die(self) -> None:
        """The process ends; a container begins in its place."""
        if self.alive:
            self.alive = self.leads = False
            self._simulation.kernel.after(0.0, self._loop.end)
            self._simulation.replace(self)


class LeaseSimulation:
    """Two or three operators of one release, and what happens to them."""

    def __init__(self, seed: int) -> None:
        self.kernel = Kernel()
        self.rng = Random(seed)
        self.met: Counter[str] = Counter()
        self.server = TroubledLeaseServer(self.kernel, self.rng, self.met)
        self._is_over = False
        self._count = 0
        self._operators = [self._new_operator() for _ in range(self.rng.choice((2, 2, 3)))]

    def run(self) -> Counter[str]:
        """Run to the end; gives what was met. Raises Violation."""
        self._schedule_trouble()
        self.kernel.run(TROUBLED_S)
        self.server.down_until = self.server.slow_until = self.server.lossy_until = 0.0
        self._is_over = True
        self.kernel.run(TROUBLED_S + 60.0 + SETTLE_S)
        leaders = [one.holder for one in self._operators if one.leads]
        for one in self._operators:
            one.alive = False
            one._loop.end()
        if len(leaders) != 1:
            raise Violation(f"when all trouble is over, these lead: {leaders}")
        return self.met

    def begins(self, leader: Operator) -> None:
        """An operator begins to act. It is a task's, so what is wrong is raised outside of it."""
        self.met["an operator leads"] += 1
        for other in self._operators:
            if other is leader or not other.leads:
                continue
            if other.held_until <= self.kernel.now:
                violation = Violation(f"{leader.holder} and {other.holder} lead at {self.kernel.now:.2f}")
                self.kernel.at(self.kernel.now, partial(raise_now, violation))
            other.is_superseded = True
            self.met["a leader that stands still is replaced"] += 1

    def replace(self, gone: Operator) -> None:
        """Begin another life: of the same pod, or of one in its place."""
        is_same_pod = self.rng.random() < 0.5

        def begin() -> None:
            self._operators.remove(gone)
            self._operators.append(self._new_operator(gone.holder if is_same_pod else ""))

        self.kernel.after(self.rng.uniform(0.5, 15.0), begin)

    def _new_operator(self, holder: str = "") -> Operator:
        self._count += 1
        return Operator(self, holder or f"operator-{self._count}")

    def _schedule_trouble(self) -> None:
        at = 0.0
        while (at := at + self.rng.expovariate(1 / 20.0)) < TROUBLED_S:
            self.kernel.at(at, self.rng.choice((self._die, self._leave, self._stand_still, self._trouble_the_server)))

    def _living(self) -> Operator | None:
        """Give an operator, and more often than not the leader."""
        living = [one for one in self._operators if one.alive and one.held_until <= self.kernel.now]
        leading = [one for one in living if one.leads]
        return self.rng.choice(leading if leading and self.rng.random() < 0.7 else living) if living else None

    def _die(self) -> None:
        if (one := self._living()) is not None:
            one.die()

    def _leave(self) -> None:
        if (one := self._living()) is not None and one.leads:
            one.leave()

    def _stand_still(self) -> None:
        if (one := self._living()) is not None:
            one.held_until = self.kernel.now + self.rng.choice((1.0, 6.0, 12.0, 25.0, 60.0))

    def _trouble_the_server(self) -> None:
        until = self.kernel.now + self.rng.uniform(1.0, 40.0)
        trouble = self.rng.choice(("down_until", "slow_until", "lossy_until"))
        setattr(self.server, trouble, until)
