"""What agents say of failed workers, and what they tell instead of the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from elastipod_operator.agents.status import MAX_PROGRESS_BYTES, MAX_WORKER_DATA_BYTES

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Crash:
    """How a worker failed. reason: the agent's word for it. asks: the restart mode that the worker asks for."""

    exitcode: int | None
    signal: str | None
    message: str
    reason: str = "WorkerCrash"
    asks: str = ""
    local_rank: int = 0


class Lie(Enum):
    """What an agent tells instead of the truth."""

    NONSENSE = "nonsense"
    OLDER = "an older generation"
    NEWER = "a newer generation"
    ENORMOUS = "an enormous generation"
    FAULTED = "that workers failed"
    COMPLETED = "that its workers finished"
    STOPPED = "that its workers are stopped"
    DRAINED = "that its workers stand at a checkpoint"
    ENDLESS = "data without end"


LIES: dict[Lie, Callable[[dict[str, Any]], dict[str, Any]]] = {
    Lie.NONSENSE: lambda told: {"status": "dancing"},
    Lie.OLDER: lambda told: {"generation": max(0, told["generation"] - 1)},
    Lie.NEWER: lambda told: {"generation": told["generation"] + 3},
    Lie.ENORMOUS: lambda told: {"generation": 2**53},
    Lie.FAULTED: lambda told: {"status": "faulted", "reason": "WorkerCrash", "message": "a lie"},
    Lie.COMPLETED: lambda told: {"status": "completed"},
    Lie.STOPPED: lambda told: {"status": "ready"},
    Lie.DRAINED: lambda told: {"status": "ready", "drained": True, "reason": "Drained"},
    Lie.ENDLESS: lambda told: {
        "worker_data": ["x" * MAX_WORKER_DATA_BYTES],
        "progress": {"x": "x" * MAX_PROGRESS_BYTES},
    },
}
