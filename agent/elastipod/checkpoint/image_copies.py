"""The copies of images that one node holds for another."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.memory_limits import MemoryDemand, find_shortage, memory_limits_of
from elastipod.checkpoint.save_plan import SavePlan, choose_copy_holders
from elastipod.rank_in_world import RankInWorld

log = logging.getLogger(__name__)


class ImageCopies:
    """The images that this rank holds for ranks of other nodes."""

    def __init__(self, directory: MemoryDirectory) -> None:
        self._directory = directory
        self._kept: dict[str, MappedImage] = {}
        self._headers: dict[str, ImageHeader] = {}  # of complete copies
        self.held_by: dict[int, int] = {}  # on every rank: the holder of the newest copy, by the rank whose image it is

    def holders(self, plan: SavePlan, domains: Sequence[str]) -> dict[int, int]:
        """Return, for each rank whose image exists on one node only, the rank that holds a copy."""
        unreplicated_ranks = plan.unreplicated_ranks()
        return {
            source: holder
            for source, holder in choose_copy_holders(plan.nodes, domains).items()
            if source in unreplicated_ranks
        }

    def exchange_images(
        self, plan: SavePlan, holders: Mapping[int, int], image: MappedImage, header: ImageHeader, comm: Communicator
    ) -> None:
        """Send this rank's image to the holder of its copy, and receive the images to hold. Collective.

        header: of this rank's image. A node without enough memory holds no copy and logs a warning. Raises RanksLost.
        """
        rank = RankInWorld.current().rank
        mine = {holders[rank]: header.to_json()} if rank in holders else {}
        sources = {source: ImageHeader.from_json(text) for source, text in comm.all_to_all(lambda: mine).items()}
        self.held_by = {}
        refused: list[int] = comm.all_reduce(lambda: self._make_room(plan, sources), _joined)
        out = {holders[rank]: [image.bytes[: image.size]]} if rank in holders and rank not in refused else {}
        into = {
            source: [(kept.bytes[: kept.size], None)]
            for source, header in sources.items()
            if source not in refused and (kept := self._kept[header.name])
        }
        comm.transfer(out, into)
        lost = {*refused, *comm.all_reduce(lambda: self._publish_all(plan, into, sources), _joined)}
        self.held_by = {source: holder for source, holder in holders.items() if source not in lost}

    def names(self) -> list[str]:
        """Return the names of the images that have memory here."""
        return list(self._kept)

    def note_durable(self, of: CheckpointId) -> None:
        """Record a newer durable checkpoint in the copies."""
        self._directory.note_durable(self._headers, of)

    def withdraw_where(self, is_meant: Callable[[ImageHeader], bool]) -> None:
        """Withdraw some of the complete copies; their memory stays for the next ones."""
        for name in [name for name, header in self._headers.items() if is_meant(header)]:
            del self._headers[name]
            with suppress(OSError):
                self._directory.withdraw(name)

    def forget(self, of: CheckpointId, save: int) -> None:
        """Drop the copies that one save of a checkpoint has made, whose headers have been withdrawn."""
        self._headers = {
            name: header for name, header in self._headers.items() if (header.id, header.save) != (of, save)
        }

    def close(self) -> None:
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
        self._headers.clear()

    def _publish_all(self, plan: SavePlan, received: Iterable[int], sources: Mapping[int, ImageHeader]) -> list[int]:
        """Make the copies visible that have arrived; return the sources for which that failed."""
        return [source for source in received if not self._publish(plan, source, sources[source])]

    def _publish(self, plan: SavePlan, source: int, header: ImageHeader) -> bool:
        try:
            self._directory.store_plan(plan)
            self._directory.publish(header)
        except OSError as error:
            log.warning("the copy of rank %d's image is not kept: %s", source, error)
            return False
        self._headers[header.name] = header
        return True

    def _make_room(self, plan: SavePlan, sources: Mapping[int, ImageHeader]) -> list[int]:
        """Withdraw the copies to be overwritten; return the sources for which there is not enough memory."""
        refused: list[int] = []
        for source, header in sources.items():
            size = plan.layout(source)[1]
            kept = self._kept.get(header.name)
            try:
                self._headers.pop(header.name, None)
                self._directory.withdraw(header.name)
                if kept is not None and kept.size == size:
                    continue
                limits = memory_limits_of(self._directory.path, self._directory.node())
                if short := find_shortage([MemoryDemand(limits, size, self._directory.size_of([header.name]))]):
                    raise OSError(errno.ENOSPC, short)
                self._kept[header.name] = MappedImage.create(self._directory.path / f"{header.name}.bin", size)
            except OSError as error:
                log.warning("there is not enough memory here for a copy of rank %d's image: %s", source, error)
                refused.append(source)
        return refused


def _joined(of_ranks: list[list[int]]) -> list[int]:
    return [*chain(*of_ranks)]
