"""The newcomer's side of following: it holds the state of the ranks that train before it is one of them."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from elastipod.agent_store import AgentStore, open_store
from elastipod.chaos import FOLLOWER, Moment, reached
from elastipod.errors import ElastipodError
from elastipod.in_memory.follow_wire import HANDSHAKE_S, FollowingEnded, receive, receive_tensor, shake_hands, shut_down
from elastipod.in_memory.followed_state import FollowedState
from elastipod.in_memory.members import Members
from elastipod.in_memory.process_groups import world_prefix
from elastipod.ipc.protocol import SERVED_BY_AGENT
from elastipod.local_worker import store_generation
from elastipod.store_wait import wait_until_listening
from elastipod.store_wire import NEWCOMER, Greeting
from elastipod.stores import Store, TorchStore

log = logging.getLogger(__name__)

MAX_DONORS = 4  # ranks of a world that can be followed
WHOLE_S = 60.0  # a newcomer comes to the barrier with all of the state, or after this time without
QUIET_S = 15.0  # between two steps of those who train; who hears nothing for longer follows no longer
FOLLOWS_S = 120.0  # a newcomer that nobody takes costs those who train no longer than this
LAST_STEPS_S = 5.0  # what donors had under way when they stopped


class Follower:
    """Follows one rank from a thread.

    step: that the tensors have completed; None while they are in between, or torn. has_begun: whether they have been changed. donor_bytes:
    of memory that the donor's process has; 0 as long as it is not known.
    """

    def __init__(self, members: Members, key: str, store: str, at_end: Callable[[], None] = lambda: None) -> None:
        """Begin to follow a rank of the world whose store has this address; return with all of the state, or at a limit.

        at_end: is called by the thread when the donor has said that no step follows, and all of the state is here.
        """
        self.step: int | None = None
        self.has_begun = False
        self.donor_bytes = 0
        self._members, self._key, self._at_end = members, key, at_end
        self._is_whole = self._is_over = False
        self._settled = threading.Event()  # all of the state is here, or will not come
        self._peer: socket.socket | None = None
        where = (store, store_generation())
        self._thread = threading.Thread(target=self._run, args=where, name="elastipod-follower", daemon=True)
        self._thread.start()
        self._settled.wait(WHOLE_S)

    def finish(self, *, follows_on: bool = False) -> int | None:
        """Follow to the end and not beyond a limit; give the step that all of the state is at, None where some is missing.

        follows_on: those who train have been told to stop and go on until then, for as long as their steps take. Else they have stopped.
        Nothing changes the state afterwards. Raises ElastipodError when that is not sure, because the thread hangs: the process must end.
        """
        self._thread.join(FOLLOWS_S + QUIET_S if follows_on else LAST_STEPS_S)
        self._is_over = True
        if self._peer is not None:
            shut_down(self._peer)
            self._thread.join(LAST_STEPS_S)
            if self._thread.is_alive():
                raise ElastipodError(
                    "the thread that follows does not end, and may change the state at any time: a new process takes the place of this one"
                )
        # A thread without a connection may wait for a store whose process hangs. It finds that it is over before it changes anything.
        return self.step if self._is_whole else None

    def _run(self, store: str, generation: int) -> None:
        try:
            self._follow(FollowedState(self._members), donor_address(store, generation, self._key))
        except (FollowingEnded, OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
            log.info("this rank follows no longer and is filled when it joins: %r", error)
        finally:
            self._settled.set()

    def _follow(self, state: FollowedState, donor: tuple[str, int]) -> None:
        with socket.create_connection(donor, timeout=HANDSHAKE_S) as peer, peer.makefile("rb") as file:
            self._peer = peer
            shake_hands(peer, file, self._key, state.layout, is_donor=False)
            peer.settimeout(QUIET_S)
            until = float("inf")
            while not self._is_over and "end" not in (head := receive(file)):
                self._take(file, state, head)
                if self._is_whole:
                    self._settled.set()
                    until = min(until, time.monotonic() + FOLLOWS_S)
                if time.monotonic() > until:
                    raise FollowingEnded(f"nobody has taken this rank for {FOLLOWS_S:g} s")
            if self._is_whole and not self._is_over:
                self._at_end()

    def _take(self, file: BinaryIO, state: FollowedState, head: dict[str, Any]) -> None:
        """Repeat one step with what is here already, and take over more of the state."""
        self.step, self.has_begun = None, True
        with torch.no_grad():
            gradients = {slot: receive_tensor(file, torch.empty_like(state.parameters[slot])) for slot in head["of"]}
            state.step(head["options"], gradients)
            reached(Moment.FOLLOWING, rank=FOLLOWER, step=int(head["step"]))
            for told in head["slots"]:
                for tensor in state.places(told):
                    receive_tensor(file, tensor)
        self.donor_bytes = int(head.get("private_bytes", self.donor_bytes))
        self.step, self._is_whole = int(head["step"]), bool(head["is_whole"])


def donor_address(store: str, generation: int, key: str) -> tuple[str, int]:
    """Ask the store of the ranks that train for one that can be followed; newcomers are dealt out.

    store: as the agent names it. Raises FollowingEnded, OSError, RuntimeError.
    """
    if not store.startswith(SERVED_BY_AGENT):
        return _dealt_donor(_hosted(store, generation))
    connection = open_store(store.removeprefix(SERVED_BY_AGENT), Greeting(generation, NEWCOMER), key, HANDSHAKE_S)
    try:
        return _dealt_donor(AgentStore(connection, world_prefix(generation)))
    finally:
        connection.close()


def _hosted(store: str, generation: int) -> Store:
    """Connect to a store that one of those who train hosts."""
    host, _, port = store.rpartition(":")
    if not wait_until_listening(host, int(port), HANDSHAKE_S, 1):
        raise FollowingEnded(f"nobody listens at {store}")
    return TorchStore(host, int(port), world_prefix(generation), HANDSHAKE_S)


def _dealt_donor(keys: Store) -> tuple[str, int]:
    if not keys.has("donors"):
        raise FollowingEnded("no rank can be followed")
    number = (keys.add("followers", 1) - 1) % int(keys.get("donors"))
    host, _, port = keys.get(f"donor/{number}").decode().rpartition(":")
    return host, int(port)
