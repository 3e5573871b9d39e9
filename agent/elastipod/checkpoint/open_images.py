"""Opening the memory images of one checkpoint on all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.image_inventory import ImageInfo, ImageInventory, log
from elastipod.checkpoint.image_source import ImageSource, OpenImage
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.save_plan import SavePlan
from elastipod.json_records import decode, encode
from elastipod.rank_in_world import RankInWorld


def open_images(
    directory: MemoryDirectory | None, inventory: ImageInventory, of: CheckpointId, comm: Communicator
) -> ImageSource | None:
    """Open the images of one checkpoint for reading; None if they do not cover the state. Collective.

    Opens all images of a node, including the copies that it holds for others: they are read locally.
    """
    while images := inventory.images(of):
        own = _LocalImages(directory, inventory, images)
        common = comm.all_reduce(own.open, _common)
        missing = {decode(ImageInfo, each) for each in common["missing"]}
        good = [each for each in images if each not in missing]
        plan = SavePlan.from_json(common["plan"]) if common["plan"] else None
        if plan is not None and plan.is_covered_by(each.saved_rank for each in good):
            return ImageSource(
                plan, good, inventory, own.opened(plan), common["values"], common["extra"], common["wants_durable"]
            )
        own.close()
        # Another node may have the plan; and an earlier save of the same step may be complete.
        useless = images if plan is not None else [each for each in images if each.node == images[0].node]
        inventory = inventory.without(set(useless))
    return None


def open_own_images(
    directory: MemoryDirectory | None, inventory: ImageInventory, of: CheckpointId
) -> ImageSource | None:
    """Open this node's images of one checkpoint; None unless they hold the whole state. Not collective."""
    own = _LocalImages(directory, inventory, inventory.images(of))
    if directory is None or not own.wanted or own.open_all():
        own.close()
        return None
    plan = directory.plan(own.wanted[0].plan)
    if plan is None or not plan.is_covered_by(each.saved_rank for each in own.wanted):
        own.close()
        return None
    values, extra = _values([{"values": own.values()}])
    return ImageSource(plan, own.wanted, inventory, own.opened(plan), values, extra)


class _LocalImages:
    """The images of one checkpoint on this rank's node."""

    def __init__(
        self, directory: MemoryDirectory | None, inventory: ImageInventory, images: Sequence[ImageInfo]
    ) -> None:
        rank = RankInWorld.current().rank
        self._node = inventory.nodes[rank]
        self._directory = directory
        self._is_first = inventory.ranks_on(self._node)[0] == rank
        self._tells_plan = self._is_first and images[0].node == self._node
        self.wanted = [each for each in images if each.node == self._node] if directory is not None else []
        self._open: list[tuple[ImageHeader, MappedImage]] = []

    def open(self) -> dict[str, Any]:
        """Open them; report which are missing, the values in their headers, and the plan.

        One rank of a node reports the values. Where several images have one, it is that of the lowest rank.
        """
        if self._directory is None or not self.wanted:
            return {"missing": [], "values": [], "plan": None, "wants_durable": False}
        missing = self.open_all()
        plan = self._directory.plan(self.wanted[0].plan) if self._tells_plan else None
        return {
            "missing": [encode(each) for each in missing],
            "values": self.values() if self._is_first else [],
            "plan": plan and plan.to_json(),
            "wants_durable": any(header.wants_durable for header, _ in self._open),
        }

    def open_all(self) -> list[ImageInfo]:
        """Open them; return those that are missing or damaged."""
        assert self._directory is not None
        headers = self._directory.headers()
        missing: list[ImageInfo] = []
        for wanted in self.wanted:
            found = [header for header in headers if wanted.is_of(header)]
            try:
                self._open += [(header, self._directory.open(header)) for header in found]
            except ValueError as error:
                log.warning("skipping a damaged image: %s", error)
                found = []
            if not found:
                missing.append(wanted)
        return missing

    def opened(self, plan: SavePlan) -> dict[int, OpenImage]:
        return {header.rank: OpenImage.of(header, image, plan) for header, image in self._open}

    def close(self) -> None:
        for _, image in self._open:
            image.close()

    def values(self) -> list[list[Any]]:
        """Return the values of each image, by rank, without those that an image before it has, and what else the first has."""
        reports: list[list[Any]] = []
        told: set[str] = set()
        for header in sorted((header for header, _ in self._open), key=lambda header: header.rank):
            new = {key: value for key, value in header.values.items() if key not in told}
            reports.append([header.rank, new, {} if reports else dict(header.extra)])
            told |= new.keys()
        return reports


def _common(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the reports of all ranks."""
    values, extra = _values(answers)
    missing = [each for answer in answers for each in answer["missing"]]
    plan = next((answer["plan"] for answer in answers if answer["plan"]), None)
    wants_durable = any(answer["wants_durable"] for answer in answers)
    return {"missing": missing, "plan": plan, "values": values, "extra": extra, "wants_durable": wants_durable}


def _values(answers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return values and extra; those of the lowest rank where several report them."""
    values: dict[str, str] = {}
    reports = sorted(
        (report for answer in answers for report in answer["values"]), key=lambda report: int(report[0]), reverse=True
    )
    for _, some, _ in reports:
        values |= some
    return values, dict(reports[-1][2]) if reports else {}
