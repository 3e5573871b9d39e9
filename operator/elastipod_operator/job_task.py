"""What the shell remembers of a job between two passes, and what a decision about it wants."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from .core.actions import CreatePod, DeletePod, Plan
from .kube.store import Job
from .pod_creation import PodCreation
from .pod_deletion import PodDeletion

A = TypeVar("A", CreatePod, DeletePod)
# While pods of a job are on their way, deciding about it may take one part in so many of the time: each of them is news.
POD_CALLS_FACTOR = 20


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and what it rests on. job: as it was seen, for what the watches show later is for the next decision.

    creations, deletions: what it wants of pods beyond what was under way.
    """

    job: Job
    todo: Plan
    creations: list[CreatePod]
    deletions: list[DeletePod]


@dataclass(slots=True)
class JobTask:
    """The task of one job and what it remembers between two passes; all of it may be lost without harm."""

    creation: PodCreation
    deletion: PodDeletion
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    due: datetime | None = None
    """When the job is looked at next if nothing wakes it before."""
    operator_error: str = ""
    """Why the last pass failed, where that was a mistake of the operator's own; a sentence."""
    decision_s: float = 0.0
    """How long the last decision took."""
    waits_until: float = 0.0
    """While its pods are on their way; by the clock of the event loop."""

    def keep_only(self, todo: Plan) -> bool:
        """Withdraw the calls for pods that a decision does not want; False when some of them are on their way."""
        kept = (
            self.creation.keep_only(actions_of(CreatePod, todo)),
            self.deletion.keep_only(actions_of(DeletePod, todo)),
        )
        return all(kept)

    def note_decision(self, began: float) -> None:
        """Note that a decision was made; began: when it was begun, by the clock of the event loop."""
        now = asyncio.get_running_loop().time()
        self.decision_s = now - began
        self.waits_until = now + POD_CALLS_FACTOR * self.decision_s

    async def wait_for_pod_calls(self) -> None:
        """Leave the event loop to the calls for pods for as long as the last decision asks for, or until all are answered."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self.waits_until):
                await self.creation.calls.wait_idle()
                await self.deletion.calls.wait_idle()

    def cancel_waiting(self) -> None:
        """Withdraw all calls for pods that are not on their way."""
        self.creation.calls.cancel_waiting()
        self.deletion.calls.cancel_waiting()


def actions_of(kind: type[A], todo: Plan) -> list[A]:
    """Give the actions of one kind."""
    return [action for action in todo.actions if isinstance(action, kind)]
