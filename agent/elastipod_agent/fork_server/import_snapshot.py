"""Detects that the modules which the fork server has imported have changed on disk.

A pre-train script may install packages, and a mounted directory may change. The check runs before each fork and compares names, times and
sizes; it reads no file.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType

_SITE_NAMES = ("site-packages", "dist-packages")
_MODULE_ENDINGS = (".py", ".pyc", ".so")


@dataclass(frozen=True, slots=True)
class ImportSnapshot:
    """What was imported: directories of sys.path with their relevant names, and files with their times and sizes."""

    names: frozenset[str]
    folders: Mapping[str, frozenset[str]]
    files: Mapping[str, tuple[int, ...]]

    @classmethod
    def now(cls, paths: Sequence[str], whole: Collection[str]) -> ImportSnapshot:
        """Record what this process has imported. paths: all searched directories; whole: packages of which every file counts."""
        top = {name for name in list(sys.modules) if "." not in name}
        names = frozenset(top.union(name.partition(".")[0] for name in whole))
        files = {file for name, module in list(sys.modules.items()) for file in _files_of(name, module, whole)}
        stdlib = os.path.join(sysconfig.get_path("stdlib"), "")
        is_stdlib = {file for file in files if file.startswith(stdlib) and "site-packages" not in file}
        return cls(names, {path: _folder(path, names) for path in paths}, {f: _stat(f) for f in files - is_stdlib})

    def changed(self) -> str | None:
        """Say what has changed, None if nothing has."""
        for path, seen in self.folders.items():
            different = seen.symmetric_difference(_folder(path, self.names))
            if different:
                return f"{os.path.join(path, min(different))} was added or removed"
        return next((f"{file} has changed" for file, seen in self.files.items() if _stat(file) != seen), None)


def _files_of(name: str, module: ModuleType | None, whole: Collection[str]) -> list[str]:
    """Give the file of a module, and of a package its directory too; submodules only for packages of which every file counts."""
    file = getattr(module, "__file__", None)
    top, _, rest = name.partition(".")
    if not isinstance(file, str) or not os.path.isabs(file) or (rest and top not in whole):
        return []
    return [file, os.path.dirname(file)] if hasattr(module, "__path__") and not rest else [file]


def _stat(path: str) -> tuple[int, ...]:
    with suppress(OSError):
        seen = os.stat(path)
        return (seen.st_ino, seen.st_mtime_ns, seen.st_size)
    return ()


def _folder(path: str, names: frozenset[str]) -> frozenset[str]:
    """Give the relevant names of a directory: all in a site-packages directory, else only the names of imported modules.

    A directory of the user may also receive logs and checkpoints, which do not matter.
    """
    try:
        found = os.listdir(path or ".")
    except OSError:
        return frozenset()
    if os.path.basename(path) in _SITE_NAMES or any(name.endswith(".dist-info") for name in found):
        return frozenset(found) - {"__pycache__"}
    stems = ((name, *name.partition(".")) for name in found)
    return frozenset(
        name for name, stem, dot, _ in stems if stem in names and (not dot or name.endswith(_MODULE_ENDINGS))
    )
