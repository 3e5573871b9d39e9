"""The arguments of `State`, checked before anything is built. Each error names the argument, its value, and what it must be."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import nn

from elastipod.checkpoint.save_arguments import check_keep
from elastipod.data import ElasticBatches
from elastipod.data.sources import as_int
from elastipod.fsdp1 import refuse_fsdp1_wrapper
from elastipod.in_memory.shard_copies import Copies
from elastipod.value_words import value_or_kind


def check_build(build: object, *, takes_mesh: bool) -> None:
    """Raise TypeError for what cannot be called as `State` calls it."""
    if not _is_function(build):
        raise TypeError(
            f"build is {value_or_kind(build)}; it must be a function that returns the model and the optimizer"
        )
    if takes_mesh and not _takes(build, 1):
        raise TypeError("build takes no argument; with mesh=, State calls build(mesh)")
    if not takes_mesh and not _takes(build, 0):
        raise TypeError("build needs an argument; State calls build() without one, unless mesh= is given")


def check_apply(apply: object) -> None:
    """Raise TypeError for what cannot be called as ``apply(state)``."""
    if apply is None:
        return
    if not _is_function(apply):
        raise TypeError(f"apply is {value_or_kind(apply)}; it must be a function, which is called as apply(state)")
    if not _takes(apply, 1):
        raise TypeError("apply takes no argument; State calls apply(state)")


def check_wrap(wrap: object, *, has_mesh: bool) -> None:
    """Raise ValueError beside a mesh, TypeError for what cannot wrap a model, and FrameworkError for FSDP1."""
    if wrap is None:
        return
    if has_mesh:
        raise ValueError("mesh and wrap exclude each other: with a mesh, build gives the model as it trains")
    if not _is_function(wrap):
        raise TypeError(
            f"wrap is {value_or_kind(wrap)}; it must be a function of the model, such as DistributedDataParallel"
        )
    refuse_fsdp1_wrapper(wrap)


def check_copies(copies: object, *, has_mesh: bool) -> None:
    """Raise TypeError for something else, and ValueError where there is nothing to copy."""
    if copies is None:
        return
    if not isinstance(copies, Copies):
        raise TypeError(f"copies is {value_or_kind(copies)}; it must be a Copies, such as Copies(memory_bytes=8 << 30)")
    if not has_mesh:
        raise ValueError("copies= needs mesh=: replicated state needs no copies, every rank has all of it")


def check_storage(checkpoints: object, every: Any, keep: Any, sample_log: object) -> None:
    """Raise TypeError or ValueError for what says where checkpoints and logs go, how often steps are saved, and how many are kept."""
    _check_folder("checkpoints", checkpoints, "a folder or an address")
    _check_folder("sample_log", sample_log, "a folder")
    steps, kept = as_int("checkpoint_every", every), as_int("keep", keep)
    if steps < 0:
        raise ValueError(
            f"checkpoint_every is {steps}; it must be a number of steps, or 0 for none while training runs"
        )
    if checkpoints is not None:
        check_keep(kept, None)
    elif steps:
        raise ValueError(f"checkpoint_every is {steps}, but checkpoints= is not given; name the folder for them")


def _check_folder(name: str, folder: object, wanted: str) -> None:
    if folder is None:
        return
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{name} is {value_or_kind(folder)}; it must be {wanted}")
    if not os.fspath(folder):
        raise ValueError(f"{name} is {folder!r}; it must be {wanted}")


def check_groups(backend: object, timeout: object) -> None:
    """Raise TypeError for what init_process_group would not take."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f'backend is {value_or_kind(backend)}; it must be a text, such as "nccl"')
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is {value_or_kind(timeout)}; it must be a timedelta, such as timedelta(minutes=30)")


def check_plan(plan: object) -> None:
    """Raise TypeError for what is no plan of the data."""
    if not isinstance(plan, ElasticBatches):
        raise TypeError(
            f"plan is {value_or_kind(plan)}; it must be an ElasticBatches, such as ElasticBatches(len(dataset), global_batch)"
        )


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, nn.Module)


def _takes(function: Any, number: int) -> bool:
    """Whether a function can be called with so many arguments. Some functions of C do not tell; they are tried."""
    call: Callable[..., object] = function
    try:
        signature = inspect.signature(call)
    except (ValueError, TypeError):
        return True
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True
