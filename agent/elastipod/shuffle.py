"""A shuffle computed by a formula, position -> index, one-to-one. There is no table to build, store or send.

The method (version 1) is a Feistel network over the smallest power of two that holds the dataset, with cycle walking:
an output outside the dataset is fed in again, which terminates because the network is a bijection. Each of the eight
rounds adds, to one part of the number, SplitMix64 of the other part and a round key; the round keys are the SplitMix64
stream seeded with (seed, epoch). It uses integers only, so the order is the same on every machine and with every version of
Python and torch. Any position of any epoch takes a few microseconds, so resuming at step 1,000,000 is as fast as at step 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8
_FEW = 128  # with fewer positions the overhead of a tensor is more than it saves


def splitmix64(value: int) -> int:
    """Mix a 64-bit number (Steele, Lea and Flood's finaliser, as in Java's SplittableRandom): a bijection."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


class Shuffle:
    """The order of one epoch: `shuffle[position]` is the dataset index at that position."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        """size: samples in the dataset, at least 1. The same (size, seed, epoch) gives the same order everywhere."""
        if size < 1:
            raise ValueError(f"size is {size}; a shuffle needs at least one sample")
        self._size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._low_mask, self._high_mask = (1 << self._low_bits) - 1, (1 << (bits - self._low_bits)) - 1
        stream = splitmix64(splitmix64(seed & _MASK) ^ (epoch & _MASK))
        keys = [splitmix64((stream + round_ * _GOLDEN) & _MASK) for round_ in range(_ROUNDS)]
        self._key_pairs = list(zip(keys[::2], keys[1::2], strict=True))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        """Give the dataset index at a position. Raises IndexError outside 0..size-1."""
        if not 0 <= position < self._size:
            raise IndexError(f"position {position} is outside an epoch of {self._size} samples")
        index = self._permute(position)
        while index >= self._size:
            index = self._permute(index)
        return index

    def take(self, positions: Sequence[int]) -> list[int]:
        """Give the dataset indices at many positions; about 20 times faster than one by one if torch is loaded."""
        torch = sys.modules.get("torch")
        if torch is None or len(positions) < _FEW or self._size >> 62:
            return [self[position] for position in positions]
        if not 0 <= min(positions) <= max(positions) < self._size:
            raise IndexError(f"positions {min(positions)} to {max(positions)} are not all in 0..{self._size - 1}")
        indices = self._permute_all(torch.tensor(positions, dtype=torch.int64, device="cpu"))
        while len(outside := (indices >= self._size).nonzero().flatten()) >= _FEW:
            indices[outside] = self._permute_all(indices[outside])
        found: list[int] = indices.tolist()
        for place in outside.tolist():
            while found[place] >= self._size:
                found[place] = self._permute(found[place])
        return found

    def _permute_all(self, values: torch.Tensor) -> torch.Tensor:
        """Permute every number of a tensor of 64-bit integers, whose products wrap around as ours are masked."""
        low, high = values & self._low_mask, values >> self._low_bits
        for even, odd in self._key_pairs:
            high = (high + _mixed(low ^ _signed(even))) & self._high_mask
            low = (low + _mixed(high ^ _signed(odd))) & self._low_mask
        return high << self._low_bits | low

    def _permute(self, value: int) -> int:
        low_mask, high_mask = self._low_mask, self._high_mask
        low, high = value & low_mask, value >> self._low_bits
        for even, odd in self._key_pairs:  # `splitmix64` written out: this runs for every sample that is trained
            mixed = ((low ^ even) + _GOLDEN) & _MASK
            mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
            high = (high + (mixed ^ (mixed >> 31))) & high_mask
            mixed = ((high ^ odd) + _GOLDEN) & _MASK
            mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
            low = (low + (mixed ^ (mixed >> 31))) & low_mask
        return high << self._low_bits | low


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """`splitmix64` of every number, in place."""
    values += _signed(_GOLDEN)
    for bits, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        values ^= (values >> bits) & (_MASK >> bits)  # torch's shift carries the sign along
        values *= _signed(factor)
    return values


def _signed(value: int) -> int:
    """Give the signed number of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value
