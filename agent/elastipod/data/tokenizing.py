"""Turns texts into the bytes of a token file, in order, in this process or in several. Needs no torch."""

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
_BATCH_BYTES = 1 << 20  # bytes of text that a process gets at once; more if a document is larger
_QUEUED_PER_WORKER = 2  # batches per process that wait or are being tokenized


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Text that was read at once. is_end: a document ends with it. bytes_read: of all files, up to its end."""

    path: Path
    data: bytes
    is_end: bool
    bytes_read: int


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Tokens in the format of the file. bytes_read: of the last text block."""

    raw: bytes
    tokens: int
    documents: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class BlockTokenizer:
    """Turns text blocks into tokens. It has no state, so any process can do it. by_line: every line is a document."""

    tokenize: Tokenize | None
    vocabulary: int
    end_of_document: int | None
    by_line: bool

    def __call__(self, blocks: Sequence[TextBlock]) -> TokenBlock:
        """Give the tokens of some blocks. Raises DataError for text or tokens that cannot be used."""
        raw, documents = bytearray(), 0
        for data, is_end, path in self._texts(blocks):
            if data:
                raw += self._bytes_of(
                    array("B", data) if self.tokenize is None else self.tokenize(_text(data, path)), path
                )
            if is_end:
                documents += 1
                if self.end_of_document is not None:
                    raw += self._bytes_of([self.end_of_document], path)
        return TokenBlock(bytes(raw), len(raw) // bytes_per_token(self.vocabulary), documents, blocks[-1].bytes_read)

    def _texts(self, blocks: Iterable[TextBlock]) -> Iterator[tuple[bytes, bool, Path]]:
        """Give the texts to tokenize as (text, is the end of a document, path)."""
        for block in blocks:
            if self.by_line:
                for line in block.data.removesuffix(b"\n").split(b"\n"):
                    yield line.rstrip(b"\r"), True, block.path
            else:
                yield block.data, block.is_end, block.path

    def _bytes_of(self, tokens: Iterable[int], path: Path) -> bytes:
        try:
            if isinstance(tokens, (bytes, bytearray)):  # an array would take them as raw memory
                tokens = iter(tokens)
            packed = array(_CODES[bytes_per_token(self.vocabulary)], tokens)
        except (OverflowError, TypeError) as error:
            raise DataError(f"the tokenizer gave something for {path} that is not a token: {error}") from error
        if packed and not 0 <= min(packed) <= max(packed) < self.vocabulary:
            raise DataError(
                f"the tokenizer gave the token {max(packed)} for {path}, but the vocabulary is {self.vocabulary}"
            )
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()


def read_text_blocks(texts: Sequence[Path], *, by_line: bool, whole: bool) -> Iterator[TextBlock]:
    """Read files in order: many complete lines at once (by_line), whole documents (whole), or parts of documents."""
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


def tokenize_blocks(tokenizer: BlockTokenizer, blocks: Iterable[TextBlock], workers: int) -> Iterator[TokenBlock]:
    """Give the tokens of text blocks, in the order of the blocks for any number of worker processes.

    workers: 1 uses this process; more require a picklable tokenizer. Raises DataError.
    """
    if workers == 1:
        yield from map(tokenizer, _batches(blocks))
        return
    try:
        pickle.dumps(tokenizer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DataError(f"the tokenizer cannot be passed to other processes: {error}; build with one") from error
    pending: deque[Future[TokenBlock]] = deque()
    # Spawned, since a tokenizer may have threads. Leaving the block waits for the processes.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (tokenizer,)) as pool:
        try:
            for batch in _batches(blocks):
                pending.append(pool.submit(_tokenize_batch, batch))
                if len(pending) > _QUEUED_PER_WORKER * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenizing process has ended: it ran out of memory, or the tokenizer ended it"
            ) from error
        finally:
            for waiting in pending:
                waiting.cancel()


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _batches(blocks: Iterable[TextBlock]) -> Iterator[list[TextBlock]]:
    batch: list[TextBlock] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += len(block.data)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_block_tokenizer: BlockTokenizer | None = None  # in a worker process


def _start_worker(tokenizer: BlockTokenizer) -> None:
    """Set up a worker process: it ignores Ctrl-C, which its parent handles, and ends when its parent is gone."""
    global _block_tokenizer
    _block_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _tokenize_batch(blocks: Sequence[TextBlock]) -> TokenBlock:
    assert _block_tokenizer is not None
    return _block_tokenizer(blocks)
