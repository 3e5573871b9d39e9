"""The process groups of one generation: built over a store of the generation's own, and taken down together.

An agent serves the store where all agents of the generation can. Else the process of rank 0 hosts it.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastipod import agent_store
from elastipod.agent_store import StoreConnection, open_store
from elastipod.errors import ElastipodError
from elastipod.group_release import release_in_background, wait_until_released
from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.peer_connections import PeerConnections, open_sockets
from elastipod.in_memory.torch_store import TorchAgentStore
from elastipod.ipc.protocol import WORKER_KEY_ENV
from elastipod.store_wait import wait_until_listening
from elastipod.store_wire import Greeting
from elastipod.torch_compat import (
    abort_and_forget_groups,
    abort_groups,
    can_abort_groups,
    ends_groups_without_lock,
    gloo_backends,
    number_groups_anew,
    set_group_timeout,
    watch_new_groups,
    with_host,
)

log = logging.getLogger(__name__)

TRY_S = 2.0  # one try to connect all ranks, once all have arrived at the store
MAX_TRIES = 5
# Of all tries: less than the phase may last, whose limit would end the processes of all ranks that wait.
CONNECT_S = 10.0
# For each byte of parameters a slow CPU also copies and sums what an optimizer keeps, while other ranks wait for it.
SLOWEST_BYTES_PER_S = 30e6
MOST_FOR_STATE_S = 25.0  # less than the phases that follow may last, whose limits end the process
ARRIVAL_S = (
    1800.0  # as torch waits for the ranks of a group: how long a process takes to import and build is the script's
)
CLOSE_AFTER_S = 2.0  # a peer that nobody calls back waits by then, and writes no more
HOSTING_S = 60.0  # how long rank 0 tries to have the port of the store
FIRST_POLL_S, LAST_POLL_S = 0.002, 0.2  # between looks at a key of the store, and at the agent's word
LOOKS_PER_S = 5000  # of all ranks together
POLL_SHARE = 0.05  # of the time waited so far, which bounds both how late a rank is and how often it looks
_OK, _FAILED = "ok", "failed"


class WorldNotBuilt(ElastipodError):
    """The ranks of a generation did not come together, or one was lost on the way: the next generation follows."""


class ProcessGroups:
    """The default process group of this rank, in one generation after the other."""

    def __init__(self, backend: str | None, timeout: timedelta | None) -> None:
        # The ranks agree through host memory, whatever gradients take.
        self._backend = with_host(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
        self._timeout = timeout or dist.distributed_c10d.default_pg_timeout
        self._connects_beside_former = self._backend == "gloo" and ends_groups_without_lock()
        self._store: Any = None
        self._former_store: Any = None
        self._served: StoreConnection | None = None
        self._connections: PeerConnections | None = None
        self._ended: PeerConnections | None = None  # of the former world
        self._ending = threading.Lock()  # the agent's word and this rank's own look at it may both end the connections
        self._closing: threading.Timer | None = None
        self._stop_watching: Callable[[], object] = lambda: None
        self._cause = ""  # of the last try to connect that failed on this rank
        self._hooks: tuple[Any, Any] = (None, None)  # sys.excepthook before and after torch has built a group

    @property
    def reason_to_end(self) -> str:
        """Say why a process cannot live on with groups of this backend once a peer is lost; empty where it can."""
        kinds = {each.split(":")[-1] for each in self._backend.lower().split(",")}
        if kinds == {"gloo"} or can_abort_groups():
            return ""
        return f"torch {torch.__version__} cannot abort process groups of {self._backend}, as torch 2.6 and newer can"

    def connect(
        self,
        place: WorldPlace,
        is_over: Callable[[], bool],
        *,
        arriving: AbstractContextManager[None] = nullcontext(),  # noqa: B008 stateless
    ) -> None:
        """Build the default process group of a generation. Raises WorldNotBuilt, also as soon as the generation is over.

        Every rank reports its arrival at the store before any connects, so a slow rank costs no try. The first verdict on a try
        counts for all ranks: they train in the same group, or try again under another name together. arriving: is entered
        while ranks are waited for whose processes may still start; the limit of the phase is that of connecting them.
        """
        self._close_ended()  # no rank is in the former world any more
        self._cause = ""
        if not self._connects_beside_former:
            wait_until_released()
        try:
            with arriving:
                late = _Wait(time.monotonic() + ARRIVAL_S, is_over, place.world_size, is_served=bool(place.store))
                self._store = self._served_store(place, late) if place.store else self._hosted_store(place, late)
                _arrive(self._store, place, late)
            wait = _Wait(time.monotonic() + CONNECT_S, is_over, place.world_size, is_served=bool(place.store))
            for number in range(MAX_TRIES):
                store = dist.PrefixStore(f"try/{number}", self._store)  # type: ignore[attr-defined]
                if self._try(store, place, wait, is_first=number == 0):
                    if is_over():
                        self.abort()  # the call for it may have come before there was anything to abort
                    self._former_store = None  # every rank that read it is here
                    # NCCL connects in the first collective of a group: all ranks wait there for a key of the slowest one's.
                    self._store.set_timeout(self._timeout)
                    return
                if wait.is_at_end:
                    break
        except (RuntimeError, TimeoutError, ConnectionError) as error:  # torch's store errors are RuntimeErrors
            raise WorldNotBuilt(
                f"generation {place.generation} cannot meet at its store: {_first_line(error)}"
            ) from error
        cause = f": {self._cause}" if self._cause else ""
        raise WorldNotBuilt(f"the {place.world_size} ranks of generation {place.generation} could not connect{cause}")

    def connect_alone(self) -> None:
        """Build the default process group of a single process, for a model that is sharded over one rank."""
        self._init(store=dist.HashStore(), rank=0, world_size=1, timeout=self._timeout)  # type: ignore[attr-defined]

    def await_former(self) -> None:
        """Return once the groups of former generations have ended: what hangs there is to end this process before it trains."""
        wait_until_released()

    def await_all(self) -> None:
        """Return once all ranks of the generation have called this. Collective. Raises RuntimeError when a peer is gone."""
        dist.all_reduce(torch.zeros(1, device="cpu"))

    def begin_training(self) -> None:
        """Give collectives the time that the script's own may take; until now they had the limits of the regroup."""
        set_group_timeout(self._timeout)

    def allow_for_load(self, num_bytes: int) -> None:
        """Give collectives the time that the script's own may take, and at least that in which a peer loads a model of this size."""
        set_group_timeout(max(self._timeout, _time_for(num_bytes)))

    def allow_for(self, num_bytes: int) -> None:
        """Give collectives the time in which a peer copies and sums a model of this size. A peer that hangs is still given up soon."""
        set_group_timeout(min(_time_for(num_bytes), timedelta(seconds=MOST_FOR_STATE_S)))

    def publish(self, key: str, value: str) -> None:
        """Write a key to the store of this generation, for any process that asks. Does nothing when the store is gone."""
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set(key, value)

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Let `abort` end what is connected inside as well: further groups of this world, the script's and those of a mesh."""
        sockets = open_sockets()
        yield
        if self._connections is not None:
            self._connections.add_opened_since(sockets)

    def abort(self) -> None:
        """Free a rank of this process that waits in a collective for a peer that is gone; from any thread.

        An abort of torch does not free those of gloo, which fail when a connection ends; so all end, those of groups that the script
        has made too. They close after CLOSE_AFTER_S, with the next `connect`, or with `close`.
        """
        ended = self._end_collectives()
        if ended is not None:
            self._closing = threading.Timer(CLOSE_AFTER_S, ended.close)
            self._closing.daemon = True
            self._closing.start()

    def _end_collectives(self) -> PeerConnections | None:
        """As `abort`, but the connections that this ends, if there are any, stay open until they are closed."""
        with self._ending:
            connections, self._connections = self._connections, None
            if connections is not None:
                self._ended = connections
                connections.end_reading()
        if (served := self._served) is not None:  # the training thread may be leaving
            served.close("the generation is over")
        self.abort_queued()
        return connections

    def abort_queued(self) -> None:
        """End the collectives that an accelerator runs or has queued, which wait for a peer that is gone; gloo queues none.

        Connections of gloo stay, in which a peer may still be reading.
        """
        if self._backend != "gloo" and dist.is_initialized():
            abort_groups()

    def leave(self) -> None:
        """Take all groups down. Peers that are still inside a collective with this rank see it fail, after an `abort` a little later."""
        self._connections = None  # a peer may still be reading what this rank has sent last
        self._stop_watching()
        if dist.is_initialized():
            _destroy_groups()
        if self._served is not None:
            self._served.close("this rank has left its generation")
            agent_store.meet_at(None)
            self._served = None
        # The server of a store that this process hosts stays until the next world is built: others may be reading it.
        self._former_store, self._store = self._store or self._former_store, None

    def close(self, *, has_finished: bool) -> None:
        """Leave for good. Peers see it at once, which may be the first that they learn of it.

        has_finished: False where a collective may still wait for a peer that hangs, which must not keep this process from ending.
        Starts no thread: the interpreter may be ending.
        """
        if not has_finished:
            self._end_collectives()
        self.leave()
        self._close_ended()

    def _close_ended(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        if self._ended is not None:
            self._ended.close()
            self._ended = None

    def _init(self, **options: Any) -> None:
        """Build the default process group, without what torch has put around `sys.excepthook` for the one before.

        It names the rank there before each line of a traceback, and never takes it off.
        """
        own, of_torch = self._hooks
        if own is not None and sys.excepthook is of_torch:
            sys.excepthook = own
        own = sys.excepthook
        try:
            dist.init_process_group(self._backend, **options)
        finally:
            self._hooks = own, sys.excepthook
        _of_state[:] = [weakref.ref(group)] if (group := dist.group.WORLD) is not None else []

    def _served_store(self, place: WorldPlace, wait: _Wait) -> Any:
        greeting, key = Greeting(place.generation, place.rank), os.environ.get(WORKER_KEY_ENV, "")
        self._served = open_store(
            place.store, greeting, key, wait.left_s, lambda: wait.is_at_end, world_size=place.world_size
        )
        agent_store.meet_at(self._served)
        if wait.is_at_end:
            # The call for it may have come before there was anything to close.
            self._served.close("the generation is over")
        return dist.PrefixStore(world_prefix(place.generation), TorchAgentStore(self._served))  # type: ignore[attr-defined]

    def _hosted_store(self, place: WorldPlace, wait: _Wait) -> Any:
        is_host = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = _host_store(place, wait) if is_host else _store_of_host(place, wait)
        return dist.PrefixStore(world_prefix(place.generation), store)  # type: ignore[attr-defined]

    def _try(self, store: Any, place: WorldPlace, wait: _Wait, *, is_first: bool) -> bool:
        if not (is_first and place.store):  # earlier versions, which host a store, arrive twice
            _arrive(store, place, wait)
        number_groups_anew()
        sockets = open_sockets()
        try:
            self._init(store=store, rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=TRY_S))
            own = _OK if store.add("connected", 1) == place.world_size else ""
        except RuntimeError as error:
            self._cause = _first_line(error)
            log.info("rank %d could not connect to its peers: %s", place.rank, self._cause)
            own = _FAILED
        if own:
            store.compare_set("verdict", "", own)
        if _verdict(store, wait) == _OK:
            self._connections = PeerConnections(sockets, place.port)
            self._stop_watching()
            self._stop_watching = watch_new_groups(self._opening)
            return True
        if dist.is_initialized():  # half a group
            _destroy_groups()
        return False


def is_group_of_state() -> bool:
    """Whether the default process group, which exists, is that of a State in this process."""
    group = dist.group.WORLD
    return group is not None and any(each() is group for each in _of_state)


_of_state: list[weakref.ref[dist.ProcessGroup]] = []  # the default group that a State has built last


def _host_store(place: WorldPlace, wait: _Wait) -> Any:
    """Host the store of a generation. Raises RuntimeError when its port cannot be had; what listened there may only be ending."""
    until, is_told = time.monotonic() + HOSTING_S, False
    while True:
        try:
            return _tcp_store(place, wait, is_host=True)
        except RuntimeError as error:
            if wait.is_at_end or time.monotonic() >= until:
                raise
            if not is_told:
                log.warning("rank 0 cannot host the store yet, and tries for %g s: %s", HOSTING_S, _first_line(error))
                is_told = True
        time.sleep(LAST_POLL_S)


def _store_of_host(place: WorldPlace, wait: _Wait) -> Any:
    """Connect to the store that rank 0 hosts. Raises RuntimeError or TimeoutError."""
    while True:
        if not wait_until_listening(place.address, place.port, wait.slice(TRY_S).total_seconds(), place.world_size):
            if wait.is_at_end:  # its host may only be late
                raise TimeoutError(f"nobody listens at {place.address}:{place.port}")
            continue
        try:
            return _tcp_store(place, wait, is_host=False)
        except RuntimeError:
            if wait.is_at_end:
                raise


def _tcp_store(place: WorldPlace, wait: _Wait, *, is_host: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, though torch does not mark it so
        place.address,
        place.port,
        is_master=is_host,
        timeout=wait.slice(TRY_S),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _time_for(num_bytes: int) -> timedelta:
    """Give how long a slow rank may take for the state of a model of this size."""
    return timedelta(seconds=TRY_S + num_bytes / SLOWEST_BYTES_PER_S)


def world_prefix(generation: int) -> str:
    """Give the prefix of the keys with which the ranks of a generation meet."""
    return f"elastipod/world/{generation}"


def _destroy_groups() -> None:
    held = gloo_backends()
    if dist.get_backend() != "gloo":
        abort_and_forget_groups()
    if dist.is_initialized():
        with suppress(RuntimeError):  # the group is broken already and is no longer used
            dist.destroy_process_group()
    release_in_background(held)


class _Wait:
    """Waits for keys of a store, with few calls, and sees meanwhile that the generation is over.

    is_served: an agent serves the store, so the end of the generation ends a call that waits.
    """

    def __init__(
        self, deadline: float, is_over: Callable[[], bool], world_size: int = 1, *, is_served: bool = False
    ) -> None:
        self._deadline, self._is_over, self._is_served = deadline, is_over, is_served
        self._shortest_s = max(FIRST_POLL_S, world_size / LOOKS_PER_S)

    @property
    def is_at_end(self) -> bool:
        return self._is_over() or time.monotonic() >= self._deadline

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def slice(self, most_s: float) -> timedelta:
        """Give the time of one wait."""
        return timedelta(seconds=min(most_s, max(0.05, self._deadline - time.monotonic())))

    def for_key(self, store: Any, key: str, limit_s: float = math.inf) -> bool:
        """Return once the key is there; False at the limit. Raises TimeoutError at the deadline or when the generation is over."""
        if self._is_served:
            return self._until_told(store, key, limit_s)
        began = time.monotonic()
        until = began + limit_s
        while not store.check([key]):
            if self.is_at_end:
                raise TimeoutError(f"not all ranks have come ({key})")
            if time.monotonic() >= until:
                return False
            share_s = POLL_SHARE * (time.monotonic() - began)
            time.sleep(max(self._shortest_s, min(share_s, LAST_POLL_S)))
        return True

    def _until_told(self, store: Any, key: str, limit_s: float) -> bool:
        try:
            store.wait([key], self.slice(limit_s))
        except dist.DistStoreError as error:
            if self.is_at_end:
                raise TimeoutError(f"not all ranks have come ({key})") from error
            return False
        return True


def _arrive(store: Any, place: WorldPlace, wait: _Wait) -> None:
    """Return once all ranks have called this with the same store."""
    if store.add("arrived", 1) == place.world_size:
        store.set("all-arrived", "1")
    if not wait.for_key(store, "all-arrived"):
        raise TimeoutError("not all ranks have come")


def _verdict(store: Any, wait: _Wait) -> str:
    """Wait for the verdict on a try. A rank that waits longer than the others may take for it gives it itself."""
    if not wait.for_key(store, "verdict", 2 * TRY_S):
        store.compare_set("verdict", "", _FAILED)
    return str(store.get("verdict").decode())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
