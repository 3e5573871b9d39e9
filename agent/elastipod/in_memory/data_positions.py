"""The members that read data (`FollowsWorld`): their place in the world, and what an interrupted step must not leave in them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from elastipod.in_memory.exchange import all_texts
from elastipod.in_memory.members import FollowsWorld, Members
from elastipod.in_memory.memory_state import lost_world

log = logging.getLogger(__name__)


class DataPositions:
    """Tells members their place in each world, and puts back what they read in a step that does not count."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._others: dict[str, Any] = {}  # the states before the present step, or those after it where it was put back
        self._is_told = False  # that members differ between ranks

    def enter(self, rank: int, world_size: int) -> None:
        """A world begins: its members have the state of its first step."""
        for _, member in self._followers():
            member.set_world(rank, world_size)

    def begin(self) -> None:
        """A step begins."""
        self._others = self._now()

    def swap(self) -> None:
        """Put back what the members had read before the present step, or after it where that was put back already."""
        others, self._others = self._others, self._now()
        for name, member in self._followers():
            member.load_state_dict(others[name])

    def forget(self) -> None:
        """The world has ended."""
        self._others = {}

    def compare_others(self, rank: int) -> None:
        """Say once, on rank 0, which members have a state that differs between ranks, so that a rank that joins gets another one's.

        Collective where there are members of other kinds than those that replicas have in common. Raises WorldLost.
        """
        own = self._members.own_digests()
        if not own:
            return
        with lost_world("the states of further members could not be compared"):
            told = [json.loads(text) for text in all_texts(json.dumps(own))]
        differing = [name for name in own if any(each.get(name) != own[name] for each in told)]
        if differing and rank == 0 and not self._is_told:
            self._is_told = True
            log.warning(
                "the state of %s differs between ranks, and a rank that joins or is replaced gets that of another rank; if it is a "
                "position in data, samples are trained twice or never: use elastipod.ElasticLoader, or give it "
                "set_world(rank, world_size) and a position that is the same on all ranks",
                ", ".join(differing),
            )

    def _followers(self) -> Iterator[tuple[str, Any]]:
        return ((name, member) for name, member in self._members.items() if isinstance(member, FollowsWorld))

    def _now(self) -> dict[str, Any]:
        return {name: deepcopy(member.state_dict()) for name, member in self._followers()}
