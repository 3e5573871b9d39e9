"""Files that receive a copy of worker output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class LogFile:
    """One file, written by the output thread. A full disk costs parts of the copy, never of the stream."""

    def __init__(self, path: Path, *, is_new: bool = True) -> None:
        """Open the file, and empty it if ``is_new``. Raises OSError."""
        self._path = path
        self._fd = os.open(path, _APPEND | (os.O_TRUNC if is_new else 0), 0o644)
        self._has_failed = False

    def write(self, data: bytes) -> str:
        """Append; gives a sentence the first time that something cannot be written, else ""."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                return f"{self._path} lacks lines from now on: {error.strerror}"
        return ""

    def close(self) -> str:
        """Close the file; gives a sentence if data that seemed to be written is lost, as NFS tells only now, else ""."""
        try:
            os.close(self._fd)
        except OSError as error:
            return f"{self._path} lacks lines: {error.strerror}"
        return ""


class FilteredCopy:
    """Copies the lines of a stream that contain one of the filters; several streams may share its file."""

    def __init__(self, file: LogFile, filters: Sequence[str]) -> None:
        self._file = file
        self._filters = [text.encode() for text in filters]

    def take(self, lines: bytes) -> str:
        """Add complete lines with prefixes; gives a sentence as `LogFile.write` does."""
        if not any(text in lines for text in self._filters):
            return ""
        kept = [line for line in lines.splitlines(keepends=True) if any(text in line for text in self._filters)]
        return self._file.write(b"".join(kept))

    def close(self) -> str:
        """Close the file; gives a sentence as `LogFile.close` does."""
        return self._file.close()
