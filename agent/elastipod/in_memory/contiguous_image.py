"""Images of parts whose shards lie in one stretch of host memory, so that a few messages carry them, whatever the number of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from elastipod.in_memory.parts import PartContent, ShardedShape

_ALIGNMENT = 16  # of each tensor, in bytes: the size of torch's largest numbers


@dataclass(frozen=True, slots=True)
class ContiguousImage:
    """An image, and the bytes of its shards: those that ranks do not have in common, at the same places on giver and holder."""

    content: PartContent
    raw: torch.Tensor

    def pieces(self, size: int) -> Sequence[torch.Tensor]:
        """Give the bytes in messages of at most ``size`` bytes; none for a part without shards."""
        return [self.raw[start : start + size] for start in range(0, self.raw.numel(), size)]


def contiguous_image(content: PartContent, progress: Callable[[], None] = lambda: None) -> ContiguousImage:
    """Give a copy in host memory that later steps do not change.

    content: on any device, so that what an accelerator has is copied once. progress: called after each tensor.
    """
    whole: dict[str, torch.Tensor] = {}
    for shape in content.shapes:
        if shape.dim is None:
            whole[shape.key] = content.tensors[shape.key].to("cpu", copy=True)
            progress()
    image = _room(content.shapes, content.part, whole, content.values)
    for key, tensor in image.content.tensors.items():
        if key not in whole:
            tensor.copy_(content.tensors[key])
            progress()
    return image


def room_beside(own: PartContent, part: int) -> ContiguousImage:
    """Give room for another part of the state that an image is of, whose shards are to be received.

    Both images share what every rank has whole.
    """
    whole = {shape.key: own.tensors[shape.key] for shape in own.shapes if shape.dim is None}
    return _room(own.shapes, part, whole, own.values)


def _room(
    shapes: tuple[ShardedShape, ...], part: int, whole: Mapping[str, torch.Tensor], values: str
) -> ContiguousImage:
    places, end = _places(shapes, part)
    raw = torch.empty(end, dtype=torch.uint8, device="cpu")
    return ContiguousImage(PartContent(part, shapes, _Tensors(raw, places, whole), values), raw)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the shard of a tensor lies in an image's bytes."""

    start: int
    stop: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


@lru_cache(maxsize=8)  # the parts of this rank and of those whose copies it holds, in each step
def _places(shapes: tuple[ShardedShape, ...], part: int) -> tuple[Mapping[str, _Place | None], int]:
    """Give the place of each tensor, None for one that every rank has whole, and the number of bytes."""
    places: dict[str, _Place | None] = {}
    end = 0
    for shape in shapes:
        if shape.dim is None:
            places[shape.key] = None
            continue
        first, last = shape.stretch(part)
        stop = end + last - first
        places[shape.key] = _Place(end, stop, getattr(torch, shape.whole.dtype), shape.local_sizes(part))
        end = -(-stop // _ALIGNMENT) * _ALIGNMENT
    return places, end


class _Tensors(Mapping[str, torch.Tensor]):
    """The tensors of an image, made when they are asked for: those of most images never are."""

    def __init__(
        self, raw: torch.Tensor, places: Mapping[str, _Place | None], whole: Mapping[str, torch.Tensor]
    ) -> None:
        self._raw, self._places, self._whole = raw, places, whole

    def __getitem__(self, key: str) -> torch.Tensor:
        place = self._places[key]
        if place is None:
            return self._whole[key]
        return self._raw[place.start : place.stop].view(place.dtype).view(place.sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
