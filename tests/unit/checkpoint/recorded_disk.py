"""Which files would survive a power loss, by the calls that were made: what was not synced is lost, and so is a new name.

The kernel may write anything back earlier, in any order. So a file is safe only once it was synced after its last change, and
its name only once its folder was. A rename that shows a file or folder to others must come after all of that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class Call:
    """One call. what: "change", "sync", or "show" (a rename or link). source: where a file that is shown was before."""

    what: str
    path: Path
    source: Path | None = None


@dataclass(slots=True)
class RecordedDisk:
    """The calls below a folder, in their order, whatever thread made them."""

    root: Path
    calls: list[Call] = field(default_factory=list)

    def note(self, what: str, path: object, source: object = None) -> None:
        if not isinstance(path, str | os.PathLike):
            return
        where = Path(os.fspath(path))
        if where.is_relative_to(self.root):
            self.calls.append(Call(what, where, None if source is None else Path(os.fspath(source))))  # type: ignore[call-overload]

    def shown(self) -> list[Call]:
        """Give what became visible under a name that others read; hidden names are drafts and what is being deleted."""
        return [call for call in self.calls if call.what == "show" and not call.path.name.startswith(".")]

    def lost_at(self, show: Call) -> list[str]:
        """Name what a power loss right after a rename could lose of the file or folder that it shows."""
        assert show.source is not None
        before = self.calls[: self.calls.index(show)]
        changed = {call.path for call in before if call.what == "change" and call.path.is_relative_to(show.source)}
        lost = [f"content of {path.name}" for path in sorted(changed) if not _is_synced(path, before)]
        if changed - {show.source} and not _is_synced(show.source, before, changed):
            lost.append(f"names in {show.source.name}")
        return lost

    def is_kept_at_the_end(self, show: Call) -> bool:
        """Whether the name itself was synced by the end of the recording."""
        after = self.calls[self.calls.index(show) :]
        return Call("sync", show.path.parent) in after

    def is_synced(self, path: Path, *, before: Call | None = None) -> bool:
        """Whether a file was synced after its last change before a call, or before the end."""
        return _is_synced(path, self.calls if before is None else self.calls[: self.calls.index(before)])

    def is_synced_after(self, path: Path, call: Call, *, before: Call | None = None) -> bool:
        """Whether a folder was synced between two calls, or between one and the end."""
        end = len(self.calls) if before is None else self.calls.index(before)
        return Call("sync", path) in self.calls[self.calls.index(call) : end]


def _is_synced(path: Path, calls: list[Call], changed: set[Path] | None = None) -> bool:
    """Whether a file was synced after its last change, or a folder after the last change of what it holds."""
    last = max(
        (n for n, call in enumerate(calls) if call.what == "change" and call.path in (changed or {path})), default=-1
    )
    return any(call.what == "sync" and call.path == path for call in calls[last + 1 :])


_recording: list[RecordedDisk] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    for disk in _recording:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            disk.note("change", arguments[0])
        elif event in ("os.rename", "os.link"):
            disk.note("show", arguments[1], arguments[0])


@contextmanager
def recorded_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedDisk]:
    """Record what happens below a folder until the end of the block."""
    if not getattr(sys, "_elastipod_hook", False):
        sys.addaudithook(_hook)  # cannot be taken back
        sys._elastipod_hook = True  # type: ignore[attr-defined]
    disk = RecordedDisk(root)
    fsync, write = os.fsync, os.write

    def path_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def noted_sync(descriptor: int) -> None:
        fsync(descriptor)
        disk.note("sync", path_of(descriptor))

    def noted_write(descriptor: int, data: bytes) -> int:
        disk.note("change", path_of(descriptor))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted_sync)
        patch.setattr(os, "write", noted_write)
        _recording.append(disk)
        try:
            yield disk
        finally:
            _recording.remove(disk)
