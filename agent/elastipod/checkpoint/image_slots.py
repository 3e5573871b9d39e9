"""The memory of one rank's copies of the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.save_plan import SavePlan
from elastipod.rank_in_world import RankInWorld


class ImageSlots:
    """The images that are mapped, and what they hold by number of the chunk; both by slot."""

    def __init__(self) -> None:
        self.images: dict[int, MappedImage] = {}
        self.boxes: dict[int, dict[int, torch.Tensor]] = {}

    def make(self, slot: int, path: Path | None, plan: SavePlan) -> None:
        """Make the memory of one slot, in a new file or, with None, in this process only. Raises OSError when there is not enough."""
        positions, size = plan.layout(RankInWorld.current().rank)
        image = self.images[slot] = MappedImage.create(path, size)
        self.boxes[slot] = {
            number: image.chunk_tensor(plan.chunks[number], position) for number, position in positions.items()
        }

    def fill(self, slot: int, tensor_of: Callable[[int], torch.Tensor]) -> None:
        """Copy every chunk of this rank. No device writes into the image any more when this returns or raises.

        tensor_of: returns the live tensor of a chunk, by its number.
        """
        devices: set[torch.device] = set()
        try:
            for number, box in self.boxes[slot].items():
                tensor = tensor_of(number)
                if tensor.is_cuda and tensor.device not in devices:
                    self.images[slot].pin(tensor.device)
                    devices.add(tensor.device)
                box.copy_(tensor, non_blocking=tensor.is_cuda)
        finally:
            for device in devices:  # the copies were queued on each device's current stream
                torch.cuda.current_stream(device).synchronize()

    def close(self, *, in_use: bool) -> None:
        """Unmap the images; files stay. in_use: a thread may still read them, and they are unmapped with their last reader."""
        images, self.images, self.boxes = self.images, {}, {}
        if not in_use:
            for image in images.values():
                image.close()
