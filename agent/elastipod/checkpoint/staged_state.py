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
    """One rank's copy of the state at one step; valid until the save after the next."""

    id: CheckpointId
    plan: SavePlan
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
        """Return about how many bytes the file of this rank will have, rather too many than too few."""
        return bytes_in_file((tensor.nbytes for _, tensor in self.tensors_to_write()), self.values_to_write().values())


def bytes_in_file(tensors: Iterable[int], values: Iterable[str]) -> int:
    """Return about how many bytes a file with these tensors (bytes of each) and encoded values has, rather too many than too few."""
    return sum(size + _TORCH_BYTES for size in tensors) + sum(4 * len(text) + _TORCH_BYTES for text in values)
