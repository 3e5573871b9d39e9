"""The folder in a memory file system that holds the memory images of one job on one node."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elastipod.checkpoint.image import MappedImage, log
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.save_plan import SavePlan

SLOTS = 2
STALE_AFTER_S = 3 * 86_400.0  # folders of jobs that have not saved for this long are deleted
# A plan is there before the header that refers to it; a process of an older generation may list the folder in between.
PLAN_MIN_AGE_S = 60.0
MEMORY_ENV = "ELASTIPOD_MEMORY_DIR"
DEFAULT_ROOT = "/dev/shm"  # noqa: S108  # a memory file system
_FOLDER = "elastipod-images-"
_HEADER = re.compile(r"image-gen-(\d{6,})-rank-(\d{5,})-slot-(\d)\.json")
_OF_IMAGE = re.compile(r"\.?(image-gen-(\d+)-rank-\d+-slot-\d)\..*")
_MAX_HEADER_BYTES = 64 << 20
_MAX_PLAN_BYTES = 1 << 30


class MemoryDirectory:
    """The images of one job on one node, shared by the ranks there. Readable by this user only."""

    def __init__(self, root: str | os.PathLike[str], job: str) -> None:
        """Create the folder of a job; ``job`` is any identity of it. Raises OSError."""
        self.path = Path(root) / f"{_FOLDER}{hashlib.sha256(job.encode()).hexdigest()[:20]}"
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(self.path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{self.path} belongs to somebody else")

    def node(self) -> str:
        """Return the identity of this memory: equal in all processes that share it, and in no others."""
        found = os.stat(self.path)
        return hashlib.sha256(f"{host_identity()} {found.st_dev} {found.st_ino}".encode()).hexdigest()[:16]

    def headers(self) -> list[ImageHeader]:
        """List the complete images; unreadable headers are ignored. Raises OSError when the folder cannot be read."""
        found: list[ImageHeader] = []
        for name in os.listdir(self.path):
            match = _HEADER.fullmatch(name)
            if match is None:
                continue
            try:
                if os.stat(self.path / name).st_size <= _MAX_HEADER_BYTES:
                    header = ImageHeader.from_json((self.path / name).read_text(encoding="utf-8"))
                    if f"{header.name}.json" == name:
                        found.append(header)
            except (OSError, ValueError):
                continue  # an image that cannot be read does not exist for us
        return found

    def publish(self, header: ImageHeader) -> None:
        """Make a complete image visible."""
        self._write(f"{header.name}.json", header.to_json())

    def withdraw(self, name: str) -> None:
        """Remove the header of an image, whose bytes may then be overwritten."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def note_durable(self, headers: dict[str, ImageHeader], of: CheckpointId) -> None:
        """Record a newer durable checkpoint in complete images, by name; drop images whose header cannot be written."""
        for name, header in list(headers.items()):
            headers[name] = replace(header, durable=of)
            try:
                self.publish(headers[name])
            except OSError as error:
                log.warning("the memory checkpoint of step %d is dropped: %s", header.id.step, error)
                del headers[name]
                with suppress(OSError):
                    self.withdraw(name)

    def store_plan(self, plan: SavePlan) -> None:
        """Store the plan that images refer to; one that is there is as new as if it had been written again."""
        name = f"plan-{plan.digest}.json"
        try:
            os.utime(self.path / name)
        except FileNotFoundError:
            self._write(name, plan.to_json())

    def plan(self, digest: str) -> SavePlan | None:
        """Return a plan, None if it is missing or does not match its name."""
        try:
            file = self.path / f"plan-{digest}.json"
            plan = (
                SavePlan.from_json(file.read_text(encoding="utf-8")) if file.stat().st_size <= _MAX_PLAN_BYTES else None
            )
        except (OSError, ValueError):
            return None
        return plan if plan is not None and plan.digest == digest else None

    def remove_stale_images(self, keep: Iterable[str], *, older_than: int) -> None:
        """Delete images of generations before ``older_than`` unless named in ``keep``, plans that no image needs, and temporary files.

        Plans of the last minute stay. So does what cannot be deleted, until the next save.
        """
        kept = set(keep)
        try:
            names = os.listdir(self.path)
            needed = {f"plan-{header.plan}.json" for header in self.headers()}
        except OSError:
            return
        for name in names:
            found = _OF_IMAGE.fullmatch(name)
            is_old = found is not None and int(found[2]) < older_than and found[1] not in kept
            with suppress(OSError):
                if is_old or (name.startswith(("plan-", ".plan-")) and name not in needed and self._is_settled(name)):
                    (self.path / name).unlink()

    def _is_settled(self, name: str) -> bool:
        return time.time() - os.stat(self.path / name).st_mtime > PLAN_MIN_AGE_S

    def size_of(self, names: Iterable[str]) -> int:
        """Return the bytes of memory that images occupy, complete or not; missing ones occupy none."""
        size = 0
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(self.path / f"{name}.bin").st_blocks * 512
        return size

    def remove_unfinished(self, names: Iterable[str]) -> None:
        """Free the memory of images that have no header."""
        for name in names:
            if not (self.path / f"{name}.json").exists():
                with suppress(OSError):
                    (self.path / f"{name}.bin").unlink()

    def open(self, header: ImageHeader) -> MappedImage:
        """Open an image to read it. Raises ValueError, with a sentence, when it is missing or too short."""
        path = self.path / f"{header.name}.bin"
        try:
            return MappedImage.open(path, header.size)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}-{secrets.token_hex(4)}"  # pods that share the folder may have equal PIDs
        try:
            temporary.write_text(text, encoding="utf-8")
            os.rename(temporary, self.path / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def memory_root(wanted: str | os.PathLike[str] | bool | None, *, is_in_pod: bool) -> Path | None:
    """Return where images go: ``wanted``, else what the environment names, else /dev/shm in a pod; None for nowhere."""
    if wanted is False:
        return None
    if isinstance(wanted, (str, os.PathLike)):
        return Path(wanted)
    named = os.environ.get(MEMORY_ENV, "")
    if named:
        return Path(named)
    return Path(DEFAULT_ROOT) if wanted or is_in_pod else None


def open_memory_directory(root: Path | None, job: str) -> MemoryDirectory | None:
    """Open the folder of a job; None, with a warning, if that fails: memory checkpoints are optional."""
    if root is None:
        return None
    try:
        directory = MemoryDirectory(root, job)
        _remove_stale_directories(directory)
        return directory
    except OSError as error:
        log.warning("no checkpoints are kept in memory: %s", error)
        return None


def _remove_stale_directories(ours: MemoryDirectory) -> None:
    """Delete the folders of this user's other jobs in the same memory that have not changed for days."""
    for other in ours.path.parent.glob(f"{_FOLDER}*"):
        with suppress(OSError):
            found = other.lstat()
            is_old = time.time() - found.st_mtime > STALE_AFTER_S
            if is_old and other != ours.path and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                shutil.rmtree(other, ignore_errors=True)


def host_identity() -> str:
    """Return what is equal in all containers of one running machine, and in no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else os.uname().nodename
