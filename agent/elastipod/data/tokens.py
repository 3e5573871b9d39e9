"""Memory-mapped token files. Opening one, and resuming anywhere in it, takes the same time at any size.

All processes of a node share one copy in the page cache.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from elastipod.data.token_format import HEADER_BYTES, read_header
from elastipod.errors import DataError

# torch indexes signed types only; `widened` reads 16-bit tokens as unsigned.
_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TokenFile:
    """A token file written by `elastipod tokens build`. Can be pickled; the copy maps the file again."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the file. Raises DataError for a file that is cut off, damaged, or not a token file."""
        self.path = Path(path)
        self.header = read_header(path)
        self._map(offset=HEADER_BYTES)

    def _map(self, *, offset: int) -> None:
        """Map the file. offset: of the first token, in bytes."""
        with open(self.path, "rb") as file:  # read-only: a private mapping would count against the memory of the node
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():  # torch warns of read-only memory; only copies leave this class
            warnings.simplefilter("ignore", UserWarning)
            self._tokens = torch.frombuffer(
                self._mapped, dtype=_TYPES[self.header.token_bytes], offset=offset, count=self.header.tokens
            )

    def __len__(self) -> int:
        return self.header.tokens

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path]]:
        return TokenFile, (self.path,)

    def read(self, first: int, count: int) -> torch.Tensor:
        """Give ``count`` tokens from number ``first`` on, int64, shape (count,). Raises IndexError outside the file."""
        if first < 0 or count < 0 or first + count > len(self):
            raise IndexError(f"tokens {first} to {first + count} are outside of the {len(self)} tokens of {self.path}")
        return self.widened(self._tokens[first : first + count])

    def windows(self, seq_len: int) -> torch.Tensor:
        """Give a view of shape (windows, seq_len + 1) in the file's own type; nothing is read until it is indexed."""
        return self._tokens.unfold(0, seq_len + 1, seq_len)

    def widened(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give tokens of the file's own type as int64."""
        return (tokens.view(torch.uint16) if self.header.token_bytes == 2 else tokens).long()


class TokenWindows:
    """A dataset of windows: sample i holds the tokens i * seq_len to (i + 1) * seq_len, both included.

    The last token is the target of the one before it. Tokens after the last complete window are not used. Can be used with a
    DataLoader and worker processes, which share the pages.
    """

    def __init__(self, file: TokenFile, seq_len: int) -> None:
        """seq_len: inputs of one window. Raises ValueError below 1, and DataError when the file has no complete window."""
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; a window holds at least one token")
        if len(file) <= seq_len:
            raise DataError(f"{file.path} has {len(file)} tokens, not enough for one window of {seq_len} and a target")
        self.file, self.seq_len = file, seq_len
        self._windows = file.windows(seq_len)

    def __reduce__(self) -> tuple[type[TokenWindows], tuple[TokenFile, int]]:
        return TokenWindows, (self.file, self.seq_len)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Give one window, int64, shape (seq_len + 1,). Inputs are all but the last token, targets all but the first."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is outside of {len(self)} windows")
        return self.file.widened(self._windows[index])

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return list(self.batch(indices))

    def batch(self, indices: Sequence[int]) -> torch.Tensor:
        """Give several windows at once, int64, shape (len(indices), seq_len + 1). Raises IndexError."""
        if indices and not 0 <= min(indices) <= max(indices) < len(self):
            raise IndexError(f"window {max(indices)} or {min(indices)} is outside of {len(self)} windows")
        chosen = torch.tensor(indices, dtype=torch.int64, device="cpu")
        return self.file.widened(self._windows.index_select(0, chosen))
