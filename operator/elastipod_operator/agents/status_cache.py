"""The agent status cache: the newest status of every agent, kept up to date by one task for each pod.

Our agents are polled with long polls, so that a change of state arrives at once and an idle agent only sends heartbeats.
Agents of other makes are polled every second.

With thousands of agents the polls last longer, so that there are few heartbeats. The kernel then shows whether a machine is
alive (PollConnection.heard_at). At the first doubt about one agent all agents of its job are polled at once, with short polls.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import aiohttp

from .. import clock
from ..core.silence import SILENCE_LIMIT
from ..core.snapshot import ObservedAgent
from .authentication import AuthenticationFailed, Authenticators
from .budgets import ByteBudget
from .encoded_json import EncodedJson
from .peer_reachability import PeerReachability
from .polled_agent import Address, PolledAgent, with_kernel_activity
from .polls import ConnectFailed, PollInterrupted
from .status import MAX_EXCESS, MAX_REASON, AgentStatus, InvalidStatus
from .status_requests import CONNECT_S, LONG_POLL_S, StatusRequests
from .told_checkpoints import ToldCheckpoint, agreed_checkpoint, last_completed

log = logging.getLogger(__name__)

# Target rate of polls for an idle fleet, and the limit of the duration of a poll.
POLLS_PER_S, LONGEST_POLL_S = 250, 45.0
# Polls end together at these ticks: a hundred responses in a row cost a quarter of what they cost one by one, because the
# processor does not sleep in between.
TICK_S = 0.1
# How long a job gets short polls after a call to one of its agents failed.
SUSPECT_FOR_S = 30.0
# Spreads the polls of agents that began to train at the same moment.
SPREAD = 0.1
PLAIN_POLL_S = 1.0
# Retries until an agent answers, which is within a second of its container's start.
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 1.0
# An agent that does not support long polls: after this many quick responses in a row it is polled at an interval.
QUICK_S, QUICK_ANSWERS = 0.05, 10
# Interval of passes over jobs with silent agents.
SILENCE_WAKE_S = 1.0
MAX_PREFIXES = 64
MAX_REMEMBERED = 1024  # bytes of an entry that is kept after its pod
# Bytes of progress and worker data that are kept; a /start of our agents may have 8 MiB, with the addresses.
MAX_JOB_DATA, MAX_DATA, FREE_DATA = 6 << 20, 48 << 20, 256 * 1024
# Bytes of failure messages that are kept in full; further ones are cut.
MAX_JOB_TEXTS, MAX_TEXTS, FREE_TEXTS = 2 << 20, 16 << 20, 128 * 1024
# Bytes of incomplete responses.
MAX_JOB_PARTS, MAX_PARTS, FREE_PARTS = 4 << 20, 48 << 20, 1 << 20
# Fields that change with nearly every response; changes of the others wake the job.
_VOLATILE = {
    "message",
    "step",
    "total_steps",
    "step_at",
    "step_pace",
    "trying_since",
    "last_answer",
    "answering_since",
    "peers_asked_at",
}
_STABLE = attrgetter(*(field.name for field in fields(ObservedAgent) if field.name not in _VOLATILE))


class AgentStatusCache:
    """Keeps an ObservedAgent for each pod UID. `wake` is called with the job's UID whenever a fact changed that may matter."""

    def __init__(
        self, session: aiohttp.ClientSession, wake: Callable[[str], None], authenticators: Authenticators | None = None
    ) -> None:
        self._wake = wake
        self._polled: dict[str, PolledAgent] = {}
        self._authenticators = authenticators or Authenticators()
        self._jobs: dict[str, dict[str, PolledAgent]] = {}
        self._suspected_at: dict[str, float] = {}
        # By job and series: what pods that were deleted had completed. One that died in a save has not completed what others have.
        self._told_before: dict[str, dict[str, ToldCheckpoint]] = {}
        self._woken_at: dict[str, float] = {}
        self._data = ByteBudget(per_job=MAX_JOB_DATA, in_all=MAX_DATA, free=FREE_DATA)
        self._texts = ByteBudget(per_job=MAX_JOB_TEXTS, in_all=MAX_TEXTS, free=FREE_TEXTS)
        self._parts = ByteBudget(per_job=MAX_JOB_PARTS, in_all=MAX_PARTS, free=FREE_PARTS)
        self._requests = StatusRequests(session, self._parts)
        self._peers = PeerReachability(session, self._authenticators, wake, self._parts)

    def watch(self, pod_uid: str, address: Address) -> None:
        """Begin to poll an agent, or continue at its new address."""
        known = self._polled.get(pod_uid)
        if known is not None and known.address == address:
            return
        self.forget(pod_uid)
        authenticator = self._authenticators.of(address.credentials)
        polled = PolledAgent(address, authenticator, ObservedAgent(trying_since=clock.now()))
        self._polled[pod_uid] = polled
        self._jobs.setdefault(address.job, {})[pod_uid] = polled
        polled.task = asyncio.create_task(self._follow(polled), name=f"agent {address.ip}:{address.port}")

    def watches(self, pod_uid: str, ip: str, port: int, restarts: int = 0) -> bool:
        """Whether the agent of a pod is polled at this address already; the credentials of a pod never change."""
        polled = self._polled.get(pod_uid)
        if polled is None:
            return False
        known = polled.address
        return (known.ip, known.port, known.restarts) == (ip, port, restarts)

    def stop_polling(self, pod_uid: str) -> None:
        """Stop polling an agent that has ended. Its last status stays in the cache until its pod is deleted."""
        polled = self._polled.get(pod_uid)
        if polled is None or polled.task is None:
            return
        polled.stop()
        polled.fact = replace(polled.fact, connection_refused=False, authentication_failed=False)

    def forget(self, pod_uid: str) -> None:
        """Drop an agent whose pod was deleted."""
        polled = self._polled.pop(pod_uid, None)
        if polled is None:
            return
        job = polled.address.job
        self._data.change(job, -len(polled.progress) - len(polled.worker_data))
        self._texts.change(job, -polled.num_text_bytes)
        self._woken_at.pop(job, None)
        self._remember_progress(polled)
        del self._jobs[job][pod_uid]
        if not self._jobs[job]:
            self._told_before.pop(job, None)
            del self._jobs[job]
            self._suspected_at.pop(job, None)
        polled.stop()

    def _remember_progress(self, polled: PolledAgent) -> None:
        kept = self._told_before.setdefault(polled.address.job, {})
        for prefix, entry in json.loads(polled.progress or "{}").items():
            told = ToldCheckpoint(polled.fact.generation or 0, entry)
            is_small = len(prefix) + len(json.dumps(entry)) <= MAX_REMEMBERED
            if told.is_reported and is_small and (prefix in kept or len(kept) < MAX_PREFIXES):
                kept[prefix] = last_completed(told, kept.get(prefix))

    def fact(self, pod_uid: str) -> ObservedAgent:
        """Give the newest fact about an agent; an empty one if it is not polled."""
        polled = self._polled.get(pod_uid)
        if polled is None:
            return ObservedAgent()
        return with_kernel_activity(polled) if polled.is_long else polled.fact

    def progress(self, pod_uids: Iterable[str], generation: int = 0) -> dict[str, Any]:
        """Give the newest complete checkpoint for each prefix, as the agents of a job report it (for the next /start).

        At most MAX_PREFIXES of them. generation: of that /start, so that all its agents are told the same.
        """
        told: dict[str, list[ToldCheckpoint]] = {}
        jobs: set[str] = set()
        for uid in pod_uids:
            polled = self._polled.get(uid)
            jobs |= set() if polled is None else {polled.address.job}
            entries = json.loads(polled.progress) if polled is not None and polled.progress else {}
            for prefix, entry in entries.items():
                if prefix in told or len(told) < MAX_PREFIXES:
                    told.setdefault(prefix, []).append(ToldCheckpoint(self.fact(uid).generation or 0, entry))
        for job in jobs:
            for prefix, before in self._told_before.get(job, {}).items():
                if prefix in told:
                    told[prefix].append(before)
        agreed = {prefix: agreed_checkpoint(prefix, each, generation) for prefix, each in told.items()}
        return {prefix: entry for prefix, entry in agreed.items() if entry is not None}

    def worker_data(self, pod_uids: Iterable[str]) -> EncodedJson | None:
        """Give the data that the workers of these pods left for each other, by pod (for the next /start).

        None if a worker left more than is accepted: a reader would mistake a part for the whole.
        """
        polled = [w for uid in pod_uids if (w := self._polled.get(uid)) is not None]
        if any(w.fact.refused_answer for w in polled):
            return None
        return EncodedJson(f"[{', '.join(w.worker_data for w in polled if w.worker_data)}]")

    async def close(self) -> None:
        """Stop all polls."""
        tasks = [w.task for w in self._polled.values() if w.task is not None]
        for uid in list(self._polled):
            self.forget(uid)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._peers.close()

    async def _follow(self, polled: PolledAgent) -> None:
        retry_s = FIRST_RETRY_S
        quick = 0
        while True:
            began = clock.steady()
            try:
                answer = await self._requests.ask(polled, self._poll_s)
            except PollInterrupted:
                polled.version = None
                continue
            except Exception as error:
                # The outer edge of one agent's task: no response may end its polls.
                self._note_failure(polled, error)
                await asyncio.sleep(retry_s)
                retry_s = min(LAST_RETRY_S, retry_s * 1.5)
                continue
            retry_s = FIRST_RETRY_S
            self._take(polled, answer)
            quick = quick + 1 if clock.steady() - began < QUICK_S else 0
            if answer.version is None or quick > QUICK_ANSWERS:
                await asyncio.sleep(PLAIN_POLL_S)

    def _poll_s(self, polled: PolledAgent) -> float:
        now = clock.steady()
        suspected_at = self._suspected_at.get(polled.address.job)
        wait_s = LONG_POLL_S
        if suspected_at is None or now - suspected_at >= SUSPECT_FOR_S:
            longest_s = min(LONGEST_POLL_S, len(self._polled) / POLLS_PER_S)
            wait_s = max(LONG_POLL_S, longest_s * (1 - SPREAD * polled.hash_position))
        return align_to_tick(now, wait_s)

    def _suspect(self, job: str) -> None:
        """Poll the other agents of a job at once, because one of them does not answer."""
        self._suspected_at[job] = clock.steady()
        for polled in self._jobs.get(job, {}).values():
            if polled.is_long and polled.connection is not None:
                polled.connection.interrupt()

    def _take(self, polled: PolledAgent, answer: AgentStatus) -> None:
        before, polled.fact = polled.fact, answer.fact
        polled.version, polled.last_error = answer.version, ""
        self._keep_data(polled, answer)
        self._keep_text(polled)
        if _stable_part(before) != _stable_part(polled.fact) or _was_silent(before, polled.fact):
            self._wake(polled.address.job)

    def _keep_data(self, polled: PolledAgent, answer: AgentStatus) -> None:
        """Keep progress and worker data within the budget of the job."""
        before, wanted = (
            len(polled.progress) + len(polled.worker_data),
            len(answer.progress) + len(answer.worker_data),
        )
        if self._data.change(polled.address.job, wanted - before):
            polled.progress, polled.worker_data = answer.progress, answer.worker_data
            return
        self._data.change(polled.address.job, -before)
        polled.progress = polled.worker_data = ""
        limits = f"{MAX_JOB_DATA} of one job, or {MAX_DATA} of all"
        excess = f"its {wanted} bytes of progress and worker_data are dropped, because they exceed {limits}"
        polled.fact = replace(polled.fact, refused_answer=excess)

    def _keep_text(self, polled: PolledAgent) -> None:
        """Keep the message of a failure in full within the budget of the job, because one of them is reported."""
        job, failure = polled.address.job, polled.fact.failure
        self._texts.change(job, -polled.num_text_bytes)
        polled.num_text_bytes = sys.getsizeof(failure.message) if failure is not None else 0
        if failure is None or self._texts.change(job, polled.num_text_bytes):
            return
        polled.num_text_bytes = 0
        polled.fact = replace(polled.fact, failure=replace(failure, message=failure.message[-MAX_REASON:]))

    def _note_failure(self, polled: PolledAgent, error: Exception) -> None:
        # Other connection failures concern the network, not the agent.
        refused = isinstance(error, aiohttp.ClientConnectorError | ConnectFailed) and error.errno == errno.ECONNREFUSED
        is_unreachable = isinstance(error, aiohttp.ClientError | TimeoutError | OSError)
        problem = "" if is_unreachable else f"{type(error).__name__}: {error}"
        if problem and problem != polled.last_error:
            log.warning("agent at %s: %s", polled.address.url(""), problem)
        if isinstance(error, InvalidStatus) and str(error)[:MAX_EXCESS] != polled.fact.refused_answer:
            polled.fact = replace(polled.fact, refused_answer=str(error)[:MAX_EXCESS])
            self._wake(polled.address.job)
        polled.last_error = problem
        polled.version = None
        self._suspect(polled.address.job)
        if refused != polled.fact.connection_refused:
            polled.fact = replace(polled.fact, connection_refused=refused)
        denied = isinstance(error, AuthenticationFailed)
        if denied != polled.fact.authentication_failed:
            polled.fact = replace(polled.fact, authentication_failed=denied)
            self._wake(polled.address.job)
        since = polled.fact.last_answer or polled.fact.trying_since
        if since is None:
            return
        self._peers.check(polled, self._jobs.get(polled.address.job, {}).values())
        left_s = (since + SILENCE_LIMIT - clock.now()).total_seconds()
        if left_s <= 0:
            self._wake_for_silence(polled.address.job)
        elif left_s <= LAST_RETRY_S + CONNECT_S + 1:
            # The limit falls between two attempts: wake the job when it passes, not at the next attempt.
            asyncio.get_running_loop().call_later(left_s + 0.01, self._wake, polled.address.job)

    def _wake_for_silence(self, job: str) -> None:
        now = clock.steady()
        if now - self._woken_at.get(job, now - SILENCE_WAKE_S) >= SILENCE_WAKE_S:
            self._woken_at[job] = now
            self._wake(job)


def align_to_tick(now: float, wait_s: float) -> float:
    """Shorten a wait, so that it ends with a tick of the monotonic clock. now, and all times, in seconds; wait_s: above TICK_S."""
    return wait_s - (now + wait_s) % TICK_S


def _stable_part(fact: ObservedAgent) -> tuple[object, ...]:
    """Give the parts of a fact that change rarely, and whether there is a step."""
    return (fact.step is None, *_STABLE(fact))


def _was_silent(before: ObservedAgent, after: ObservedAgent) -> bool:
    if before.last_answer is None or after.last_answer is None:
        return True
    return after.last_answer - before.last_answer >= SILENCE_LIMIT
