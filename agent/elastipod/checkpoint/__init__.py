"""Checkpoints of model, optimizer, schedule and random state that can be resumed on any number of ranks.

`CheckpointManager` is the entry point; docs/design/checkpoints.md describes the design. Importing this package imports no
torch: each name below is loaded when it is first used, and the modules on stores, manifests and plans work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastipod.checkpoint.export import export_weights as export_weights
    from elastipod.checkpoint.manager import CheckpointManager as CheckpointManager
    from elastipod.checkpoint.resume import Resume as Resume

_HOME = {"CheckpointManager": "manager", "Resume": "resume", "export_weights": "export"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(
            f"module 'elastipod.checkpoint' has no attribute {name!r}; it exports {', '.join(__all__)}"
        )
    value: object = getattr(import_module(f"elastipod.checkpoint.{_HOME[name]}"), name)
    globals()[name] = value
    return value
