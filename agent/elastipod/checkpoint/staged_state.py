"""One rank's copy of the state in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.save_plan import SavePlan
from elastipod.rank_in_world import RankInWorld

_TORCH_BYTES = 2 << 10  # that torch writes around the numbers of a tensor


@dataclass(frozen=True, slots=True)
class StagedState:
    """One rank's copy of the state at one step; valid until the save after the next. save: as in `ImageHeader`."""

    id: CheckpointId
    plan: SavePlan
    save: int
    slot: int
    image: MappedImage
    boxes: Mapping[int, torch.Tensor]  # by number of the chunk
    values: Mapping[str, str]
    extra: Mapping[str, Any]

    def tensors_to_write(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the chunks that this rank writes to durable storage."""
        rank = RankInWorld.current().rank
        return ((number, self.boxes[number]) for number in self.plan.written_by(rank))

    def values_to_write(self) -> dict[str, str]:
        return {key: self.values[key] for key in self.plan.values_of(RankInWorld.current().rank)}

    def bytes_to_write(self) -> int:
        """Return `bytes_in_file` of this rank."""
        return bytes_in_file(self.plan, self.values_to_write().values())


def bytes_in_file(plan: SavePlan, values: Iterable[str]) -> int:
    """Return about how many bytes this rank's file will have with these encoded values, rather too many than too few."""
    chunks = (plan.chunks[number] for number in plan.written_by(RankInWorld.current().rank))
    tensors = sum(chunk.num_bytes + _TORCH_BYTES for chunk in chunks)
    return tensors + sum(4 * len(text) + _TORCH_BYTES for text in values)
