"""`elastipod tokens`: make token files from text, and look at them. Needs no torch."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from elastipod.data.token_format import HEADER_BYTES, TokenHeader, bytes_per_token, read_header, verify_tokens
from elastipod.data.tokenizing import BlockTokenizer, TokenBlock, Tokenize, read_text_blocks, tokenize_blocks
from elastipod.errors import DataError

BYTES = "bytes"
_PROGRESS_INTERVAL_S = {True: 0.5, False: 10.0}  # on a terminal, elsewhere


def main(argv: Sequence[str]) -> int:
    """Run `elastipod tokens` and give the exit status: 0 done, 1 it could not be done, 2 wrong use."""
    options = _parser().parse_args(argv)
    try:
        if options.action == "show":
            header = verify_tokens(options.file) if options.verify else read_header(options.file)
            print(_describe(options.file, header, "checksum right" if options.verify else "checksum not looked at"))
            return 0
        header = _build(options)
    except DataError as error:
        print(f"elastipod tokens: {error}", file=sys.stderr)
        return 1
    print(_describe(options.output, header, "written"))
    return 0


def build(
    output: Path,
    texts: Sequence[Path],
    *,
    tokenize: Tokenize | None = None,
    vocabulary: int = 256,
    end_of_document: int | None = None,
    by_line: bool = False,
    replace: bool = False,
    workers: int = 1,
    tell: Callable[[int, int], None] = lambda done, tokens: None,
) -> TokenHeader:
    """Write a token file; it appears when it is whole, and a failure leaves nothing behind.

    texts: files in the order in which their tokens follow, each one document, or with ``by_line`` one per line. tokenize: UTF-8
    text -> tokens below ``vocabulary``; None takes the bytes themselves. end_of_document: token put behind every document.
    workers: processes that tokenize; with more than one ``tokenize`` must be picklable, and the file is the same. tell: is
    called with bytes read and tokens written. Raises DataError in one sentence.
    """
    if output.exists() and not replace:
        raise DataError(f"{output} exists; name another file, or replace it with --force")
    if end_of_document is not None and not 0 <= end_of_document < vocabulary:
        raise DataError(
            f"the token {end_of_document} for ends of documents is not below the vocabulary of {vocabulary}"
        )
    if workers < 1:
        raise DataError(f"workers is {workers}; at least one process has to do it")
    temporary = output.with_name(f"{output.name}.{socket.gethostname()}.{os.getpid()}.partial")
    is_ours = False
    try:
        with open(temporary, "xb") as file:
            is_ours = True
            writer = _Writer(file, vocabulary)
            parts = read_text_blocks(texts, by_line=by_line, whole=tokenize is not None)
            for each in tokenize_blocks(BlockTokenizer(tokenize, vocabulary, end_of_document, by_line), parts, workers):
                writer.write(each)
                tell(each.bytes_read, writer.tokens)
            header = writer.finish()
        os.replace(temporary, output)
        _sync_folder(output.parent)
    except FileExistsError as error:
        raise DataError(f"{temporary} exists: another build is writing it, or was killed; then remove it") from error
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.filename or output}: {error.strerror}") from error
    finally:
        if is_ours:
            temporary.unlink(missing_ok=True)
    return header


class _Writer:
    """Writes tokens behind the room for a header, and at last the header."""

    def __init__(self, file: BinaryIO, vocabulary: int) -> None:
        self._file, self._vocabulary = file, vocabulary
        self._token_bytes = bytes_per_token(vocabulary)  # refuses what it cannot hold
        self.tokens = self._documents = self._crc32 = 0
        file.write(bytes(HEADER_BYTES))

    def write(self, packed: TokenBlock) -> None:
        self._file.write(packed.raw)
        self._crc32 = zlib.crc32(packed.raw, self._crc32)
        self.tokens += packed.tokens
        self._documents += packed.documents

    def finish(self) -> TokenHeader:
        if not self.tokens:
            raise DataError("the texts have no tokens at all; nothing was written")
        header = TokenHeader(self._token_bytes, self.tokens, self._vocabulary, self._documents, self._crc32)
        self._file.seek(0)
        self._file.write(header.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        return header


class _ProgressLine:
    """Tells on stderr how far a build is, not more often than a reader wants to know."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._started = self._told = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._told < _PROGRESS_INTERVAL_S[self._is_terminal]:
            return
        self._told = now
        rate = tokens / (now - self._started)
        line = (
            f"{done / max(self._total_bytes, 1):.0%} of {self._total_bytes / 1e6:.1f} MB, {tokens} tokens, {rate:.0f}/s"
        )
        print(
            f"\r{line}" if self._is_terminal else line,
            end="" if self._is_terminal else "\n",
            file=sys.stderr,
            flush=True,
        )


def _build(options: argparse.Namespace) -> TokenHeader:
    texts = _files(options.text)
    tokenize = None if options.tokenizer == BYTES else _NamedTokenizer(options.tokenizer)
    if tokenize is not None and options.vocabulary is None:
        raise DataError(f"--vocabulary is needed with --tokenizer {options.tokenizer}: tokens must be below it")
    return build(
        options.output,
        texts,
        tokenize=tokenize,
        vocabulary=options.vocabulary or 256,
        end_of_document=options.end_of_document,
        by_line=options.lines,
        replace=options.force,
        workers=options.workers,
        tell=_ProgressLine(sum(path.stat().st_size for path in texts)),
    )


def _files(named: Sequence[Path]) -> list[Path]:
    """Give the files that were named, and those in folders that were named, in the order of their names.

    Hidden ones in folders are left out: a mounted ConfigMap holds each file a second time below one.
    """
    files: list[Path] = []
    for path in named:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        files += sorted(each for each in path.rglob("*") if _is_text(each, path)) if path.is_dir() else [path]
    if not files:
        raise DataError(f"there are no files in {', '.join(map(str, named))}")
    return files


def _is_text(path: Path, folder: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)


class _NamedTokenizer:
    """A tokenizer by its name, MODULE:FUNCTION, looked up from the working directory on; each process loads its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        module, _, function = name.partition(":")
        sys.path.insert(0, os.getcwd())
        try:
            self._tokenize: Tokenize = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise DataError(f"--tokenizer {name} cannot be loaded: {error}; give {BYTES} or MODULE:FUNCTION") from error
        finally:
            sys.path.pop(0)

    def __call__(self, text: str) -> Iterable[int]:
        return self._tokenize(text)

    def __reduce__(self) -> tuple[type[_NamedTokenizer], tuple[str]]:
        return _NamedTokenizer, (self._name,)


def _describe(path: Path, header: TokenHeader, checksum: str) -> str:
    return (
        f"{path}: {header.tokens} tokens of {header.token_bytes} bytes in {header.documents} documents, "
        f"vocabulary {header.vocabulary}, {checksum}"
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastipod tokens", description="Token files: text ready to train on.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    made = actions.add_parser("build", help="make a token file from text", description="Make a token file from text.")
    made.add_argument("output", type=Path, help="the file to write; it appears when it is whole")
    made.add_argument("text", type=Path, nargs="+", help="text files, or folders of them: each file is a document")
    made.add_argument(
        "--tokenizer", default=BYTES, help="bytes (default), or MODULE:FUNCTION, which gives the tokens of a text"
    )
    made.add_argument("--vocabulary", type=int, help="tokens are below it (bytes: 256, or more with --end-of-document)")
    made.add_argument("--end-of-document", type=int, metavar="TOKEN", help="a token to put behind every document")
    made.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes that tokenize (default: 1); the file is the same with any number",
    )
    made.add_argument("--lines", action="store_true", help="every line is a document; ends of lines are left out")
    made.add_argument("--force", action="store_true", help="replace the file if it exists")
    shown = actions.add_parser("show", help="say what is in a token file", description="Say what is in a token file.")
    shown.add_argument("file", type=Path)
    shown.add_argument("--verify", action="store_true", help="read all of it and compare the checksum")
    return parser
