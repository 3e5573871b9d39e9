"""The format of token files (version 1): a header of 64 bytes, then the tokens, little-endian, nothing else.

Header: magic "ELPTOKEN", format version (u32), bytes per token (u32: 1, 2 or 4), tokens (u64), vocabulary (u64: every token is
below it), documents (u64), CRC-32 of the tokens (u32), CRC-32 of the header up to here (u32), zeros. The header suffices to
check that a file is complete, so opening a file takes the same time at any size.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

from elastipod.errors import DataError

HEADER_BYTES = 64
VERSION = 1
_MAGIC = b"ELPTOKEN"
_FIELDS = struct.Struct("<8sIIQQQI")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """The header of a token file. crc32: of all tokens."""

    token_bytes: int
    tokens: int
    vocabulary: int
    documents: int
    crc32: int

    def encode(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC, VERSION, self.token_bytes, self.tokens, self.vocabulary, self.documents, self.crc32
        )
        return (fields + zlib.crc32(fields).to_bytes(4, "little")).ljust(HEADER_BYTES, b"\0")


def bytes_per_token(vocabulary: int) -> int:
    """Give the smallest token size in bytes for a vocabulary: 1, 2 or 4. Raises DataError for one that needs more."""
    if not 1 <= vocabulary <= 1 << 31:
        raise DataError(f"the vocabulary is {vocabulary}; it must be 1 to 2**31")
    return 1 if vocabulary <= 1 << 8 else 2 if vocabulary <= 1 << 16 else 4


def read_header(path: str | os.PathLike[str]) -> TokenHeader:
    """Read a file's header and check it and the file's size. Raises DataError for anything but a complete token file."""
    try:
        with open(path, "rb") as file:
            raw = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}") from error
    if raw[: len(_MAGIC)] != _MAGIC:
        raise DataError(f"{path} is not a token file; build one with: elastipod tokens build")
    if len(raw) < HEADER_BYTES:
        raise DataError(f"the token file {path} is cut off in its header; build it again")
    _, version, token_bytes, tokens, vocabulary, documents, crc32 = _FIELDS.unpack_from(raw)
    if version != VERSION:
        raise DataError(f"the token file {path} has format version {version}; this elastipod reads version {VERSION}")
    if zlib.crc32(raw[: _FIELDS.size]) != int.from_bytes(raw[_FIELDS.size : _FIELDS.size + 4], "little"):
        raise DataError(f"the header of the token file {path} is damaged; build it again")
    wanted = HEADER_BYTES + tokens * token_bytes
    if size != wanted:
        raise DataError(
            f"the token file {path} has {size} bytes, but its {tokens} tokens take {wanted}: it was cut off or changed; build "
            "it again"
        )
    return TokenHeader(token_bytes, tokens, vocabulary, documents, crc32)


def verify_tokens(path: str | os.PathLike[str]) -> TokenHeader:
    """Read a whole file and verify its checksum. Raises DataError when the tokens do not match it."""
    header = read_header(path)
    found = 0
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    if found != header.crc32:
        raise DataError(
            f"the tokens in {path} do not have the checksum of the header: the file is damaged; build it again"
        )
    return header
