"""The agreement: the ranks choose one call of `elastic_event_detected()` at which all of them stop.

Calls are counted from the start of the generation. While no event is pending a call only increments a counter under a lock: the
listener thread is in one blocking wait on this rank's wake key, and the watcher thread polls the local event, a memory read.
Once an event is pending on any rank:

1. The first rank that sees it sets every rank's wake key, so that all watchers are woken.
2. Every watcher publishes the number of its rank's next call. The last one writes the maximum: the stop call.
3. A rank that makes a call after it published waits until the stop call is known. No rank can be past the stop call, since it
   is at least every rank's next call. No rank waits for another rank's main thread, so a rank inside a collective blocks nobody.
4. A rank that ends before it published says that there is no stop call, so nobody waits for it: at the end of a training no step
   is left after which all could stop. The others' calls answer False, as in a training without an event.
5. A rank whose event is pending for a while, and that is the only one that has ever made a call, answers True without the others: its
   script asks on one rank and tells the others itself.
6. At the stop call each rank reports its arrival and waits for the others. Ranks that call less often are named here, instead
   of causing a collective to time out half an hour later.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from elastipod.agent_store import StoreCallRefused
from elastipod.errors import ElasticAgreementError, ElasticAgreementTimeout
from elastipod.rank_ranges import format_ranks
from elastipod.stores import Store

log = logging.getLogger(__name__)

POLL_S = 0.05  # interval at which the watcher reads the local event when no signal wakes it
PENDING_SLICE_S = 1.0  # one wait of a pending agreement; between waits it checks whether the process ends
QUIET_WAIT_S = 30 * 24 * 3600.0  # one blocking wait of the listener while there is no event; then it waits again
CONNECT_S = 30.0
RECONNECT_S = 2.0  # one try to reach a store again whose connection was lost
CLOSE_S = 2.0
ALONE_S = 5.0  # a pending agreement in which no other rank has ever made a call is waited for so long
# Ranks that train together make a call in each step, so all have made their first call when one of them makes its second.
ALONE_CALLS = 2
LEAVE_S = 5.0  # how long the rank that hosts the store waits for the others to disconnect
NEVER = sys.maxsize


class Agreement:
    """The agreement of one rank in one generation. The training thread creates and calls it; it has two threads of its own."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        is_pending: Callable[[], bool],
        connect: Callable[[float], Store],
        timeout_s: float,
        hosts_store: bool = False,
        reconnects: bool = False,
    ) -> None:
        """Store the arguments; `start` connects.

        is_pending: True when an event is pending on this rank; must only read memory. connect: gives a new client of the common
        store within a number of seconds. timeout_s: how long a rank waits for the others. hosts_store: the store ends with this
        process, which therefore disconnects last. reconnects: the store outlives its connections, so that `connect` gives another one
        where one was lost, TimeoutError while the store cannot be reached, and ConnectionError once the generation is over.
        """
        self._rank, self._world_size = rank, world_size
        self._is_pending, self._connect, self._timeout_s = is_pending, connect, timeout_s
        self._hosts_store, self._reconnects = hosts_store, reconnects
        self._changed = threading.Condition()
        self._calls = 0
        self._published: int | None = None
        self._stop: int | None = None
        self._failure: ElasticAgreementError | None = None
        self._arrived = False
        self._closing = False
        self._woken_by_peer = False
        self._wake: SimpleQueue[None] = SimpleQueue()  # safe to put into from a signal handler, unlike an Event
        self._listening: Store | None = None
        self._client: Store | None = None
        self._listener = threading.Thread(target=self._listen, name="elastipod-event-listener", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="elastipod-event-watcher", daemon=True)

    def start(self) -> None:
        """Connect and start both threads. Raises ElasticAgreementError when the store cannot be reached."""
        try:
            self._listening = self._connect(CONNECT_S)
            self._listening.add("asking", 1)
        except (ConnectionError, TimeoutError) as error:
            raise ElasticAgreementError(
                f"rank {self._rank} cannot reach the store through which the ranks agree on a stop step: {error}"
            ) from error
        self._listener.start()
        self._watcher.start()

    def wake(self) -> None:
        """Make the watcher read the local event now. Safe in a signal handler."""
        self._wake.put(None)

    def record_call(self) -> bool:
        """Count one call; give True from the stop call on. The answer to the n-th call is the same on every rank.

        Raises ElasticAgreementTimeout, which names ranks, when others do not publish or do not arrive in time.
        """
        with self._changed:
            self._calls += 1
            if self._published is None:
                return False
            if self._calls < self._stop_call():
                return False
        if not self._arrived:
            self._arrive()
            self._arrived = True
        return True

    def abandon(self) -> None:
        """Let this rank's calls fail from now on, also one that waits: others may be gone. From any thread."""
        self._closing = True
        self._finish(ElasticAgreementError("the generation ended before the ranks agreed"))

    def close(self, *, is_abandoned: bool = False) -> None:
        """End both threads. Called at interpreter exit, where a thread that outlives Python would crash the process.

        A rank that has not published by then never does, and says so. is_abandoned: ranks may have died or hang, so the store's host
        does not wait until all have signed off, no rank waits for the host for more than CLOSE_S, and the agents end who waits.
        """
        self._closing = True
        self._hosts_store = self._hosts_store and not is_abandoned
        self._wake.put(None)
        self._watcher.join(CLOSE_S)
        if self._listener.is_alive() or self._woken_by_peer or self._client is not None:
            if is_abandoned:
                # A host that hangs on a living node accepts connections and never answers; torch waits for it without a limit.
                leaving = threading.Thread(target=self._disconnect, kwargs={"is_abandoned": True}, daemon=True)
                leaving.start()
                leaving.join(CLOSE_S)
            else:
                self._disconnect(is_abandoned=False)
        self._listening = self._client = None

    # -- the training thread -------------------------------------------------------------------------------------

    def _stop_call(self) -> int:
        """Wait, holding the lock, until the stop call is known. The watcher enforces the deadline; this one is a backstop."""
        self._changed.wait_for(lambda: self._stop is not None or self._failure is not None, self._timeout_s + 10)
        if self._failure is not None:
            raise self._failure
        if self._stop is None:
            raise ElasticAgreementTimeout(f"rank {self._rank} did not learn the stop step within {self._timeout_s:g} s")
        return self._stop

    def _arrive(self) -> None:
        client = self._client
        assert client is not None, "the watcher published through it"
        try:
            # All wait for the last one, who need not be named among those who came.
            if client.add("arrived", 1) == self._world_size:
                client.set("together", b"1")
            else:
                client.set(f"arrived/{self._rank}", b"1")
            if not self._wait_for(client, "together"):
                raise ElasticAgreementTimeout(
                    f"the ranks agreed to stop at call {self._stop} of elastic_event_detected(), but "
                    f"{self._describe_missing(client, 'arrived')} did not make that call within {self._timeout_s:g} s; "
                    "every rank must call it once per step"
                )
        except ConnectionError:
            # The store's host disconnects only after all ranks arrived. If it died, the next collective fails.
            log.info("the store went away while rank %d was at the stop call", self._rank)

    # -- the threads ---------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wait for an event on another rank. Ends with the event, with the generation's store, or with the process."""
        store = self._listening
        while store is not None and not self._closing:
            try:
                store.wait(f"wake/{self._rank}", QUIET_WAIT_S)
            except TimeoutError:
                continue  # nobody has an event yet
            except ConnectionError:
                self._listening = store = self._reconnected()
                continue
            self._woken_by_peer = True
            self._wake.put(None)
            return

    def _reconnected(self) -> Store | None:
        """Reach the store again; None where no rank is left to agree with: a later event fails when it is published."""
        while self._reconnects and not self._closing:
            time.sleep(POLL_S)  # for a store that takes a connection and ends it
            try:
                return self._connect(RECONNECT_S)
            except TimeoutError:
                continue  # the network is not back yet
            except ConnectionError as error:
                log.debug("rank %d waits for no event any more: %s", self._rank, error)
                break
        return None

    def _watch(self) -> None:
        while not (self._closing or self._woken_by_peer or self._is_pending()):
            try:
                self._wake.get(timeout=POLL_S)
            except Empty:
                continue  # time to read the worker file again
        if self._closing:
            return
        try:
            self._finish(self._agree())
        except ElasticAgreementError as error:
            self._finish(error)
        except StoreCallRefused as error:
            self._finish(ElasticAgreementError(str(error)))
        except (ConnectionError, TimeoutError) as error:
            log.warning("rank %d drops the elastic event: the other ranks are gone (%s)", self._rank, error)
            self._finish(NEVER)

    def _agree(self) -> int:
        client = self._connected()
        if not self._woken_by_peer and client.add("pending", 1) == 1:
            client.set_many({f"wake/{rank}": b"event" for rank in range(self._world_size)})
        with self._changed:
            if self._closing:  # `close` counts on it that a rank which has not published by then never does
                raise ElasticAgreementError("the process ends")
            self._client = client
            self._published = following = self._calls + 1
        client.set(f"next/{self._rank}", str(following).encode())
        if client.add("published", 1) == self._world_size:
            calls = client.get_many([f"next/{rank}" for rank in range(self._world_size)])
            client.set("stop", str(stop_call([int(call) for call in calls])).encode())
        alone_at = time.monotonic() + ALONE_S
        if self._wait_for(client, "stop", or_until=lambda: time.monotonic() >= alone_at and self._asks_alone(client)):
            return int(client.get("stop"))
        if self._asks_alone(client):
            log.warning(
                "rank %d stops without asking the others, because no other rank has called elastic_event_detected(); with "
                "HYPERPOD_SIGNAL_COORDINATION=disabled it does not wait %g s before",
                *(self._rank, ALONE_S),
            )
            self._arrived = True
            return following
        raise ElasticAgreementTimeout(
            f"an elastic event is pending, but {self._describe_missing(client, 'next')} did not publish a next call within "
            f"{self._timeout_s:g} s; every rank must call elastic_event_detected() once per step, or with "
            "HYPERPOD_SIGNAL_COORDINATION=disabled any rank, which tells the others"
        )

    def _connected(self) -> Store:
        """Give a client that reaches the store. What follows is counted there, and cannot be said again over another connection."""
        client = self._connect(CONNECT_S)
        if self._reconnects:
            try:
                client.has("stop")
            except ConnectionError:
                client = self._connect(CONNECT_S)
        return client

    def _asks_alone(self, client: Store) -> bool:
        """Whether no other rank has ever made a call, though this one has trained steps in which it would have met them."""
        return self._world_size > 1 and self._calls >= ALONE_CALLS and client.add("asking", 0) == 1

    def _wait_for(self, client: Store, key: str, or_until: Callable[[], bool] = lambda: False) -> bool:
        """Give False when the time is over, or when ``or_until`` says so.

        Raises ElasticAgreementError when this rank is to wait no longer.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._closing:
            try:
                client.wait(key, min(PENDING_SLICE_S, self._timeout_s))
                return True
            except TimeoutError:
                if time.monotonic() >= deadline or or_until():
                    return False
        raise ElasticAgreementError("the generation or the process ended before the ranks agreed")

    def _finish(self, outcome: int | ElasticAgreementError) -> None:
        with self._changed:
            if isinstance(outcome, int):
                self._stop = outcome
                if self._published is None:
                    self._published = NEVER
            else:
                self._failure = outcome
                self._published = self._published or NEVER
            self._changed.notify_all()

    def _describe_missing(self, client: Store, key: str) -> str:
        try:
            missing = [rank for rank in range(self._world_size) if not client.has(f"{key}/{rank}")]
        except (ConnectionError, TimeoutError):
            return "some ranks"
        return format_ranks(missing)

    def _disconnect(self, *, is_abandoned: bool) -> None:
        """End the listener through its own wake key and sign off. The store's host waits until all ranks have signed off."""
        try:
            client = self._client or self._connect(CLOSE_S)
            with self._changed:
                has_published = self._published not in (None, NEVER)
            if not (has_published or is_abandoned):
                client.set("stop", str(NEVER).encode())
            client.set(f"wake/{self._rank}", b"closing")
            self._listener.join(CLOSE_S)
            if client.add("left", 1) == self._world_size:
                client.set("all-left", b"1")
            if self._hosts_store:
                client.wait("all-left", LEAVE_S)
        except (ConnectionError, TimeoutError, StoreCallRefused) as error:
            log.debug("rank %d ended without the others: %s", self._rank, error)


def stop_call(next_calls: Sequence[int]) -> int:
    """Give the call at which all ranks stop: the highest of their next calls, so that no rank is past it."""
    return max(next_calls)
