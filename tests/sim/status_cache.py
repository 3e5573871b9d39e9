"""The operator's status cache as it is shipped, over the modelled network: long polls, answers that come late, agents that are silent.

What is modelled is one poll of an agent, and one question to another agent about it.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, cast

from tests.sim.agents import SimAgent
from tests.sim.invariant_state import Violation
from tests.sim.kernel import Kernel
from tests.sim.objects import Body, SimPod
from tests.sim.process import raise_now

from elastipod_operator import clock
from elastipod_operator.agents.authentication import AuthenticationFailed, Authenticators
from elastipod_operator.agents.encoded_json import EncodedJson
from elastipod_operator.agents.peer_reachability import CALL_S, PeerReachability
from elastipod_operator.agents.polled_agent import Address, PolledAgent
from elastipod_operator.agents.polls import ConnectFailed
from elastipod_operator.agents.status import AgentStatus, parse_status
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.agents.status_requests import CONNECT_S, StatusRequests, in_time

if TYPE_CHECKING:
    import aiohttp
    from tests.sim.job_views import JobView, Views

NO_SESSION = cast("aiohttp.ClientSession", None)
"""Nothing here goes over a real network."""
TO_ANSWER_S = (0.005, 0.1)
PollS = Callable[[PolledAgent], float]


class SimStatusCache(AgentStatusCache):
    """The cache of one operator. What it is asked about several jobs at once, or in the name of another job, is a Violation."""

    def __init__(
        self, views: Views, kernel: Kernel, rng: Random, wake: Callable[[str], None], known: Authenticators
    ) -> None:
        super().__init__(NO_SESSION, wake, known)
        self._views = views
        self._requests = self._polls = SimStatusRequests(views, kernel, rng, known)
        self._peers = SimPeerReachability(views, rng, known, wake)

    def watch(self, pod_uid: str, address: Address) -> None:
        if address.job != self._views.of_pod(pod_uid).cluster.job_uid:
            raise Violation(f"the agent of pod {pod_uid} is asked for job {address.job}")
        super().watch(pod_uid, address)

    def progress(self, pod_uids: Iterable[str], generation: int = 0) -> dict[str, Any]:
        return super().progress(self._views.of_pods(pod_uids)[1])

    def worker_data(self, pod_uids: Iterable[str]) -> EncodedJson | None:
        return super().worker_data(self._views.of_pods(pod_uids)[1])

    def asks(self, pod_uid: str) -> bool:
        """Whether an agent is asked, so that its answers and its silence are known."""
        polled = self._polled.get(pod_uid)
        return polled is not None and polled.task is not None

    def agent_changed(self, pod: SimPod) -> None:
        """An agent has news, or its process has ended: who waits for it hears of it."""
        self._polls.agent_changed(pod)


@dataclass(slots=True, eq=False)
class _Poll:
    """A poll that an agent has, and the future of its answer."""

    pod: SimPod
    agent: SimAgent
    answer: asyncio.Future[Body]


class SimStatusRequests(StatusRequests):
    """Polls over the modelled network. Connections break with the process of an agent; everything else is silence."""

    def __init__(self, views: Views, kernel: Kernel, rng: Random, known: Authenticators) -> None:
        self._views = views
        self._kernel = kernel
        self._rng = rng
        self._known = known
        self._waiting: dict[str, list[_Poll]] = {}

    async def ask(self, polled: PolledAgent, poll_s: PollS) -> AgentStatus:
        view = self._views.of_job(polled.address.job)
        pod = view.cluster.pod_at(polled.address.ip)
        wait_s = poll_s(polled) if polled.version is not None else 0.0
        if pod is None or pod.agent is None or not pod.answers():
            await self._fail(pod, wait_s, is_connected=polled.version is not None)
        assert pod is not None
        said = await in_time(self._answer(pod, polled.version, wait_s), wait_s + CONNECT_S + 1)
        if not self._is_believed(view, pod, polled, said):
            raise AuthenticationFailed("the answer is not from the job's agent")
        return parse_status(said, polled.fact, clock.now())

    def _is_believed(self, view: JobView, pod: SimPod, polled: PolledAgent, said: Body) -> bool:
        """Check an answer as the operator does. A Violation ends the run here: the cache outlives any error of a poll."""
        try:
            return view.cluster.network.call(pod, self._known, polled.address.credentials, "GET", "/status", None, said)
        except Violation as violation:
            self._kernel.at(self._kernel.now, partial(raise_now, violation))
            return False

    async def _fail(self, pod: SimPod | None, wait_s: float, *, is_connected: bool) -> None:
        """Wait for an answer that does not come. Raises OSError."""
        if pod is not None and pod.refuses():
            await asyncio.sleep(self._rng.uniform(*TO_ANSWER_S))
            raise ConnectFailed(errno.ECONNREFUSED, "connection refused")
        connects = is_connected or (pod is not None and pod.agent is not None and pod.agent.hangs())
        await asyncio.sleep(wait_s + CONNECT_S + 1 if connects else CONNECT_S)
        raise TimeoutError("the agent did not answer in time")

    async def _answer(self, pod: SimPod, known: int | None, wait_s: float) -> Body:
        """Give what an agent that is reached answers: at once if it has news, else with the next, or when the poll's time is over."""
        loop = asyncio.get_running_loop()
        assert pod.agent is not None
        poll = _Poll(pod, pod.agent, loop.create_future())
        waiting = self._waiting.setdefault(pod.uid, [])
        waiting.append(poll)
        limit = loop.call_later(wait_s + CONNECT_S + 1, self._time_out, poll)
        has_news = known is None or pod.agent.version != known
        self._kernel.after(self._rng.uniform(*TO_ANSWER_S) if has_news else wait_s, partial(self._reply, poll))
        try:
            return await poll.answer
        finally:
            limit.cancel()
            waiting.remove(poll)

    def agent_changed(self, pod: SimPod) -> None:
        for poll in self._waiting.get(pod.uid, ()):
            self._kernel.after(self._rng.uniform(*TO_ANSWER_S), partial(self._reply, poll))

    def _reply(self, poll: _Poll) -> None:
        """Let the answer of an agent arrive. The operator may read it much later, if it stands still."""
        pod, agent, future = poll.pod, poll.agent, poll.answer
        if future.done():
            return
        if not agent.alive:
            if pod.node_runs() and not pod.is_mute():
                future.set_exception(ConnectionResetError("the agent closed the connection"))
            return
        if not pod.answers():
            return
        said, late_s = agent.status(), agent.lags_until - self._kernel.now
        if late_s <= 0:
            future.set_result(said)
            return
        # It arrives when it is not true any more.
        self._views.of_pod(pod.uid).cluster.met["agent: answers late"] += 1
        self._kernel.after(min(late_s, 1.0 + agent.lag_s), lambda: None if future.done() else future.set_result(said))

    def _time_out(self, poll: _Poll) -> None:
        if not poll.answer.done():
            poll.answer.set_exception(TimeoutError("the agent did not answer in time"))


class SimPeerReachability(PeerReachability):
    """Questions to other agents over the modelled network."""

    def __init__(self, views: Views, rng: Random, known: Authenticators, wake: Callable[[str], None]) -> None:
        super().__init__(NO_SESSION, known, wake, parts=None)  # type: ignore[arg-type]  # no incomplete responses here
        self._views = views
        self._rng = rng

    async def _ask_peer(self, peer: Address, place: str) -> bool | None:
        view = self._views.of_job(peer.job)
        asked, silent = view.cluster.pod_at(peer.ip), view.cluster.pod_at(place.rpartition(":")[0])
        if asked is None or not (asked.hears() and asked.answers()):
            await asyncio.sleep(CALL_S)
            return None
        await asyncio.sleep(self._rng.uniform(0.01, 2.2))
        is_reached = silent is not None and asked.reaches(silent)
        view.cluster.met[f"peers: {'it is reached' if is_reached else 'it is missed'}"] += 1
        return is_reached
