"""A checkpoint that a run has resumed from memory, as the ranks of the present world write it to durable storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elastipod.checkpoint.image_source import ImageSource
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.save_plan import SavePlan
from elastipod.checkpoint.staged_state import bytes_in_file
from elastipod.errors import CheckpointError
from elastipod.rank_in_world import RankInWorld


class ResumedState:
    """What is written is what the images hold, so nothing is copied, and training may change the live state meanwhile.

    Each rank writes a part of what its own node has. Used like `StagedState`.
    """

    def __init__(self, target: CheckpointId, resumed: CheckpointId, images: ImageSource, plan: SavePlan) -> None:
        """target: what is written; resumed: what the images hold, of the same step. plan: as `ImageSource.plan_of_present_ranks`."""
        self.id, self.resumed, self.plan = target, resumed, plan
        self.images = images

    @property
    def extra(self) -> Mapping[str, Any]:
        return self.images.extra

    def tensors_to_write(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the chunks that this rank writes. Raises CheckpointError when one is not what was saved."""
        for number in self.plan.written_by(RankInWorld.current().rank):
            try:
                yield number, self.images.checked_chunk(number)
            except ValueError as error:
                raise CheckpointError(f"cannot write the checkpoint of step {self.id.step}: {error}") from error

    def values_to_write(self) -> dict[str, str]:
        return {key: self.images.texts()[key] for key in self.plan.values_of(RankInWorld.current().rank)}

    def bytes_to_write(self) -> int:
        """Return `bytes_in_file` of this rank."""
        return bytes_in_file(self.plan, self.values_to_write().values())

    def close(self) -> None:
        """Unmap the images; they stay."""
        self.images.unmap()
