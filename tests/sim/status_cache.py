"""What the agents of the job said last, as the operator's board has it: heartbeats, changes, answers that come late."""

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
from elastipod_operator.agents.peer_reachability import ASK_AFTER, PEERS_ASKED
from elastipod_operator.agents.status import BadAnswer, read
from elastipod_operator.agents.status_cache import Address
from elastipod_operator.core.silence import SILENCE_LIMIT, is_answering
from elastipod_operator.core.snapshot import ObservedAgent

HEARTBEAT_S = 4.0


@dataclass(slots=True)
class Watched:
    """One agent on the board."""

    address: Address
    fact: ObservedAgent
    heard_at: float
    asked_at: float = 0.0
    """When other agents were asked about it."""
    worker_data: str = ""
    is_retired: bool = False
    """Its container has ended; what it said last stays known."""


class SimBoard:
    """The part of the operator's board that decisions and orders are made from.

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
    ) -> None:
        self._kernel = kernel
        self._rng = rng
        self._cluster = cluster
        self._now = now
        self._wake = wake
        self._held_until = held_until
        self._watched: dict[str, Watched] = {}
        self.is_open = True

    def fact(self, pod_uid: str) -> ObservedAgent:
        return self._watched[pod_uid].fact if pod_uid in self._watched else ObservedAgent()

    def progress(self, pod_uids: Iterable[str]) -> dict[str, Any]:
        return {}

    def worker_data(self, pod_uids: Iterable[str]) -> list[Any] | None:
        told = [self._watched[uid] for uid in pod_uids if uid in self._watched]
        if any(one.fact.refused_answer for one in told):
            return None
        return [entry for one in told for entry in json.loads(f"[{one.worker_data}]")]

    def watch(self, pod_uid: str, address: Address) -> None:
        """Begin to ask an agent."""
        self._watched[pod_uid] = Watched(address, ObservedAgent(trying_since=self._now()), -HEARTBEAT_S)
        real = self._cluster.pods.get(pod_uid)
        if real is not None:
            self.agent_changed(real)

    def watches(self, pod_uid: str, ip: str, port: int, restarts: int) -> bool:
        """Whether the agent of a pod is asked at this address already. restarts: of its container."""
        watched = self._watched.get(pod_uid)
        return watched is not None and (watched.address.ip, watched.address.restarts) == (ip, restarts)

    def asks(self, pod_uid: str) -> bool:
        """Whether an agent is asked, so that its answers and its silence are known."""
        return pod_uid in self._watched and not self._watched[pod_uid].is_retired

    def retire(self, pod_uid: str) -> None:
        """Stop asking an agent that has ended."""
        if pod_uid in self._watched:
            self._watched[pod_uid].is_retired = True

    def forget(self, pod_uid: str) -> None:
        """Stop asking the agent of a pod that is gone."""
        self._watched.pop(pod_uid, None)

    async def close(self) -> None:
        """Stop asking everybody."""
        self._watched.clear()

    def beat(self) -> Script:
        """Ask everybody every few seconds."""
        while True:
            yield 1.0
            for uid, watched in list(self._watched.items()):
                if watched.is_retired:
                    continue
                pod = self._cluster.pods.get(uid)
                watched.fact = replace(watched.fact, refused=pod is not None and pod.refuses())
                if pod is not None and pod.answers() and self._kernel.now - watched.heard_at >= HEARTBEAT_S:
                    self._refresh(pod)
                since = watched.fact.last_answer or watched.fact.trying_since
                silence = self._now() - since if since is not None else timedelta(0)
                if pod is not None and silence >= ASK_AFTER and self._kernel.now - watched.asked_at >= HEARTBEAT_S:
                    self._ask_peers(pod, watched)
                if silence >= SILENCE_LIMIT:
                    self._wake(watched.address.job)

    def _ask_peers(self, silent: SimPod, watched: Watched) -> None:
        """Ask other agents whether they reach one that does not answer."""
        asked_at = self._now()
        others = (self._cluster.pods.get(uid) for uid, one in self._watched.items() if _can_tell(one, asked_at))
        able = [pod for pod in others if pod is not None and pod is not silent and pod.answers() and pod.hears()]
        if not able:
            return
        watched.asked_at = self._kernel.now
        words = [pod.reaches(silent) for pod in self._rng.sample(able, min(len(able), PEERS_ASKED))]

        def heard() -> None:
            if self.is_open and self._watched.get(silent.uid) is watched:
                watched.fact = replace(watched.fact, is_reached=any(words), peers_asked_at=asked_at)
                self._cluster.met[f"peers: {'it is reached' if any(words) else 'it is missed'}"] += 1
                self._wake(watched.address.job)

        self._kernel.after(self._rng.uniform(0.01, 2.2), heard)

    def agent_changed(self, pod: SimPod) -> None:
        """An agent answers a long poll."""
        self._kernel.after(self._rng.uniform(0.005, 0.1), lambda: self._refresh(pod))

    def _refresh(self, pod: SimPod) -> None:
        if not self.is_open or pod.uid not in self._watched or pod.agent is None or not pod.answers():
            return
        if self._kernel.now < self._held_until():
            return
        said, late_s = pod.agent.status(), pod.agent.lags_until - self._kernel.now
        if late_s <= 0:
            self._take(pod, said)
        else:  # what it said arrives when it is not true any more
            self._cluster.met["agent: answers late"] += 1
            self._kernel.after(min(late_s, 1.0 + pod.agent.lag_s), lambda: self._take(pod, said))

    def _take(self, pod: SimPod, said: Body) -> None:
        watched = self._watched.get(pod.uid)
        if not self.is_open or watched is None or watched.is_retired:
            return
        before, now = watched.fact, self._now()
        try:
            answer = read(said, before, now)
        except BadAnswer:
            return
        watched.fact, watched.worker_data, watched.heard_at = answer.fact, answer.worker_data, self._kernel.now
        is_news = shipped._matters(before) != shipped._matters(watched.fact)
        if is_news or shipped._was_silent(before, watched.fact):
            self._wake(watched.address.job)


def _can_tell(one: Watched, now: datetime) -> bool:
    return one.fact.can_reach and not one.is_retired and is_answering(one.fact, now)
