"""The folder that COPY copies from, seen through its .dockerignore."""

import fnmatch
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from elastipod_local.errors import LocalClusterError


class BuildContext:
    """A folder with its .dockerignore; of that file's language plain names, wildcards and a leading **/ are known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ignore = folder / ".dockerignore"
        lines = ignore.read_text().splitlines() if ignore.is_file() else []
        self._ignored = [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]

    def stage(self, sources: list[str], target: Path, line: int) -> str:
        """Copy what the sources of a COPY name into an empty folder and give a hash of names, contents and x bits.

        Raises LocalClusterError with the Dockerfile's line when a source does not exist.
        """
        digest = hashlib.sha256()
        for source in sources:
            found = sorted(self._folder.glob(source.removeprefix("./") or "*"))
            if not found:
                raise LocalClusterError(f"Dockerfile line {line}: {source!r} is not in {self._folder}")
            for path in (file for entry in found for file in self._files(entry)):
                name, content = path.relative_to(self._folder), path.read_bytes()
                mode = 0o755 if os.access(path, os.X_OK) else 0o644
                digest.update(f"{name}\0{mode:o}\0{len(content)}\0".encode() + content)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(content)
                (target / name).chmod(mode)
        for folder in (target, *(entry for entry in target.rglob("*") if entry.is_dir())):
            folder.chmod(0o755)
        return digest.hexdigest()

    def _files(self, entry: Path) -> Iterator[Path]:
        """Give the files of an entry that are not ignored, in a fixed order."""
        if self.ignores(entry.relative_to(self._folder)):
            return
        if entry.is_dir():
            for child in sorted(entry.iterdir()):
                yield from self._files(child)
        else:
            yield entry

    def ignores(self, name: PurePath) -> bool:
        """Tell whether .dockerignore names this path (relative to the context), not one above it."""
        return any(
            name.match(pattern.removeprefix("**/"))
            if pattern.startswith("**/")
            else fnmatch.fnmatch(name.as_posix(), pattern)
            for pattern in self._ignored
        )
