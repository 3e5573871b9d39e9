"""Elastipod's training library: elastic events, checkpoints, data and batches for PyTorch jobs whose size changes.

Importing the package costs nothing and imports no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastipod.audit.moments import optimizer_norm as optimizer_norm
    from elastipod.audit.sample_log import SampleLog as SampleLog
    from elastipod.batches.batch_plan import BatchPlan as BatchPlan
    from elastipod.batches.batch_plan import UnevenBatch as UnevenBatch
    from elastipod.batches.batch_plan import plan_batch as plan_batch
    from elastipod.batches.batch_plan import world_sizes as world_sizes
    from elastipod.batches.learning_rate import BatchScaledRate as BatchScaledRate
    from elastipod.batches.learning_rate import rate_factor as rate_factor
    from elastipod.batches.recipes import ElasticRecipe as ElasticRecipe
    from elastipod.checkpoint import CheckpointManager as CheckpointManager
    from elastipod.checkpoint import Resume as Resume
    from elastipod.checkpoint.hyperpod_functions import load_checkpoint as load_checkpoint
    from elastipod.checkpoint.hyperpod_functions import save_checkpoint as save_checkpoint
    from elastipod.data import Batch as Batch
    from elastipod.data import ElasticBatches as ElasticBatches
    from elastipod.data.batch_cache import BatchCache as BatchCache
    from elastipod.data.loader import ElasticBatchSampler as ElasticBatchSampler
    from elastipod.data.loader import ElasticLoader as ElasticLoader
    from elastipod.data.megatron import MegatronTokens as MegatronTokens
    from elastipod.data.mixture import Mixture as Mixture
    from elastipod.data.shards import ShardReader as ShardReader
    from elastipod.data.shards import Shards as Shards
    from elastipod.data.shards import shard_lengths as shard_lengths
    from elastipod.data.stream_lanes import StreamLanes as StreamLanes
    from elastipod.data.tokens import TokenFile as TokenFile
    from elastipod.data.tokens import TokenWindows as TokenWindows
    from elastipod.elastic_event import elastic_event_detected as elastic_event_detected
    from elastipod.errors import BatchSizeError as BatchSizeError
    from elastipod.errors import CheckpointError as CheckpointError
    from elastipod.errors import DataError as DataError
    from elastipod.errors import ElasticAgreementError as ElasticAgreementError
    from elastipod.errors import ElasticAgreementTimeout as ElasticAgreementTimeout
    from elastipod.errors import ElastipodError as ElastipodError
    from elastipod.errors import FencedError as FencedError
    from elastipod.errors import FrameworkError as FrameworkError
    from elastipod.errors import RecipeError as RecipeError
    from elastipod.errors import SampleLogError as SampleLogError
    from elastipod.errors import StateDiffersError as StateDiffersError
    from elastipod.errors import UnusableLogsError as UnusableLogsError
    from elastipod.gradients import accumulate as accumulate
    from elastipod.gradients import accumulate_padded as accumulate_padded
    from elastipod.gradients import gradient_sync as gradient_sync
    from elastipod.in_memory.elastic_state import State as State
    from elastipod.in_memory.elastic_state import steps as steps
    from elastipod.in_memory.shard_copies import Copies as Copies
    from elastipod.mesh import build_mesh as build_mesh
    from elastipod.mesh import data_parallel as data_parallel
    from elastipod.mesh import reads_data as reads_data
    from elastipod.parallelism import Parallelism as Parallelism
    from elastipod.progress import report as report
    from elastipod.recipes.present_config import present_config as present_config
    from elastipod.testing.fixed_order import exact_sum as exact_sum
    from elastipod.testing.fixed_order import fixed_order_passes as fixed_order_passes
    from elastipod.worker_file import WorkerFileError as WorkerFileError

_ERRORS = (
    "BatchSizeError",
    "CheckpointError",
    "DataError",
    "ElasticAgreementError",
    "ElasticAgreementTimeout",
    "ElastipodError",
    "FencedError",
    "FrameworkError",
    "RecipeError",
    "SampleLogError",
    "StateDiffersError",
    "UnusableLogsError",
)
_HOME = {
    **dict.fromkeys(_ERRORS, "errors"),
    "WorkerFileError": "worker_file",
    "Batch": "data",
    "BatchCache": "data.batch_cache",
    "BatchPlan": "batches.batch_plan",
    "BatchScaledRate": "batches.learning_rate",
    "CheckpointManager": "checkpoint",
    "Copies": "in_memory.shard_copies",
    "ElasticBatchSampler": "data.loader",
    "ElasticBatches": "data",
    "ElasticLoader": "data.loader",
    "ElasticRecipe": "batches.recipes",
    "MegatronTokens": "data.megatron",
    "Mixture": "data.mixture",
    "Parallelism": "parallelism",
    "Resume": "checkpoint",
    "SampleLog": "audit.sample_log",
    "ShardReader": "data.shards",
    "Shards": "data.shards",
    "State": "in_memory.elastic_state",
    "StreamLanes": "data.stream_lanes",
    "TokenFile": "data.tokens",
    "TokenWindows": "data.tokens",
    "UnevenBatch": "batches.batch_plan",
    "accumulate": "gradients",
    "accumulate_padded": "gradients",
    "build_mesh": "mesh",
    "data_parallel": "mesh",
    "elastic_event_detected": "elastic_event",
    "exact_sum": "testing.fixed_order",
    "fixed_order_passes": "testing.fixed_order",
    "gradient_sync": "gradients",
    "load_checkpoint": "checkpoint.hyperpod_functions",
    "optimizer_norm": "audit.moments",
    "plan_batch": "batches.batch_plan",
    "present_config": "recipes.present_config",
    "rate_factor": "batches.learning_rate",
    "reads_data": "mesh",
    "report": "progress",
    "save_checkpoint": "checkpoint.hyperpod_functions",
    "shard_lengths": "data.shards",
    "steps": "in_memory.elastic_state",
    "world_sizes": "batches.batch_plan",
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
