"""Marks in checkpoints that a framework wrote: which of them are complete, and where in the data they continue.

A framework's checkpoint is a folder (or file) that several ranks write, one file after the other, so a crash leaves one that
looks like any other. The mark is written last, after every rank has finished. It holds the size of each file, and no
checkpoint without its mark, or with other sizes, is resumed from. A mark also says which run wrote it: a generation that was
replaced is refused before it overwrites anything.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastipod.checkpoint.agent_report import report_checkpoint
from elastipod.checkpoint.drain import checkpoint_call
from elastipod.checkpoint.save_arguments import open_store
from elastipod.collectives import all_gather_json
from elastipod.errors import CheckpointError, FrameworkError
from elastipod.local_worker import generation_from_env, job_from_env, run_id_from_env
from elastipod.process_restarts import need_not_tell
from elastipod.rank_in_world import RankInWorld
from elastipod.synced_files import create_synced, sync_directory

log = logging.getLogger(__name__)

MARK = "elastipod.json"
CLAIMS = ".elastipod"  # folder in the directory of the checkpoints
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Marked:
    """A complete checkpoint. step: completed optimizer steps; generation, world_size: of the run that saved it.

    data: the position in the data, for `ElasticBatches.resumed`. extra: JSON values of the integration.
    """

    path: Path
    step: int
    generation: int
    world_size: int
    data: Mapping[str, Any]
    extra: Mapping[str, Any]


class _UnreadableError(CheckpointError):
    """Storage does not say whether a checkpoint is complete."""


class MarkedCheckpoints:
    """The checkpoints of one job in a directory that all ranks share. Methods are collective."""

    def __init__(self, directory: str | os.PathLike[str], name: re.Pattern[str], *, adopt: bool = False) -> None:
        """name: of a checkpoint's folder, with the step as its first group. Claims the directory for this generation.

        adopt: take over another job's directory.

        Raises FencedError when a newer generation has claimed it, and CheckpointError when it cannot be used.
        """
        if "://" in os.fspath(directory):
            raise FrameworkError(
                f"{os.fspath(directory)} is an address in an object store, where a framework's checkpoint cannot be marked as "
                "complete; name a directory that all ranks share"
            )
        need_not_tell()
        self.directory = Path(directory)
        self._name = name
        self._store = open_store(self.directory / CLAIMS, {})
        self.generation: int = self._on_rank_0(
            lambda: self._store.claim(generation_from_env(), run_id_from_env(), job=job_from_env(), adopt=adopt)
        )

    def newest(self) -> Marked | None:
        """Give the newest complete checkpoint, None if there is none; what is newer and not complete is named in the log.

        Raises CheckpointError on every rank when storage cannot read a newer one at the moment.
        """
        found = self._on_rank_0(lambda: next((str(each.path) for each in self._complete()), None))
        return _read(Path(found)) if found else None

    def begin(self, path: Path) -> None:
        """Say that ``path`` is about to be written. Raises FencedError on every rank when a newer generation took over."""

        def begin() -> None:
            self._store.check_fence(self.generation)
            (path / MARK).unlink(missing_ok=True)

        self._on_rank_0(begin)

    def finish(self, path: Path, step: int, data: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> None:
        """Mark a checkpoint as complete once every rank has written its part, and tell the agent."""
        place = RankInWorld.current()
        all_gather_json(lambda: None)  # every rank has returned from its save

        def finish() -> None:
            self._store.check_fence(self.generation)
            draft = path / f".{MARK}"
            draft.unlink(missing_ok=True)  # of a process that was killed here; it is no file of the checkpoint
            record = {
                "v": _VERSION,
                "step": step,
                "generation": self.generation,
                "world_size": place.world_size,
                "data": dict(data),
                "extra": dict(extra or {}),
                "files": _synced_sizes(path),
            }
            create_synced(draft, json.dumps(record))
            os.rename(draft, path / MARK)
            sync_directory(path)

        with checkpoint_call():
            self._on_rank_0(finish)
        report_checkpoint(step, str(path))

    def prune(self, keep: int) -> None:
        """Delete all but the ``keep`` newest complete checkpoints, on rank 0. What is not complete stays.

        Raises FencedError on every rank when a newer generation took over.
        """

        def prune() -> None:
            complete: list[Marked] = []
            with suppress(_UnreadableError):  # what is older is deleted when storage can read it
                for each in self._complete():
                    complete.append(each)  # keeps what was found before an error
            for old in complete[keep:]:
                self._store.check_fence(self.generation)
                (old.path / MARK).unlink()  # a checkpoint that is deleted in part is none
                shutil.rmtree(old.path, ignore_errors=True)

        self._on_rank_0(prune)

    def _complete(self) -> Iterator[Marked]:
        """Give the complete checkpoints, newest first. Raises _UnreadableError at one that may be complete or not."""
        names = [match for match in map(self._name.fullmatch, os.listdir(self.directory)) if match]
        is_first = True
        for match in sorted(names, key=lambda match: int(match[1]), reverse=True):
            try:
                found = _read(self.directory / match[0])
            except _UnreadableError:
                raise
            except CheckpointError as error:
                if is_first:
                    log.warning("%s; an older checkpoint is used, if there is one", error)
                continue
            is_first = False
            yield found

    def _on_rank_0(self, action: Any) -> Any:
        """Run ``action`` on rank 0 and give its result, or raise its failure, on every rank."""
        place = RankInWorld.current()
        return all_gather_json(lambda: action() if place.rank == 0 else None)[0]


def _read(path: Path) -> Marked:
    try:
        record = json.loads((path / MARK).read_text(encoding="utf-8"))
        sizes = {name: (path / name).stat().st_size for name in record["files"]}
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"it has no {MARK}" if error.filename == str(path / MARK) else f"{error.filename} is missing"
        raise CheckpointError(
            f"{path} is not resumed from: {what}, so it is torn or was saved without Elastipod"
        ) from None
    except OSError as error:
        raise _UnreadableError(
            f"{path} cannot be read at the moment: {error.strerror or error}; start again when storage answers, or move it away "
            "to resume from the one before"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not resumed from: its {MARK} cannot be read ({error})") from error
    if record["v"] != _VERSION:
        raise CheckpointError(f"{path} has a mark of version {record['v']}; this elastipod knows version {_VERSION}")
    for name, size in record["files"].items():
        if sizes[name] != size:
            raise CheckpointError(
                f"{path} is not resumed from: {name} has {sizes[name]} bytes, but {size} were written"
            )
    return Marked(
        path, int(record["step"]), int(record["generation"]), int(record["world_size"]), record["data"], record["extra"]
    )


def _synced_sizes(path: Path) -> dict[str, int]:
    """Put all files of a checkpoint on disk and give their sizes by relative name."""
    sizes = {}
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            sizes[str(file.relative_to(path))] = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return sizes
