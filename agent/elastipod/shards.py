"""Reading and writing sharded state with torch.distributed.checkpoint, with its failures in our words."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from elastipod.errors import CheckpointError
from elastipod.ranks import rank_and_world

METADATA = ".metadata"  # which tensor is where: written by rank 0 when all ranks have finished


def write_shards(folder: Path, state: dict[str, Any]) -> None:
    """Write this rank's part of ``state`` into a folder, synced to disk. Collective.

    Rank r's files begin with ``__r_``; rank 0 adds METADATA. Raises CheckpointError on every rank when one fails.
    """
    try:
        with _no_process_group_needed():
            save(state, storage_writer=FileSystemWriter(folder), **_options())
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"cannot write the checkpoint {folder}: {error}") from error


def read_shards(folder: Path, state: dict[str, Any]) -> None:
    """Fill ``state`` in place from a folder that any number of ranks wrote. Collective.

    Tensors must have the shapes that were saved. Raises CheckpointError when the state does not fit. The metadata is
    unpickled: verify the files first.
    """
    try:
        with _no_process_group_needed():
            load(state, storage_reader=FileSystemReader(folder), **_options())
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder} does not fit this model and optimizer: {error}") from error


def own_files(folder: Path) -> list[str]:
    """Name the files that this rank's `write_shards` made."""
    rank, _ = rank_and_world()
    names = [path.name for path in folder.glob(f"__{rank}_*")]
    return [*names, METADATA] if rank == 0 else names


def _alone() -> bool:
    return rank_and_world()[1] == 1


def _options() -> dict[str, Any]:
    """Older torches cannot be told that there is one rank only: they look for a process group, and one of one rank does."""
    return {"no_dist": _alone()} if "no_dist" in inspect.signature(save).parameters else {}


@contextmanager
def _no_process_group_needed() -> Iterator[None]:
    """torch warns of a missing process group even where it is told that there is none."""
    if not _alone():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*unavailable or uninitialized")
        yield
