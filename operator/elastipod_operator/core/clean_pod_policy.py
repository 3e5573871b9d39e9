"""The field cleanPodPolicy. It has a file of its own so that `core` does not load the models, and with them pydantic."""

from __future__ import annotations

from enum import StrEnum


class CleanPodPolicy(StrEnum):
    """Which pods are deleted when a job has ended."""

    ALL = "All"
    RUNNING = "Running"
    ONLY_COMPLETE = "OnlyComplete"
    NONE = "None"
