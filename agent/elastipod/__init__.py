"""Elastipod's training library: elastic events, checkpoints, data and batches for PyTorch jobs whose size changes.

Importing the package costs nothing and imports no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastipod.batches.fixed_order import exact_sum as exact_sum
    from elastipod.batches.fixed_order import fixed_order_passes as fixed_order_passes
    from elastipod.batches.rates import BatchScaledRate as BatchScaledRate
    from elastipod.batches.rates import rate_factor as rate_factor
    from elastipod.batches.recipes import ElasticRecipe as ElasticRecipe
    from elastipod.batches.sizes import BatchPlan as BatchPlan
    from elastipod.batches.sizes import UnevenBatch as UnevenBatch
    from elastipod.batches.sizes import plan_batch as plan_batch
    from elastipod.batches.sizes import world_sizes as world_sizes
    from elastipod.checkpoint import CheckpointManager as CheckpointManager
    from elastipod.checkpoint import Resume as Resume
    from elastipod.checkpoint.hyperpod_functions import load_checkpoint as load_checkpoint
    from elastipod.checkpoint.hyperpod_functions import save_checkpoint as save_checkpoint
    from elastipod.data import Batch as Batch
    from elastipod.data import ElasticBatches as ElasticBatches
    from elastipod.data.batch_cache import BatchCache as BatchCache
    from elastipod.data.loader import ElasticBatchSampler as ElasticBatchSampler
    from elastipod.data.loader import ElasticLoader as ElasticLoader
    from elastipod.data.mixture import Mixture as Mixture
    from elastipod.data.sharded import ShardReader as ShardReader
    from elastipod.data.sharded import Shards as Shards
    from elastipod.data.sharded import shard_lengths as shard_lengths
    from elastipod.data.tokens import TokenFile as TokenFile
    from elastipod.data.tokens import TokenWindows as TokenWindows
    from elastipod.elastic import elastic_event_detected as elastic_event_detected
    from elastipod.errors import ElastipodError as ElastipodError
    from elastipod.gradients import accumulate as accumulate
    from elastipod.gradients import gradient_sync as gradient_sync
    from elastipod.moments import optimizer_norm as optimizer_norm
    from elastipod.progress import report as report
    from elastipod.sample_log import SampleLog as SampleLog

_HOME = {
    "Batch": "data",
    "BatchCache": "data.batch_cache",
    "BatchPlan": "batches.sizes",
    "BatchScaledRate": "batches.rates",
    "CheckpointManager": "checkpoint",
    "ElasticBatchSampler": "data.loader",
    "ElasticBatches": "data",
    "ElasticLoader": "data.loader",
    "ElasticRecipe": "batches.recipes",
    "ElastipodError": "errors",
    "Mixture": "data.mixture",
    "Resume": "checkpoint",
    "SampleLog": "sample_log",
    "ShardReader": "data.sharded",
    "Shards": "data.sharded",
    "TokenFile": "data.tokens",
    "TokenWindows": "data.tokens",
    "UnevenBatch": "batches.sizes",
    "accumulate": "gradients",
    "elastic_event_detected": "elastic",
    "exact_sum": "batches.fixed_order",
    "fixed_order_passes": "batches.fixed_order",
    "gradient_sync": "gradients",
    "load_checkpoint": "checkpoint.hyperpod_functions",
    "optimizer_norm": "moments",
    "plan_batch": "batches.sizes",
    "rate_factor": "batches.rates",
    "report": "progress",
    "save_checkpoint": "checkpoint.hyperpod_functions",
    "shard_lengths": "data.sharded",
    "world_sizes": "batches.sizes",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'elastipod' has no attribute {name!r}; it exports {', '.join(sorted(_HOME))}")
    value: object = getattr(import_module(f"elastipod.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazily loaded names beside those already there."""
    return sorted({*globals(), *_HOME})
