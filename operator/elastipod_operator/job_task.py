"""The task of one job, its state between two passes, and a decision about the job."""

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
# While pod calls of a job are in flight, each answer wakes the job. Decisions then take at most one part in so many of the time.
POD_CALLS_FACTOR = 20


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and what it rests on.

    job: a copy as the decision saw it; later watch events are for the next decision. creations, deletions: pod actions of the
    plan that are not in flight yet. is_creation_delayed: the plan leaves creations out because of the back-off after a refusal.
    """

    job: Job
    todo: Plan
    creations: list[CreatePod]
    deletions: list[DeletePod]
    is_creation_delayed: bool = False


@dataclass(slots=True)
class JobTask:
    """The task of one job and its state between two passes. All of it can be lost without harm."""

    creation: PodCreation
    deletion: PodDeletion
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    due: datetime | None = None
    """When the next pass is due if nothing wakes the job before."""
    operator_error: str = ""
    """Why the last pass failed, as a sentence, if the operator itself was at fault."""
    decision_s: float = 0.0
    """How long the last decision took."""
    waits_until: float = 0.0
    """How long decisions wait for pod calls; by the clock of the event loop."""

    def keep_only(self, todo: Plan) -> bool:
        """Cancel the waiting pod calls that a plan does not want. False if some of those were sent already."""
        kept = (
            self.creation.keep_only(actions_of(CreatePod, todo)),
            self.deletion.keep_only(actions_of(DeletePod, todo)),
        )
        return all(kept)

    def note_decision(self, began: float) -> None:
        """Record how long a decision took. began: its start, by the clock of the event loop."""
        now = asyncio.get_running_loop().time()
        self.decision_s = now - began
        self.waits_until = now + POD_CALLS_FACTOR * self.decision_s

    async def wait_for_pod_calls(self) -> None:
        """Wait until all pod calls are done, or until `waits_until`."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self.waits_until):
                await self.creation.calls.wait_idle()
                await self.deletion.calls.wait_idle()

    def cancel_waiting(self) -> None:
        """Cancel all pod calls that were not sent."""
        self.creation.calls.cancel_waiting()
        self.deletion.calls.cancel_waiting()


def actions_of(kind: type[A], todo: Plan) -> list[A]:
    """Give the actions of one kind."""
    return [action for action in todo.actions if isinstance(action, kind)]
