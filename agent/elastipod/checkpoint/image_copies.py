"""The copies of images that one node keeps for another."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from itertools import chain

from elastipod.checkpoint.communicator import Exchange
from elastipod.checkpoint.image import Header, MappedImage, MemoryDirectory
from elastipod.checkpoint.memory_limits import Demand, rooms_for, shortage
from elastipod.checkpoint.save_plan import Plan, partners
from elastipod.checkpoint.store import CheckpointId
from elastipod.ranks import rank_and_world

log = logging.getLogger(__name__)


class Copies:
    """The images that this rank keeps for ranks of other nodes."""

    def __init__(self, directory: MemoryDirectory) -> None:
        self._directory = directory
        self._kept: dict[str, MappedImage] = {}
        self._headers: dict[str, Header] = {}  # of those that are whole
        self.kept_by: dict[
            int, int
        ] = {}  # on every rank: by the rank whose image it is, who keeps a copy of the newest

    def keepers(self, plan: Plan, domains: Sequence[str]) -> dict[int, int]:
        """Give, for each rank whose image a lost node would take along, the rank that keeps a copy."""
        exposed = plan.exposed()
        return {source: keeper for source, keeper in partners(plan.nodes, domains).items() if source in exposed}

    def exchange(
        self, plan: Plan, keepers: Mapping[int, int], image: MappedImage, header: Header, exchange: Exchange
    ) -> None:
        """Send this rank's image, whose header is given, to its keeper, and keep those of others. Collective.

        A node without room for a copy keeps none, with a warning. Raises RanksLost when ranks lose touch.
        """
        rank, _ = rank_and_world()
        mine = {keepers[rank]: header.to_json()} if rank in keepers else {}
        sources = {source: Header.from_json(text) for source, text in exchange.deliver(lambda: mine).items()}
        self.kept_by = {}
        refused: list[int] = exchange.agree(lambda: self._make_room(plan, sources), lambda rooms: [*chain(*rooms)])
        out = {keepers[rank]: [image.bytes[: image.size]]} if rank in keepers and rank not in refused else {}
        into = {
            source: [(kept.bytes[: kept.size], None)]
            for source, header in sources.items()
            if source not in refused and (kept := self._kept[header.name])
        }
        exchange.transfer(out, into)
        self.kept_by = {source: keeper for source, keeper in keepers.items() if source not in refused}
        for source in into:
            self._publish(plan, source, sources[source])

    def names(self) -> list[str]:
        """Name the images for which there is room here."""
        return list(self._kept)

    def note_durable(self, of: CheckpointId) -> None:
        """Write into the copies that there is a newer durable checkpoint now."""
        self._directory.note_durable(self._headers, of)

    def forget(self, of: CheckpointId) -> None:
        """Hold the copies of a checkpoint for nothing; their headers have been withdrawn."""
        self._headers = {name: header for name, header in self._headers.items() if header.id != of}

    def close(self) -> None:
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
        self._headers.clear()

    def _publish(self, plan: Plan, source: int, header: Header) -> None:
        try:
            self._directory.keep_plan(plan)
            self._directory.publish(header)
            self._headers[header.name] = header
        except OSError as error:
            log.warning("the copy of rank %d's memory is not kept: %s", source, error)

    def _make_room(self, plan: Plan, sources: Mapping[int, Header]) -> list[int]:
        """Withdraw the copies that are to be written over; gives the sources for which there is no room."""
        refused: list[int] = []
        for source, header in sources.items():
            size = plan.layout(source)[1]
            kept = self._kept.get(header.name)
            try:
                self._headers.pop(header.name, None)
                self._directory.withdraw(header.name)
                if kept is not None and kept.size == size:
                    continue
                rooms = rooms_for(self._directory.path, self._directory.node())
                if short := shortage([Demand(rooms, size, self._directory.size_of([header.name]))]):
                    raise OSError(errno.ENOSPC, short)
                self._kept[header.name] = MappedImage.create(self._directory.path / f"{header.name}.bin", size)
            except OSError as error:
                log.warning("there is no room here for a copy of rank %d's memory: %s", source, error)
                refused.append(source)
        return refused
