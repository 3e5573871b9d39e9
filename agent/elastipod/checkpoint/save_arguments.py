"""The arguments of a manager and of a save, checked before anything is done."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastipod.audit.moments import is_sharded, optimizer_norm
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.live_objects import LiveObjects
from elastipod.checkpoint.store import MAX_STEP, CheckpointStore
from elastipod.errors import CheckpointError
from elastipod.rank_in_world import RankInWorld
from elastipod.rank_ranges import format_ranks

_MAX_STEPS_TOLD = 3


def check_keep(keep: int, keep_every: int | None) -> None:
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every is {keep_every}; it is a number of steps, at least 1")


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
    if step > MAX_STEP:
        raise ValueError(
            f"step is {step}; names of checkpoints have room for steps up to {MAX_STEP}: count optimizer steps, and keep numbers of "
            "tokens in extra"
        )


def plain_values(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra must hold JSON values only (numbers, texts, lists, dictionaries): {error}"
        ) from error
    return values


def check_logs(have: Sequence[bool]) -> None:
    """Raise CheckpointError where only some ranks have a sample log: a save waits for all ranks to sync theirs."""
    without = [rank for rank, has_log in enumerate(have) if not has_log]
    if without and len(without) < len(have):
        having = [rank for rank, has_log in enumerate(have) if has_log]
        raise CheckpointError(
            f"sample_log was passed on {format_ranks(having)} and not on {format_ranks(without)}; pass one on every rank "
            "(SampleLog(..., writes=False) where another rank logs the samples), or on none"
        )


def check_steps(steps: Sequence[int]) -> None:
    """Raise CheckpointError where ranks save different steps. steps: by rank."""
    ranks_of: dict[int, list[int]] = {}
    for rank, step in enumerate(steps):
        ranks_of.setdefault(step, []).append(rank)
    if len(ranks_of) == 1:
        return
    told = [f"{step} on {format_ranks(ranks)}" for step, ranks in ranks_of.items()]
    if len(told) > _MAX_STEPS_TOLD:
        others = [rank for ranks in list(ranks_of.values())[_MAX_STEPS_TOLD:] for rank in ranks]
        told = [*told[:_MAX_STEPS_TOLD], f"others on {format_ranks(others)}"]
    raise CheckpointError(
        f"save was called with step {', '.join(told[:-1])} and {told[-1]}; pass the same number of completed steps on every rank"
    )


def norm_of_moments(live: LiveObjects) -> Callable[[], float | None]:
    """Return what gives the norm of all optimizers' moments, for the sample log. Collective, now, when state is sharded.

    Else it is computed when it is asked for, and by the first rank alone: the job would wait for each to read its whole state.
    """
    optimizers = live.optimizers.values()
    if any(map(is_sharded, optimizers)):
        found = math.hypot(*map(optimizer_norm, optimizers))
        return lambda: found
    return lambda: None if RankInWorld.current().rank else math.hypot(*map(optimizer_norm, optimizers))
