"""From texts to the bytes of a token file: in the order of the texts, by this process or by several at once. No torch."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

from elastipod.data.token_format import bytes_per_token
from elastipod.errors import DataError

Tokenize = Callable[[str], Iterable[int]]

_CODES = {1: "B", 2: "H", 4: "i"}
_BATCH_BYTES = 1 << 20  # bytes of text that are handed to a process at once, more where a document is larger
_QUEUED_PER_WORKER = 2  # pieces for each process that wait or are being worked on


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Text that is read at once. is_end: a document ends with it. bytes_read: of all files, up to its end."""

    path: Path
    data: bytes
    is_end: bool
    bytes_read: int


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Tokens as they lie in the file. bytes_read: as of the last part."""

    raw: bytes
    tokens: int
    documents: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class BlockTokenizer:
    """How parts become tokens: pure, so that it does not matter which process does it. by_line: every line is a document."""

    tokenize: Tokenize | None
    vocabulary: int
    end_of_document: int | None
    by_line: bool

    def __call__(self, parts: Sequence[TextBlock]) -> TokenBlock:
        """Raises DataError, in one sentence, for text or tokens that cannot be used."""
        raw, documents = bytearray(), 0
        for data, is_end, path in self._texts(parts):
            if data:
                raw += self._bytes_of(
                    array("B", data) if self.tokenize is None else self.tokenize(_text(data, path)), path
                )
            if is_end:
                documents += 1
                if self.end_of_document is not None:
                    raw += self._bytes_of([self.end_of_document], path)
        return TokenBlock(bytes(raw), len(raw) // bytes_per_token(self.vocabulary), documents, parts[-1].bytes_read)

    def _texts(self, parts: Iterable[TextBlock]) -> Iterator[tuple[bytes, bool, Path]]:
        """Give what is tokenized at once, and whether a document ends with it."""
        for part in parts:
            if self.by_line:
                for line in part.data.removesuffix(b"\n").split(b"\n"):
                    yield line.rstrip(b"\r"), True, part.path
            else:
                yield part.data, part.is_end, part.path

    def _bytes_of(self, tokens: Iterable[int], path: Path) -> bytes:
        try:
            if isinstance(tokens, (bytes, bytearray)):  # an array would take them as raw memory
                tokens = iter(tokens)
            packed = array(_CODES[bytes_per_token(self.vocabulary)], tokens)
        except (OverflowError, TypeError) as error:
            raise DataError(f"the tokenizer gave something for {path} that is no token: {error}") from error
        if packed and not 0 <= min(packed) <= max(packed) < self.vocabulary:
            raise DataError(
                f"the tokenizer gave the token {max(packed)} for {path}, but the vocabulary is {self.vocabulary}"
            )
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()


def read_text_blocks(texts: Sequence[Path], *, by_line: bool, whole: bool) -> Iterator[TextBlock]:
    """Read files in order, by many whole lines, by documents (``whole``, as tokenizers want them), or by pieces of such."""
    bytes_read = 0
    for path in texts:
        with open(path, "rb") as file:
            while data := file.read(-1 if whole and not by_line else _BATCH_BYTES):
                if by_line:
                    data += file.readline()
                bytes_read += len(data)
                yield TextBlock(path, data, False, bytes_read)
        if not by_line:
            yield TextBlock(path, b"", True, bytes_read)


def tokenize_blocks(packer: BlockTokenizer, parts: Iterable[TextBlock], workers: int) -> Iterator[TokenBlock]:
    """Give the tokens of parts in their order, which is the same for any number of worker processes.

    workers: 1 for this process alone; for more the packer's tokenizer must be picklable. Raises DataError in one sentence.
    """
    if workers == 1:
        yield from map(packer, _batches(parts))
        return
    try:
        pickle.dumps(packer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DataError(f"the tokenizer cannot be handed to other processes: {error}; build with one") from error
    under_way: deque[Future[TokenBlock]] = deque()
    # Spawned, for a tokenizer may have threads already; the pool waits for its processes when it is left.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (packer,)) as pool:
        try:
            for piece in _batches(parts):
                under_way.append(pool.submit(_tokenize_batch, piece))
                if len(under_way) > _QUEUED_PER_WORKER * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            raise DataError("a process that tokenizes has ended: out of memory, or the tokenizer ended it") from error
        finally:
            for waiting in under_way:
                waiting.cancel()


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _batches(parts: Iterable[TextBlock]) -> Iterator[list[TextBlock]]:
    piece: list[TextBlock] = []
    size = 0
    for part in parts:
        piece.append(part)
        size += len(part.data)
        if size >= _BATCH_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


_block_tokenizer: BlockTokenizer | None = None  # of a worker process


def _start_worker(packer: BlockTokenizer) -> None:
    """Begin the life of a worker process: it is interrupted by its parent alone, and ends when that is gone."""
    global _block_tokenizer
    _block_tokenizer = packer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _tokenize_batch(parts: Sequence[TextBlock]) -> TokenBlock:
    assert _block_tokenizer is not None
    return _block_tokenizer(parts)
