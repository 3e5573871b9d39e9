"""Collectives of a regroup: small texts of all ranks, and one text of one rank. Bounded, never pickled."""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastipod.errors import ElastipodError

MAX_TEXT_BYTES = 64 * 1024
MAX_MANIFEST_BYTES = 256 << 20


class TextTooLong(ElastipodError):
    """A rank would send, or announces, more than the others take."""


def all_texts(text: str, limit: int = MAX_TEXT_BYTES) -> list[str]:
    """Give every rank's text, by rank. Collective. Raises TextTooLong, and RuntimeError when a peer is gone."""
    if not dist.is_initialized():
        return [text]
    data = _tensor(text, limit)
    sizes = [torch.zeros(1, dtype=torch.int64, device=_device()) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], dtype=torch.int64, device=_device()))
    lengths = [_checked(int(size.item()), limit) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=_device())
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [_text(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def text_of(source: int, text: str | None) -> str:
    """Give the text of one rank on every rank; only there it must not be None. Collective. Raises as `all_texts`."""
    if not dist.is_initialized():
        assert text is not None, "a single process is the source"
        return text
    data = _tensor(text, MAX_MANIFEST_BYTES) if text is not None else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=_device())
    dist.broadcast(size, src=source)
    length = _checked(int(size.item()), MAX_MANIFEST_BYTES)
    if text is None:
        data = torch.empty(length, dtype=torch.uint8, device=_device())
    dist.broadcast(data, src=source)
    return _text(data)


def _checked(length: int, limit: int) -> int:
    if not 0 < length <= limit:
        raise TextTooLong(f"a rank sends {length} bytes where 1 to {limit} are taken")
    return length


def _tensor(text: str, limit: int) -> torch.Tensor:
    content = bytearray(text.encode())
    _checked(len(content), limit)
    return torch.frombuffer(content, dtype=torch.uint8).to(_device())


def _text(data: torch.Tensor) -> str:
    content = bytearray(data.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(data)
    return content.decode()


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
