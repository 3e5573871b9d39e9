"""`elastipod tokens`: builds token files from text and shows what they contain. Needs no torch."""

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
from elastipod.synced_files import sync_directory

BYTES = "bytes"
_PARTIAL = ".partial"  # at the end of the name of an output that is being written
_PROGRESS_INTERVAL_S = {True: 0.5, False: 10.0}  # on a terminal, elsewhere


def main(argv: Sequence[str]) -> int:
    """Run `elastipod tokens` and give the exit status: 0 success, 1 an error, 2 wrong usage."""
    options = _parser().parse_args(argv)
    try:
        if options.action == "show":
            header = verify_tokens(options.file) if options.verify else read_header(options.file)
            print(_describe(options.file, header, "checksum correct" if options.verify else "checksum not verified"))
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
    on_progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> TokenHeader:
    """Write a token file atomically and give its header. A failure leaves no file behind.

    texts: files in the order of their tokens; each is one document, or with ``by_line`` each of its lines. tokenize: UTF-8
    text -> tokens below ``vocabulary``; None: the bytes of the text are the tokens. end_of_document: token to add after every
    document. replace: overwrite an existing file. workers: processes that tokenize; with more than one, ``tokenize`` must be
    picklable; the file is the same for any number. on_progress: called with the bytes read and the tokens written so far.
    Raises DataError.
    """
    if output.exists() and not replace:
        raise DataError(f"{output} exists; name another file, or replace it with --force")
    if end_of_document is not None and not 0 <= end_of_document < vocabulary:
        raise DataError(
            f"the token {end_of_document} for ends of documents is not below the vocabulary of {vocabulary}"
        )
    if workers < 1:
        raise DataError(f"workers is {workers}; it must be at least 1")
    temporary = output.with_name(f"{output.name}.{socket.gethostname()}.{os.getpid()}{_PARTIAL}")
    is_ours = False
    try:
        with open(temporary, "xb") as file:
            is_ours = True
            writer = _Writer(file, vocabulary)
            parts = read_text_blocks(texts, by_line=by_line, whole=tokenize is not None)
            for each in tokenize_blocks(BlockTokenizer(tokenize, vocabulary, end_of_document, by_line), parts, workers):
                writer.write(each)
                on_progress(each.bytes_read, writer.tokens)
            header = writer.finish()
        os.replace(temporary, output)
        sync_directory(output.parent)
    except FileExistsError as error:
        raise DataError(f"{temporary} exists: another build is writing it, or was killed; then remove it") from error
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.filename or output}: {error.strerror}") from error
    finally:
        if is_ours:
            temporary.unlink(missing_ok=True)
    return header


class _Writer:
    """Writes tokens after space for the header, and the header at the end."""

    def __init__(self, file: BinaryIO, vocabulary: int) -> None:
        self._file, self._vocabulary = file, vocabulary
        self._token_bytes = bytes_per_token(vocabulary)  # raises for a vocabulary that is too large
        self.tokens = self._documents = self._crc32 = 0
        file.write(bytes(HEADER_BYTES))

    def write(self, packed: TokenBlock) -> None:
        self._file.write(packed.raw)
        self._crc32 = zlib.crc32(packed.raw, self._crc32)
        self.tokens += packed.tokens
        self._documents += packed.documents

    def finish(self) -> TokenHeader:
        if not self.tokens:
            raise DataError("the texts contain no tokens; nothing was written")
        header = TokenHeader(self._token_bytes, self.tokens, self._vocabulary, self._documents, self._crc32)
        self._file.seek(0)
        self._file.write(header.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        return header


class _ProgressLine:
    """Prints the progress of a build to stderr, at most once per interval."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._started = self._printed_at = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._printed_at < _PROGRESS_INTERVAL_S[self._is_terminal]:
            return
        self._printed_at = now
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
    texts = _files(options.text, options.output)
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
        on_progress=_ProgressLine(sum(path.stat().st_size for path in texts)),
    )


def _files(named: Sequence[Path], output: Path) -> list[Path]:
    """Give the named files, and the files in named folders sorted by path.

    Hidden files and folders inside folders are left out; a mounted ConfigMap holds each file a second time in one. So are the output of
    an earlier build and what killed builds have left.
    """
    files: list[Path] = []
    for path in named:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        if path.is_dir():
            found = (each for each in path.rglob("*") if _is_text(each, path))
            files += sorted(each for each in found if each.suffix != _PARTIAL and not _is_same(each, output))
        elif _is_same(path, output):
            raise DataError(f"{path} is the text and the output; name another output")
        else:
            files.append(path)
    if not files:
        raise DataError(f"there are no files in {', '.join(map(str, named))}")
    return files


def _is_same(path: Path, other: Path) -> bool:
    return other.exists() and path.samefile(other)


def _is_text(path: Path, folder: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)


class _NamedTokenizer:
    """A tokenizer named MODULE:FUNCTION, imported with the working directory on the path. Each process loads its own."""

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastipod tokens", description="Build and show token files: tokenized text for training."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build", help="build a token file from text", description="Build a token file from text."
    )
    build.add_argument("output", type=Path, help="the file to write; it appears only when it is complete")
    build.add_argument(
        "text", type=Path, nargs="+", help="text files, or folders with text files; each file is one document"
    )
    build.add_argument(
        "--tokenizer",
        default=BYTES,
        help="bytes (default), or MODULE:FUNCTION, a function that returns the tokens of a text",
    )
    build.add_argument(
        "--vocabulary", type=int, help="number of different tokens (for bytes 256, or more with --end-of-document)"
    )
    build.add_argument("--end-of-document", type=int, metavar="TOKEN", help="a token to add after every document")
    build.add_argument(
        "--workers",
        type=int,
        default=1,
        help="number of processes that tokenize (default: 1); the file is the same for any number",
    )
    build.add_argument("--lines", action="store_true", help="every line is one document; line ends are left out")
    build.add_argument("--force", action="store_true", help="replace an existing file")
    show = actions.add_parser(
        "show", help="show what a token file contains", description="Show what a token file contains."
    )
    show.add_argument("file", type=Path)
    show.add_argument("--verify", action="store_true", help="read the whole file and verify its checksum")
    return parser
