"""Tokens in Megatron's format, `.bin` with `.idx` beside it, as a token file: mapped, and read at any position.

`.idx` (version 1, little-endian): magic, version (u64), type of the tokens (u8), sequences (u64), documents + 1 (u64); then for
each sequence its length (i32) and its first byte in `.bin` (i64), and the first sequence of each document (i64). Multimodal files
have a byte more for each sequence. Only the header and the last sequence are read, so opening takes the same time at any size.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from elastipod.data.token_format import TokenHeader
from elastipod.data.tokens import TokenFile
from elastipod.errors import DataError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_BYTES = {1: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # by type: uint8, int16, int32, int64, uint16


class MegatronTokens(TokenFile):
    """The tokens of all documents, one after the other, for `TokenWindows`. Can be pickled; the copy maps the file again.

    The order of windows is that of the plan, not that of Megatron's own sample and shuffle indices.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """prefix: path of both files without `.bin` and `.idx`, or with either. Raises DataError for files that do not fit together."""
        path = Path(prefix)
        path = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        self.path = path.with_name(f"{path.name}.bin")
        self.header = read_index(path.with_name(f"{path.name}.idx"), self.path)
        self._map(offset=0)

    def __reduce__(self) -> tuple[type[MegatronTokens], tuple[Path]]:
        return MegatronTokens, (self.path,)


def read_index(index: Path, tokens: Path) -> TokenHeader:
    """Read `.idx` and check it and the sizes of both files. The vocabulary and the checksum are not in it, and are 0."""
    try:
        with open(index, "rb") as file:
            raw = file.read(_HEADER.size)
            if raw[: len(_MAGIC)] != _MAGIC or len(raw) < _HEADER.size:
                raise DataError(f"{index} is no index of Megatron's format; give the path of a .bin and .idx pair")
            _, version, kind, sequences, bounds = _HEADER.unpack(raw)
            if version != 1 or kind not in _TOKEN_BYTES:
                raise DataError(
                    f"{index} has version {version} and tokens of type {kind}; version 1 and whole numbers are read"
                )
            wanted = _HEADER.size + 12 * sequences + 8 * bounds
            if os.fstat(file.fileno()).st_size not in (wanted, wanted + sequences):
                raise DataError(
                    f"{index} was cut off or changed: {sequences} sequences take {wanted} bytes; build it again"
                )
            end = 0
            if sequences:
                file.seek(_HEADER.size + 4 * (sequences - 1))
                (length,) = struct.unpack("<i", file.read(4))
                file.seek(_HEADER.size + 12 * sequences - 8)
                (first,) = struct.unpack("<q", file.read(8))
                end = first + length * _TOKEN_BYTES[kind]
        size = os.stat(tokens).st_size
    except OSError as error:
        raise DataError(f"cannot read {error.filename or index}: {error.strerror}") from error
    if size != end or not size:
        raise DataError(f"{tokens} has {size} bytes, but by {index.name} its tokens take {end}; build both again")
    return TokenHeader(_TOKEN_BYTES[kind], size // _TOKEN_BYTES[kind], 0, max(0, bounds - 1), 0)
