"""The agent's public status: an immutable record whose version grows with every change, and waiting for the next change."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastipod.worker_file import Progress
from elastipod_agent import __version__
from elastipod_agent.core.inprocess_restart import StateKind, WorkerPreparation
from elastipod_agent.core.states import AgentState, move
from elastipod_agent.waiting import set_within
from elastipod_agent.workers.failure import Failure

PROTOCOL = 1
# Optional additions to the protocol that callers may use (docs/design/contracts.md, 3); `store` is another one, where there is a key.
FEATURES = ("reach", "prepare", "next")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What /status shows except the workers' progress. transitions: state -> UTC time at which it was last entered."""

    state: AgentState = AgentState.INIT
    version: int = 1
    transitions: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None
    message: str | None = None
    restart_mode: str | None = None
    ip_version: str | None = None
    progress: Mapping[str, Any] | None = None
    assigned_rank: int | None = None
    is_spare: bool | None = None
    worker_data: Sequence[Mapping[str, Any]] = ()
    rank_labels: Mapping[str, str] = field(default_factory=dict)
    has_priority: bool = False  # its processes survived the last run
    kept_state: StateKind | None = None  # what all workers here keep in memory beyond a run
    num_kept: int | None = None  # how many processes survived the last run; None during a run
    preparation: WorkerPreparation | None = (
        None  # of workers that were started ahead of their first run, until that run
    )
    generation: int = 0
    next_generation: int | None = None  # that begins here once the workers have drained
    drained: bool = False
    warming: bool = False
    saving: bool = False  # all workers have acknowledged the event of the drain under way
    unanswered: bool = False  # no worker here can know of the drain under way
    terminating: bool = False
    failure: Failure | None = None
    gap_s: float | None = None  # between the last step before this generation and its first one
    steps_repeated: int | None = None  # from its first one on: how many had been made before


class StatusStore:
    """Holds the status. Every change goes through `set` or `enter`. Belongs to the event loop's thread.

    on_change: called with the status before and after each change.
    """

    def __init__(self, utc_now: Callable[[], str]) -> None:
        self.features: tuple[str, ...] = FEATURES
        self.boot_id = secrets.token_hex(8)
        self.on_change: Callable[[Status, Status], None] = lambda before, after: None
        self._utc_now = utc_now
        self._changed = asyncio.Event()
        self.current = Status(transitions={AgentState.INIT.name: utc_now()})

    def set(self, **changes: Any) -> None:
        """Change fields; the version grows if a value differs."""
        changed = replace(self.current, **changes)
        if changed != self.current:
            before, self.current = self.current, replace(changed, version=self.current.version + 1)
            self.on_change(before, self.current)
            self._changed.set()
            self._changed = asyncio.Event()

    def enter(self, *states: AgentState, **changes: Any) -> None:
        """Move through these states and change fields, as one change of the status."""
        state, transitions = self.current.state, dict(self.current.transitions)
        for target in states:
            state = move(state, target)
            transitions[state.name] = self._utc_now()
        self.set(state=state, transitions=transitions, saving=False, unanswered=False, **changes)

    async def wait_beyond(self, version: int, timeout_s: float) -> None:
        """Wait until the version differs from the given one, at most this long."""
        if self.current.version == version:
            await set_within(self._changed, timeout_s)

    def as_json(self, progress: Progress | None) -> dict[str, Any]:
        """Give the body of /status. Optional fields of the plain protocol are left out while they have no value."""
        status = self.current
        optional = {
            "reason": status.reason,
            "message": status.message,
            "restartMode": status.restart_mode,
            "ipversion": status.ip_version,
            "progress": status.progress or None,
            "assigned_rank": None if status.assigned_rank is None else str(status.assigned_rank),
            "spare": None if status.is_spare is None else str(status.is_spare),
            "worker_data": list(status.worker_data) or None,
            "rank_labels": dict(status.rank_labels) or None,
            "priority": "True" if status.has_priority else None,
        }
        return {
            "status": status.state.value,
            "transitions": dict(status.transitions),
            **{name: value for name, value in optional.items() if value is not None},
            "agent_version": __version__,
            "protocol": PROTOCOL,
            "features": list(self.features),
            "version": status.version,
            "generation": status.generation,
            "next_generation": status.next_generation,
            "drained": status.drained,
            "warming": status.warming,
            "saving": status.saving,
            "unanswered": status.unanswered,
            "terminating": status.terminating,
            "in_memory": _in_memory_json(status),
            "preparation": None if status.preparation is None else status.preparation.value,
            "gap_s": status.gap_s,
            "steps_repeated": status.steps_repeated,
            "boot_id": self.boot_id,
            "failure": None if status.failure is None else status.failure.as_json(),
            "worker": _worker_json(progress),
        }


def _in_memory_json(status: Status) -> dict[str, Any] | None:
    if status.kept_state is None:
        return None
    return {"kind": status.kept_state.value, "kept": status.num_kept}


def _worker_json(progress: Progress | None) -> dict[str, Any]:
    names = ("step", "samples", "loss", "samples_per_s", "world_size", "time", "total_steps")
    return {name: _finite(getattr(progress, name, None)) for name in names}


def _finite(value: float | None) -> float | None:
    """Replace infinity and NaN, which JSON lacks, by None."""
    return value if value is not None and math.isfinite(value) else None
