"""Whether a rank follows others or is followed, over generations. It never fails: a newcomer that has not followed is filled."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.donor import Donor
from elastipod.in_memory.follow_wire import FollowingEnded
from elastipod.in_memory.follower import MAX_DONORS, Follower
from elastipod.in_memory.host_memory import private_bytes, reserve
from elastipod.in_memory.members import Members
from elastipod.ipc.protocol import EARLY_START_ENV, FOLLOWED_STORE_ENV, WORKER_KEY_ENV

log = logging.getLogger(__name__)


class Following:
    """Of one rank. step: that its state has come to by following alone, None for most ranks."""

    def __init__(self, members: Members, *, is_possible: bool, at_end: Callable[[], None] = lambda: None) -> None:
        """is_possible: False where steps cannot be repeated from gradients, because the script applies them in its own way.

        at_end: as of a `Follower`.
        """
        self.step: int | None = None
        self._members = members
        self._is_possible, self._at_end = is_possible, at_end
        self._donor: Donor | None = None
        self._follower: Follower | None = None

    @property
    def has_changed_state(self) -> bool:
        """Whether the state is no longer the one that the script has built, without being anybody's whole state."""
        return self._follower is not None and self._follower.has_begun

    def listen(self, place: WorldPlace, publish: Callable[[str, str], None]) -> None:
        """Let newcomers follow this rank in this generation; the first ranks of a world are enough."""
        key = os.environ.get(WORKER_KEY_ENV)
        if not self._is_possible or not key or place.rank >= MAX_DONORS:
            return
        try:
            host = _own_address(place)
            self._donor = Donor(self._members, key, host, place.rank)
        except (FollowingEnded, OSError, RuntimeError) as error:
            log.info("newcomers cannot follow this rank and will be filled when they join: %s", error)
            return
        publish(f"donor/{place.rank}", f"{host}:{self._donor.port}")
        if place.rank == 0:
            publish("donors", str(min(place.world_size, MAX_DONORS)))

    def at_step(self, step: int | None = None) -> None:
        """The gradients of a step are there and about to be applied; with its number: they have been."""
        if self._donor is None:
            return
        try:
            self._donor.before_step() if step is None else self._donor.after_step(step)
        except Exception:  # such as no memory for a copy: the training must not end for a shortcut of somebody else's
            log.warning("newcomers follow this rank no longer and will be filled when they join", exc_info=True)
            self.close()

    def close(self) -> None:
        """The generation ends for this rank."""
        donor, self._donor = self._donor, None
        if donor is not None:
            donor.close()

    def begin(self) -> None:
        """Follow those who train, if the agent has named their store; return with all of the state, or at a limit."""
        store, key = os.environ.pop(FOLLOWED_STORE_ENV, ""), os.environ.get(WORKER_KEY_ENV)
        if self._is_possible and store and key:
            self._follower = Follower(self._members, key, store, self._at_end)
            # The first step with the others takes as much memory here as their steps have taken there.
            reserve(self._follower.donor_bytes - private_bytes())

    def finish(self) -> None:
        """The state must stand still."""
        if self._follower is not None and self.step is None:
            self.step = self._follower.finish(follows_on=EARLY_START_ENV in os.environ)
            log.info("this rank has followed %s", "nobody" if self.step is None else f"up to step {self.step}")


def _own_address(place: WorldPlace) -> str:
    """Give the address of this host that leads to rank 0's; no packet is sent. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
