"""What the agents of the job said last, as the operator's status cache has it: heartbeats, changes, answers that come late."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from random import Random
from typing import Any

from tests.sim.cluster import Cluster
from tests.sim.kernel import Kernel, Script
from tests.sim.objects import Body, SimPod

from elastipod_operator.agents import status_cache as shipped
from elastipod_operator.agents.authentication import Authenticators
from elastipod_operator.agents.peer_reachability import ASK_AFTER, PEERS_ASKED
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status import InvalidStatus, parse_status
from elastipod_operator.core.silence import SILENCE_LIMIT, is_answering
from elastipod_operator.core.snapshot import ObservedAgent

HEARTBEAT_S = 4.0


@dataclass(slots=True)
class PolledAgent:
    """An agent that is polled, and its newest status."""

    address: Address
    fact: ObservedAgent
    heard_at: float
    asked_at: float = 0.0
    """When other agents were asked about it."""
    worker_data: str = ""
    is_stopped: bool = False
    """Its container has ended; what it said last stays known."""


class SimStatusCache:
    """The part of the operator's status cache that decisions and orders are made from.

    wake: called when something that matters changed. held_until: the operator stands still until then.
    """

    def __init__(
        self,
        kernel: Kernel,
        rng: Random,
        cluster: Cluster,
        now: Callable[[], datetime],
        wake: Callable[[str], None],
        held_until: Callable[[], float],
        authenticators: Authenticators,
    ) -> None:
        self._kernel = kernel
        self._rng = rng
        self._cluster = cluster
        self._now = now
        self._wake = wake
        self._held_until = held_until
        self._authenticators = authenticators
        self._polled: dict[str, PolledAgent] = {}
        self.is_open = True

    def fact(self, pod_uid: str) -> ObservedAgent:
        return self._polled[pod_uid].fact if pod_uid in self._polled else ObservedAgent()

    def progress(self, pod_uids: Iterable[str]) -> dict[str, Any]:
        return {}

    def worker_data(self, pod_uids: Iterable[str]) -> list[Any] | None:
        told = [self._polled[uid] for uid in pod_uids if uid in self._polled]
        if any(one.fact.refused_answer for one in told):
            return None
        return [entry for one in told for entry in json.loads(f"[{one.worker_data}]")]

    def watch(self, pod_uid: str, address: Address) -> None:
        """Begin to ask an agent."""
        self._polled[pod_uid] = PolledAgent(address, ObservedAgent(trying_since=self._now()), -HEARTBEAT_S)
        real = self._cluster.pods.get(pod_uid)
        if real is not None:
            self.agent_changed(real)

    def watches(self, pod_uid: str, ip: str, port: int, restarts: int = 0) -> bool:
        """Whether the agent of a pod is asked at this address already. restarts: of its container."""
        polled = self._polled.get(pod_uid)
        return polled is not None and (polled.address.ip, polled.address.restarts) == (ip, restarts)

    def asks(self, pod_uid: str) -> bool:
        """Whether an agent is asked, so that its answers and its silence are known."""
        return pod_uid in self._polled and not self._polled[pod_uid].is_stopped

    def stop_polling(self, pod_uid: str) -> None:
        """Stop asking an agent that has ended."""
        if pod_uid in self._polled:
            self._polled[pod_uid].is_stopped = True

    def forget(self, pod_uid: str) -> None:
        """Stop asking the agent of a pod that is gone."""
        self._polled.pop(pod_uid, None)

    async def close(self) -> None:
        """Stop asking everybody."""
        self._polled.clear()

    def beat(self) -> Script:
        """Ask everybody every few seconds."""
        while True:
            yield 1.0
            for uid, polled in list(self._polled.items()):
                if polled.is_stopped:
                    continue
                pod = self._cluster.pods.get(uid)
                is_refused = pod is not None and pod.refuses()
                if is_refused is not polled.fact.connection_refused:
                    polled.fact = replace(polled.fact, connection_refused=is_refused)
                if pod is not None and pod.answers() and self._kernel.now - polled.heard_at >= HEARTBEAT_S:
                    self._refresh(pod)
                since = polled.fact.last_answer or polled.fact.trying_since
                silence = self._now() - since if since is not None else timedelta(0)
                if pod is not None and silence >= ASK_AFTER and self._kernel.now - polled.asked_at >= HEARTBEAT_S:
                    self._ask_peers(pod, polled)
                if silence >= SILENCE_LIMIT:
                    self._wake(polled.address.job)

    def _ask_peers(self, silent: SimPod, polled: PolledAgent) -> None:
        """Ask other agents whether they reach one that does not answer."""
        asked_at = self._now()
        others = (self._cluster.pods.get(uid) for uid, one in self._polled.items() if _can_tell(one, asked_at))
        able = [pod for pod in others if pod is not None and pod is not silent and pod.answers() and pod.hears()]
        if not able:
            return
        polled.asked_at = self._kernel.now
        words = [pod.reaches(silent) for pod in self._rng.sample(able, min(len(able), PEERS_ASKED))]

        def heard() -> None:
            if self.is_open and self._polled.get(silent.uid) is polled:
                polled.fact = replace(polled.fact, is_reached=any(words), peers_asked_at=asked_at)
                self._cluster.met[f"peers: {'it is reached' if any(words) else 'it is missed'}"] += 1
                self._wake(polled.address.job)

        self._kernel.after(self._rng.uniform(0.01, 2.2), heard)

    def agent_changed(self, pod: SimPod) -> None:
        """An agent answers a long poll."""
        self._kernel.after(self._rng.uniform(0.005, 0.1), lambda: self._refresh(pod))

    def _refresh(self, pod: SimPod) -> None:
        if not self.is_open or pod.uid not in self._polled or pod.agent is None or not pod.answers():
            return
        if self._kernel.now < self._held_until():
            return
        polled, said, late_s = self._polled[pod.uid], pod.agent.status(), pod.agent.lags_until - self._kernel.now
        credentials, network = polled.address.credentials, self._cluster.network
        is_refused = not network.call(pod, self._authenticators, credentials, "GET", "/status", None, said)
        if is_refused != polled.fact.authentication_failed:
            polled.fact = replace(polled.fact, authentication_failed=is_refused)
            self._wake(polled.address.job)
        if is_refused:
            return
        if late_s <= 0:
            self._take(pod, said)
        else:  # what it said arrives when it is not true any more
            self._cluster.met["agent: answers late"] += 1
            self._kernel.after(min(late_s, 1.0 + pod.agent.lag_s), lambda: self._take(pod, said))

    def _take(self, pod: SimPod, said: Body) -> None:
        polled = self._polled.get(pod.uid)
        if not self.is_open or polled is None or polled.is_stopped:
            return
        before, now = polled.fact, self._now()
        try:
            answer = parse_status(said, before, now)
        except InvalidStatus:
            return
        polled.fact, polled.worker_data, polled.heard_at = answer.fact, answer.worker_data, self._kernel.now
        is_news = shipped._stable_part(before) != shipped._stable_part(polled.fact)
        if is_news or shipped._was_silent(before, polled.fact):
            self._wake(polled.address.job)


def _can_tell(one: PolledAgent, now: datetime) -> bool:
    return one.fact.can_reach and not one.is_stopped and is_answering(one.fact, now)
