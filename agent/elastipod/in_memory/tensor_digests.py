"""Digests of tensors, at the speed of memory also where there are many small ones.

A digest is a sum of the tensor's words of 8 bytes, modulo 2**64. Words of whole rows of 8 KiB have the weight of their place in the row:
roundings that differ by one bit in opposite directions would often cancel without it. Weights are odd, so each changed bit shows. What is
left after the last whole row has no weights. Ranks of two versions may compare digests, so their values must stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

DIGEST_LENGTH = 16  # characters
_WEIGHTS = torch.randint(1, 1 << 62, (1024,), generator=torch.Generator().manual_seed(1), device="cpu") * 2 + 1
_ROW_BYTES = _WEIGHTS.nbytes
_WORD_BYTES = 8
_JOINED = 16  # rows
_AT_ONCE = 256  # tensors whose sums are held together, at most 16 KiB for each


def digests_of_tensors(tensors: Sequence[torch.Tensor], progress: Callable[[], None] = lambda: None) -> list[str]:
    """Give the digest of each tensor. All of them are on one device. progress: called after each tensor."""
    return [
        f"{of_rows + of_rest & 0xFFFF_FFFF_FFFF_FFFF:0{DIGEST_LENGTH}x}"
        for first in range(0, len(tensors), _AT_ONCE)
        for of_rows, of_rest in _sums(tensors[first : first + _AT_ONCE], progress)
    ]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Give the bytes of a tensor: its own memory where that is contiguous and aligned, else a copy."""
    flat = tensor.detach()
    if not flat.is_contiguous() or (flat.storage_offset() * flat.element_size()) % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.reshape(-1).view(torch.uint8)


def _sums(tensors: Sequence[torch.Tensor], progress: Callable[[], None]) -> Iterator[tuple[int, int]]:
    """Give what the whole rows of each tensor sum up to, and what is left after them. At most one tensor is copied at a time."""
    columns, rests, have_rows = [], [], []
    for each in tensors:
        raw = as_bytes(each)
        end = raw.numel() // _ROW_BYTES * _ROW_BYTES
        have_rows.append(end > 0)
        if end:
            columns.append(_sum_of_rows(raw[:end].view(torch.int64).view(-1, len(_WEIGHTS))))
        is_copy = raw.data_ptr() != each.data_ptr()
        rests.append(raw[end:].clone() if end and is_copy else raw[end:])
        progress()
    of_rows = iter(_weighted(columns))
    for has_rows, of_rest in zip(have_rows, _sums_of_words(rests), strict=True):
        yield next(of_rows) if has_rows else 0, of_rest


def _weighted(columns: list[torch.Tensor]) -> list[int]:
    if not columns:
        return []
    stacked = torch.stack(columns)
    found: list[int] = (stacked * _WEIGHTS.to(stacked.device)).sum(1).tolist()
    return found


def _sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Sum the rows. torch goes down one column after the other, so it is faster with fewer and longer ones."""
    long = len(rows) // _JOINED
    if long < 2:
        return rows.sum(0)
    joined = rows[: long * _JOINED].reshape(long, -1).sum(0).view(_JOINED, -1).sum(0)
    return joined + rows[long * _JOINED :].sum(0)


def _sums_of_words(raws: Sequence[torch.Tensor]) -> list[int]:
    """Sum short ones: laid end to end, each filled up with zeros to whole words, so that a few operations are enough for all."""
    zeros = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=raws[0].device)
    laid = [zeros]
    for raw in raws:
        if raw.numel():
            laid += (raw, zeros[: -raw.numel() % _WORD_BYTES])
    ends = accumulate((-(-raw.numel() // _WORD_BYTES) for raw in raws), initial=0)
    before = torch.cat(laid).view(torch.int64).cumsum(0)
    found: list[int] = before[torch.tensor(list(ends), device=zeros.device)].diff().tolist()
    return found
