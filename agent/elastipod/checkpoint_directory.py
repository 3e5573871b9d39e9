"""The checkpoint directory: names, claims, manifests, and which of its entries may be trusted. No torch.

A checkpoint exists from the moment its directory is renamed into place, and never before. Every generation puts down a
claim; a commit is refused once a newer claim is there, so a rank that lost touch with its job cannot overwrite the work
of its successors (docs/design/contracts.md, 6).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastipod.errors import CheckpointError, FencedError

FORMAT = 1
MANIFEST = "elastipod.json"
CLAIMS = ".claims"
MAX_MANIFEST_BYTES = 64 << 20
_CHUNK = 4 << 20

_COMPLETE = re.compile(r"step-(\d{10})-gen-(\d{6})")
_TEMPORARY = re.compile(r"\.tmp-step-\d{10}-gen-(\d{6})-[0-9a-f]+")
_CLAIM = re.compile(r"gen-(\d{6,})")
_RUN = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Which checkpoint: completed optimizer steps, then the generation that wrote it. Ordered as resume prefers them."""

    step: int
    generation: int

    @property
    def name(self) -> str:
        return f"step-{self.step:010d}-gen-{self.generation:06d}"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file of a checkpoint must be: its length in bytes and its CRC-32, eight hex digits."""

    size: int
    crc32: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of elastipod.json. files: by name, the manifest itself excepted; extra: the user's own values."""

    id: CheckpointId
    world_size: int
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "step": self.id.step,
                "generation": self.id.generation,
                "world_size": self.world_size,
                "files": {name: {"size": file.size, "crc32": file.crc32} for name, file in sorted(self.files.items())},
                "extra": dict(self.extra),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest. Raises ValueError, KeyError or TypeError when it is none of ours."""
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, this library reads {FORMAT}")
        files = {name: FileRecord(int(file["size"]), str(file["crc32"])) for name, file in data["files"].items()}
        for name in files:
            if name in (".", "..") or os.path.basename(name) != name:
                raise ValueError(f"it names the file {name!r} outside its own directory")
        return cls(
            CheckpointId(int(data["step"]), int(data["generation"])),
            int(data["world_size"]),
            files,
            dict(data["extra"]),
        )


class CheckpointDirectory:
    """One directory of checkpoints, as one generation's rank 0 sees and changes it. Reading is for any rank."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    # -- claims --------------------------------------------------------------------------------------------------

    def claim(self, generation: int | None, run: str = "") -> int:
        """Take the directory for a generation, the next free one where None is given, and return its number here.

        run: identity of the job. A job that was deleted and applied again counts its generations from 1 anew: here they go
        on after those of the former job. Claiming the newest claim again is harmless. Raises FencedError when a newer
        generation or another job has claimed since, and CheckpointError when the directory holds somebody else's checkpoint.
        """
        self._refuse_foreign()
        (self.path / CLAIMS).mkdir(parents=True, exist_ok=True)
        if generation is None:
            return self._claim_next()
        number = generation + self._offset(run) if run else generation
        self.check_fence(number)
        self._claim_path(number).write_text(run, encoding="utf-8")
        sync_directory(self.path / CLAIMS)
        return number

    def _offset(self, run: str) -> int:
        """Give what is added to the generations of a job in this directory: what had been claimed when it first came."""
        if not _RUN.fullmatch(run):
            raise CheckpointError(f"the job's identity {run!r} is not made of letters, digits, '.', '_' and '-'")
        marker = self.path / CLAIMS / f"run-{run}"
        newest = self.newest_claim()
        if not marker.exists():
            temporary = marker.with_name(f".{marker.name}-{secrets.token_hex(4)}")
            temporary.write_text(str(newest), encoding="utf-8")
            os.rename(temporary, marker)
            return newest
        if newest and self._claim_path(newest).read_text(encoding="utf-8") not in (run, ""):
            raise FencedError(f"another job has taken over {self.path}; give each job a directory of its own")
        return int(marker.read_text(encoding="utf-8"))

    def check_fence(self, generation: int) -> None:
        """Raise FencedError when a generation newer than this one has claimed the directory."""
        newest = self.newest_claim()
        if newest > generation:
            raise FencedError(
                f"generation {newest} has taken over {self.path}; this process belongs to generation {generation} and must stop"
            )

    def newest_claim(self) -> int:
        """Give the highest generation that claimed the directory, 0 for none."""
        claims = self.path / CLAIMS
        names = os.listdir(claims) if claims.is_dir() else []
        return max((int(found[1]) for found in map(_CLAIM.fullmatch, names) if found), default=0)

    def _claim_next(self) -> int:
        while True:
            generation = self.newest_claim() + 1
            try:
                self._claim_path(generation).touch(exist_ok=False)
            except FileExistsError:
                continue  # another job began at the same moment: the next number is ours
            sync_directory(self.path / CLAIMS)
            return generation

    def _claim_path(self, generation: int) -> Path:
        return self.path / CLAIMS / f"gen-{generation:06d}"

    def _refuse_foreign(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a directory; name a directory for checkpoints")
        if (self.path / ".metadata").exists() or (self.path / MANIFEST).exists():
            raise CheckpointError(
                f"{self.path} is itself one checkpoint, not a directory of checkpoints; name an empty directory or its parent"
            )

    # -- writing -------------------------------------------------------------------------------------------------

    def begin(self, target: CheckpointId) -> Path:
        """Make the hidden directory that a checkpoint is written in. Raises FencedError."""
        self.check_fence(target.generation)
        path = self.path / f".tmp-{target.name}-{secrets.token_hex(4)}"
        path.mkdir(parents=True)
        return path

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Let a written checkpoint appear, by one rename, after its manifest is on disk. Raises FencedError."""
        with open(temporary / MANIFEST, "x", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        sync_directory(temporary)
        self.check_fence(manifest.id.generation)
        final = self.path / manifest.id.name
        try:
            os.rename(temporary, final)
        except OSError as error:
            raise CheckpointError(
                f"cannot commit {final}: {error.strerror}; move what is there out of the way"
            ) from error
        sync_directory(self.path)
        return final

    def prune(self, generation: int, keep: int, damaged: Iterable[CheckpointId] = ()) -> None:
        """Delete all but the ``keep`` newest checkpoints, those known as damaged, and what dead writers left behind.

        Newest is by generation, then step: the present lineage outlives what a former one left. A fenced generation
        deletes nothing (FencedError).
        """
        self.check_fence(generation)
        spoilt = set(damaged)
        intact = sorted(set(self.complete()) - spoilt, key=lambda each: (each.generation, each.step), reverse=True)
        for old in [*intact[keep:], *spoilt]:
            self._delete(old)
        for name in os.listdir(self.path):
            found = _TEMPORARY.fullmatch(name)
            if found and int(found[1]) <= generation:
                shutil.rmtree(self.path / name, ignore_errors=True)
        for name in os.listdir(self.path / CLAIMS):
            found = _CLAIM.fullmatch(name)
            if found and int(found[1]) < generation:
                (self.path / CLAIMS / name).unlink(missing_ok=True)

    def _delete(self, old: CheckpointId) -> None:
        """Hide first, then delete: a half-deleted checkpoint is never seen under its name."""
        hidden = self.path / f".tmp-{old.name}-{secrets.token_hex(4)}"
        try:
            os.rename(self.path / old.name, hidden)
        except FileNotFoundError:
            return
        shutil.rmtree(hidden, ignore_errors=True)

    # -- reading -------------------------------------------------------------------------------------------------

    def complete(self) -> list[CheckpointId]:
        """List the checkpoints that were committed, freshest first."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        found = [match for match in map(_COMPLETE.fullmatch, names) if match]
        return sorted((CheckpointId(int(match[1]), int(match[2])) for match in found), reverse=True)

    def manifest(self, of: CheckpointId) -> Manifest:
        """Read a checkpoint's manifest. Raises CheckpointError, saying what is wrong, for a torn or foreign one."""
        path = self.path / of.name / MANIFEST
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes; it is no manifest of ours")
            manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path.parent} has no {MANIFEST}: it is torn or was made by something else"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error
        if manifest.id != of:
            raise CheckpointError(f"{path} describes {manifest.id.name}: the directory was renamed")
        return manifest

    def problems(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Read the named files of a checkpoint and say, one sentence each, what is not as the manifest has it."""
        folder = self.path / manifest.id.name
        return [text for name in names if (text := _problem(folder / name, manifest.files[name]))]


def record_file(path: Path) -> FileRecord:
    """Measure a file: length and CRC-32."""
    size = checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return FileRecord(size, f"{checksum:08x}")


def sync_directory(path: Path) -> None:
    """Have the directory's entries on disk, so that a rename or a new name survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _problem(path: Path, wanted: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
        if size != wanted.size:
            return f"{path} has {size} bytes, its manifest says {wanted.size}"
        found = record_file(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found.crc32 != wanted.crc32:
        return f"{path} has checksum {found.crc32}, its manifest says {wanted.crc32}"
    return None
