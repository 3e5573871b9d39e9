"""Elastipod's training library: elastic events, checkpoints, data and batches for PyTorch jobs whose size changes.

Importing the package costs nothing and imports no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastipod.checkpoint import CheckpointManager as CheckpointManager
    from elastipod.checkpoint import Resume as Resume
    from elastipod.data import Batch as Batch
    from elastipod.data import ElasticBatches as ElasticBatches
    from elastipod.elastic import elastic_event_detected as elastic_event_detected
    from elastipod.errors import ElastipodError as ElastipodError
    from elastipod.gradients import gradient_sync as gradient_sync
    from elastipod.moments import optimizer_norm as optimizer_norm
    from elastipod.progress import report as report
    from elastipod.sample_log import SampleLog as SampleLog

_HOME = {
    "Batch": "data",
    "CheckpointManager": "checkpoint",
    "ElasticBatches": "data",
    "ElastipodError": "errors",
    "Resume": "checkpoint",
    "SampleLog": "sample_log",
    "elastic_event_detected": "elastic",
    "gradient_sync": "gradients",
    "optimizer_norm": "moments",
    "report": "progress",
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
