"""Digests of tensors, at the speed of memory also where there are many small ones.

A digest is a sum of the tensor's words of 8 bytes, modulo 2**64. Words of whole rows of 8 KiB have the weight of their place in the row:
roundings that differ by one bit in opposite directions would often cancel without it. Weights are odd, so each changed bit shows. What is
left after the last whole row has no weights. Ranks of two versions may compare digests, so their values must stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

DIGEST_LENGTH = 16  # characters
_WEIGHTS = torch.randint(1, 1 << 62, (1024,), generator=torch.Generator().manual_seed(1), device="cpu") * 2 + 1
_ROW_BYTES = _WEIGHTS.nbytes
_WORD_BYTES = 8
_JOINED = 16  # rows
_AT_ONCE = 256  # tensors whose words are held together: 16 KiB for each, or a thousandth of it on the host


def digests_of_tensors(tensors: Sequence[torch.Tensor], progress: Callable[[], None] = lambda: None) -> list[str]:
    """Give the digest of each tensor. All of them are on one device. progress: called after each tensor."""
    return [
        f"{total & 0xFFFF_FFFF_FFFF_FFFF:0{DIGEST_LENGTH}x}"
        for first in range(0, len(tensors), _AT_ONCE)
        for total in _sums(tensors[first : first + _AT_ONCE], progress)
    ]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Give the bytes of a tensor: its own memory where that is contiguous and aligned, else a copy."""
    flat = tensor.detach()
    if not flat.is_contiguous() or (flat.storage_offset() * flat.element_size()) % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.reshape(-1).view(torch.uint8)


def _sums(tensors: Sequence[torch.Tensor], progress: Callable[[], None]) -> list[int]:
    """Give what the words of each tensor sum up to. At most one tensor is copied at a time.

    What is left to add up is laid end to end, so that a few operations are enough for all tensors.
    """
    laid, ends = [torch.zeros(1, dtype=torch.int64, device=tensors[0].device)], [0]
    for each in tensors:
        words = _words(as_bytes(each))
        laid += words
        ends.append(ends[-1] + sum(map(len, words)))
        progress()
    before = torch.cat(laid).cumsum(0)
    found: list[int] = before[torch.tensor(ends, device=before.device)].diff().tolist()
    return found


def _words(raw: torch.Tensor) -> list[torch.Tensor]:
    """Give words whose sum is the digest of these bytes. They share no memory with them, unless those are less than a row."""
    end = raw.numel() // _ROW_BYTES * _ROW_BYTES
    if end == 0:
        return [_whole_words(raw)]
    found = [_weighted(raw[:end].view(torch.int64).view(-1, len(_WEIGHTS)))]
    if end < raw.numel():
        found.append(_whole_words(raw[end:].clone()))
    return found


def _whole_words(raw: torch.Tensor) -> torch.Tensor:
    """Give words that end with zeros where there are too few bytes."""
    missing = -raw.numel() % _WORD_BYTES
    return (nn.functional.pad(raw, (0, missing)) if missing else raw).view(torch.int64)


def _weighted(rows: torch.Tensor) -> torch.Tensor:
    """Give words whose sum is that of all words of the rows, each with its weight."""
    if rows.device.type == "cpu":
        return rows.mv(_WEIGHTS)  # reads the rows once; no accelerator multiplies matrices of whole numbers
    return _sum_of_rows(rows) * _WEIGHTS.to(rows.device)


def _sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Sum the rows. torch goes down one column after the other, so it is faster with fewer and longer ones."""
    long = len(rows) // _JOINED
    if long < 2:
        return rows.sum(0)
    joined = rows[: long * _JOINED].reshape(long, -1).sum(0).view(_JOINED, -1).sum(0)
    return joined + rows[long * _JOINED :].sum(0)
