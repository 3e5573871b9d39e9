"""The arguments of a manager and of a save, checked before anything is done."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.resume import Resume as Resume
from elastipod.checkpoint.store import CheckpointStore
from elastipod.errors import CheckpointError

if TYPE_CHECKING:
    pass


def open_store(directory: str | os.PathLike[str], options: Mapping[str, Any]) -> CheckpointStore:
    address = os.fspath(directory)
    if "://" not in address:
        return DirectoryStore(address)
    if address.startswith("file://") and not options:
        return DirectoryStore(address.removeprefix("file://"))
    from elastipod.checkpoint.bucket_store import BucketStore

    return BucketStore(address, options)


def require_step(step: int) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(
            f"step is {step!r}; it is the number of completed optimizer steps, a whole number of at least 0"
        )


def plain_values(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra must hold JSON values only (numbers, texts, lists, dictionaries): {error}"
        ) from error
    return values
