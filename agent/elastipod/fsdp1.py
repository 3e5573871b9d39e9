"""The refusal of FSDP1, torch's first fully sharded wrapper, whose shards cannot be loaded at another world size safely."""

from __future__ import annotations

import sys
from typing import Any

from elastipod.errors import FrameworkError

WAY_OUT = "shard it with FSDP2 instead: torch.distributed.fsdp.fully_shard(model)"


def refuse_fsdp1(model: Any) -> None:
    """Raise FrameworkError when ``model``, or a module in it, is a FullyShardedDataParallel. Any rank; no collective."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(model, "modules"):
        return
    if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise FrameworkError(
            f"the model is wrapped by FullyShardedDataParallel (FSDP1), which cannot be resumed at every world size; {WAY_OUT}"
        )


def refuse_fsdp1_wrapper(wrap: Any) -> None:
    """Raise FrameworkError when ``wrap`` is FullyShardedDataParallel, or a `functools.partial` of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and getattr(wrap, "func", wrap) is fsdp.FullyShardedDataParallel:
        raise FrameworkError(
            f"wrap is FullyShardedDataParallel (FSDP1), which cannot be resumed at every world size; {WAY_OUT}"
        )
