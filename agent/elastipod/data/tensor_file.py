"""The files of the batch cache: tensors in one file that is mapped, verified and used in place. Nothing is pickled.

Format: magic "ELPBATCH", then the length and CRC-32 of a JSON header and the CRC-32 of everything after it (u32 each,
little-endian), the header, and each tensor's bytes, aligned to 64. The mapping is private (copy-on-write), so other readers do
not see what one reader writes into a tensor.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from elastipod.errors import DataError

Tensors = torch.Tensor | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]

_MAGIC = b"ELPBATCH"
_LENGTHS = struct.Struct("<8sIII")
_ALIGNMENT = 64


def write_tensors(path: Path, tensors: Tensors, key: str) -> None:
    """Write a tensor, or a dictionary, list or tuple of tensors. Does not make the file durable.

    key: `read_tensors` must pass the same. Raises OSError, and DataError for anything but tensors.
    """
    kind, names, flat = _flattened(tensors)
    entries, offset = [], 0
    for tensor in flat:
        entries.append(
            {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "offset": offset}
        )
        offset = _aligned(offset + tensor.nbytes)
    header = json.dumps({"key": key, "kind": kind, "names": names, "tensors": entries}).encode()
    first = _aligned(_LENGTHS.size + len(header))
    chunks: list[bytes | memoryview[int]] = [bytes(first - _LENGTHS.size - len(header))]
    for tensor in flat:
        chunks += [_bytes_of(tensor), bytes(_aligned(tensor.nbytes) - tensor.nbytes)]
    crc32 = 0
    for chunk in chunks:
        crc32 = zlib.crc32(chunk, crc32)
    with open(path, "wb") as file:
        file.write(_LENGTHS.pack(_MAGIC, len(header), zlib.crc32(header), crc32))
        file.write(header)
        for chunk in chunks:
            file.write(chunk)


def read_tensors(path: Path, key: str) -> Tensors | None:
    """Give the tensors of a file, mapped in place; None when the file is missing, damaged or has another key."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(descriptor).st_size < _LENGTHS.size:
            return None
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    magic, length, header_crc32, crc32 = _LENGTHS.unpack_from(mapped)
    header = mapped[_LENGTHS.size : _LENGTHS.size + length]
    if magic != _MAGIC or zlib.crc32(header) != header_crc32:
        return None
    with memoryview(mapped) as whole, whole[_LENGTHS.size + length :] as rest:
        if zlib.crc32(rest) != crc32:
            return None
    record = json.loads(header)
    if record["key"] != key:
        return None
    first = _aligned(_LENGTHS.size + length)
    flat = [_tensor_in(mapped, first, entry) for entry in record["tensors"]]
    if record["kind"] == "tensor":
        return flat[0]
    if record["kind"] == "dict":
        return dict(zip(record["names"], flat, strict=True))
    return flat if record["kind"] == "list" else tuple(flat)


def _flattened(tensors: Tensors) -> tuple[str, list[str], list[torch.Tensor]]:
    if isinstance(tensors, torch.Tensor):
        kind, names, flat = "tensor", [], [tensors]
    elif isinstance(tensors, Mapping):
        kind, names, flat = "dict", list(tensors), list(tensors.values())
    elif isinstance(tensors, Sequence):
        kind, names, flat = "tuple" if isinstance(tensors, tuple) else "list", [], list(tensors)
    else:
        raise DataError(
            f"a cached batch holds tensors, alone or in a dictionary, list or tuple; this is a {type(tensors).__name__}"
        )
    for each in flat:
        if not isinstance(each, torch.Tensor):
            raise DataError(f"a cached batch holds tensors only, and this one holds a {type(each).__name__}")
    return kind, names, [each.detach().cpu().contiguous() for each in flat]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b"")


def _tensor_in(mapped: mmap.mmap, first: int, entry: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    count = prod(entry["shape"])
    if not count:
        return torch.empty(entry["shape"], dtype=dtype, device="cpu")
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=first + entry["offset"]).reshape(entry["shape"])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
