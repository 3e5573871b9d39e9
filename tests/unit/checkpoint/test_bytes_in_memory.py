"""The memory of images: registered with CUDA once, freed when it is of no use, and with an error that keeps its number."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.in_memory.forked_ranks import run_ranks

from elastipod.checkpoint import mapped_memory
from elastipod.checkpoint.image import MappedImage, checksum
from elastipod.checkpoint.image_source import _digest
from elastipod.checkpoint.mapped_memory import MappedMemory
from elastipod.checkpoint.memory_directory import MemoryDirectory

DEVICE = torch.device("cpu")


class Runtime:
    """CUDA's runtime, which notes what it is asked."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.asked.append(("register", pointer, size, flags))
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:
        self.asked.append(("unregister", pointer))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_memory_is_registered_once_and_released_before_it_is_unmapped(runtime: Runtime) -> None:
    image = MappedImage.create(None, 100)
    pointer = image.bytes.data_ptr()
    image.pin(DEVICE)
    image.pin(DEVICE)
    assert runtime.asked == [("register", pointer, mmap.PAGESIZE, 0)]
    image.close()
    image.close()
    assert runtime.asked[1:] == [("unregister", pointer)]
    assert image.bytes.numel() == 0


def test_a_refused_registration_is_told_once_and_not_taken_back(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.error = 2
    with caplog.at_level(logging.WARNING), MappedImage.create(None, 100) as image:
        image.pin(DEVICE)
        image.pin(DEVICE)
    assert [each[0] for each in runtime.asked] == ["register"]
    assert [record.getMessage() for record in caplog.records] == [
        "copies of the state to host memory are slow: the memory cannot be registered with CUDA (error 2)"
    ]


def test_an_empty_image_is_not_registered(runtime: Runtime) -> None:
    with MappedImage.create(None, 0) as image:
        image.pin(DEVICE)
    assert runtime.asked == []


def test_a_single_byte_is_registered(runtime: Runtime) -> None:
    with MappedImage.create(None, 1) as image:
        image.pin(DEVICE)
    assert [each[0] for each in runtime.asked] == ["register", "unregister"]


def test_a_file_is_private_and_as_long_as_a_page(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"of before")
    with MappedImage.create(path, 3) as image:
        assert not image.bytes.any()
        image.bytes[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert path.read_bytes() == b"\1\2\3".ljust(mmap.PAGESIZE, b"\0")
    assert path.stat().st_mode & 0o777 == 0o600
    with MappedImage.open(path, 3) as again:
        assert again.bytes[:3].tolist() == [1, 2, 3]
    with MappedImage.open(path, mmap.PAGESIZE) as whole:
        assert whole.size == mmap.PAGESIZE
    with pytest.raises(ValueError, match="it is cut short"):
        MappedImage.open(path, mmap.PAGESIZE + 1)


def test_a_file_that_gets_no_memory_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("elastipod.checkpoint.image.allocate_file", full)
    with pytest.raises(OSError, match="No space"):
        MappedImage.create(tmp_path / "image", 3)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_mapping_keeps_the_number_of_the_error_and_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = mapped_memory._libc()
    given_back: list[tuple[int, int]] = []
    reserved: list[int] = []

    class Libc:
        def mmap(self, address: int | None, length: int, *rest: int) -> Any:
            if address is None:
                reserved.extend([real.mmap(address, length, *rest), length])
                return reserved[0]
            return real.mmap(address, length, *rest)

        def munmap(self, start: int, length: int) -> int:
            given_back.append((start, length))
            return int(real.munmap(start, length))

    monkeypatch.setattr(mapped_memory, "_libc", Libc)
    with pytest.raises(OSError) as raised:  # noqa: PT011
        MappedMemory(1 << 20, mmap.PAGESIZE)  # a descriptor that is not open
    assert raised.value.errno == errno.EBADF
    assert raised.value.strerror == "Bad file descriptor"
    assert given_back == [tuple(reserved)]


@pytest.mark.parametrize("path", ["image", None], ids=["of a file", "of the process"])
def test_a_forked_process_holds_no_image_and_unmaps_nothing(tmp_path: Path, path: str | None) -> None:
    """As workers of a data loader, which live long and end in order."""
    image = MappedImage.create(tmp_path / path if path else None, 4 << 20)
    address, length = ctypes.addressof(image._mapping.bytes), len(image._mapping.bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def is_mapped() -> bool:
        return int(libc.mincore(address, length, (ctypes.c_ubyte * (length // mmap.PAGESIZE))())) == 0

    assert is_mapped()

    def body(_: int) -> Any:
        own = mapped_memory._map(
            address, mmap.PAGESIZE, mmap.PROT_READ, 0x10 | 0x22, -1
        )  # at the place that is free here
        inherited = [is_mapped()]
        image.close()
        return [*inherited, own == address, ctypes.string_at(address, 1) == b"\0"]

    assert run_ranks(1, body) == [[False, True, True]]
    image.bytes.fill_(1)
    image.close()
    assert not is_mapped()


def test_large_pages_are_asked_for_by_place_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    answer = 0

    class Libc:
        def madvise(self, address: int, length: int, advice: int) -> int:
            asked.append((address, length, advice))
            return answer

    with MappedImage.create(tmp_path / "image", 4 * mmap.PAGESIZE) as image:
        mapping = image._mapping
        start = ctypes.addressof(mapping.bytes)
        monkeypatch.setattr(mapped_memory, "_libc", Libc)
        assert mapping.collapse(mmap.PAGESIZE, 2 * mmap.PAGESIZE) is True
        answer = -1
        assert mapping.collapse(0, mmap.PAGESIZE) is False
        monkeypatch.undo()
    assert asked == [(start + mmap.PAGESIZE, 2 * mmap.PAGESIZE, 25), (start, mmap.PAGESIZE, 25)]


def test_only_images_without_a_header_are_freed(tmp_path: Path) -> None:
    directory = MemoryDirectory(tmp_path, "job")
    for name in ("whole.bin", "whole.json", "torn.bin", "other.bin"):
        (directory.path / name).write_bytes(b"x")
    directory.remove_unfinished(["missing", "whole", "torn"])
    assert {each.name for each in directory.path.iterdir()} == {"whole.bin", "whole.json", "other.bin"}


def test_nodes_of_any_byte_order_give_replicas_the_same_digest() -> None:
    assert _digest([[1, 2**64 - 1], [3]]) == "dbc9ec44165f31591fdd1b667be11494"
    assert _digest([]) == "e3b0c44298fc1c149afbf4c8996fb924"
    assert _digest([[1, 2], [3]]) != _digest([[1, 2], [4]]) != _digest([[4], [1, 2]])


def test_the_checksums_of_whole_words_add_up() -> None:
    raw = torch.arange(19, dtype=torch.uint8)
    words = [int.from_bytes(bytes(raw[at : at + 8].tolist()), "little") for at in (0, 8, 16)]
    assert checksum(raw) == sum(words) % 2**64
    assert checksum(raw[:8]) + checksum(raw[8:]) == checksum(raw)
    assert checksum(raw[:3]) == 0x020100
    assert checksum(raw[:0]) == 0
    assert checksum(torch.full((16,), 255, dtype=torch.uint8)) == 2**64 - 2
