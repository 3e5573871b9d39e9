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
    flat = tensor.detach().resolve_conj().resolve_neg()
    if not flat.is_contiguous() or (flat.storage_offset() * flat.element_size()) % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.reshape(-1).view(torch.uint8)


def _sums(tensors: Sequence[torch.Tensor], progress: Callable[[], None]) -> list[int]:
    """Give what the words of each tensor sum up to. At most one tensor is copied at a time.

    What is left to add up is laid end to end, so that a few operations are enough for all tensors.
    """
    laid = _Laid(tensors[0].device)
    short: list[tuple[int, torch.Tensor]] = []
    for at, each in enumerate(tensors):
        raw = as_bytes(each)
        if raw.numel() < _ROW_BYTES:
            short.append((at, raw))
        else:
            _lay_rows(laid, at, raw)
        progress()
    _lay_short(laid, short)
    return laid.sums(len(tensors))


class _Laid:
    """Words that are laid end to end, and whose they are."""

    def __init__(self, device: torch.device) -> None:
        self._words = [torch.zeros(1, dtype=torch.int64, device=device)]
        self._owners: list[int] = []
        self._counts = [0]

    def lay(self, words: torch.Tensor, owners: Sequence[int], counts: Sequence[int]) -> None:
        """Lay down words: the first of ``counts`` are those of the first of ``owners``, and so on."""
        self._words.append(words)
        self._owners += owners
        self._counts += counts

    def sums(self, num_owners: int) -> list[int]:
        """Give the sum of the words of each owner."""
        before = torch.cat(self._words).cumsum(0)
        ends = torch.tensor(self._counts, device="cpu").cumsum(0).to(before.device)
        found = [0] * num_owners
        for owner, total in zip(self._owners, before[ends].diff().tolist(), strict=True):
            found[owner] += total
        return found


def _lay_rows(laid: _Laid, owner: int, raw: torch.Tensor) -> None:
    """Lay down the words of at least a row of bytes. They share no memory with them."""
    num_bytes = raw.numel()
    num_rows = num_bytes // _ROW_BYTES
    end = num_rows * _ROW_BYTES
    words = _weighted(raw[:end].view(torch.int64).view(num_rows, -1))
    laid.lay(words, [owner], [words.numel()])
    if end < num_bytes:
        rest = _whole_words(raw[end:].clone())
        laid.lay(rest, [owner], [rest.numel()])


def _lay_short(laid: _Laid, raws: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Lay down the words of tensors of less than a row, given as bytes with their owners: one operation for all of them."""
    if not raws:
        return
    zeros = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=raws[0][1].device)
    padded = [(raw, zeros[: -raw.numel() % _WORD_BYTES]) for _, raw in raws]
    counts = [(raw.numel() + padding.numel()) // _WORD_BYTES for raw, padding in padded]
    laid.lay(torch.cat([each for pair in padded for each in pair]).view(torch.int64), [at for at, _ in raws], counts)


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
