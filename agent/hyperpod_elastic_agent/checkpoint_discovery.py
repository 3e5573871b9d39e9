"""The import path that existing training scripts use for the kinds of checkpoints they report."""

from elastipod.ipc.protocol import CheckpointType

__all__ = ["CheckpointType"]
