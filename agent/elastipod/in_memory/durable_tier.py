"""The last resort of a state in memory: checkpoints, through a CheckpointManager for each generation."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn

from elastipod.audit.sample_log import SampleLog
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.live_objects import LiveObjects
from elastipod.checkpoint.resume import Resume
from elastipod.checkpoint.save_arguments import norm_of_moments
from elastipod.in_memory.exchange import all_texts
from elastipod.in_memory.members import MODEL, Members
from elastipod.in_memory.memory_state import WorldLost
from elastipod.rank_in_world import RankInWorld

log = logging.getLogger(__name__)

SAVE_WAIT_S = 2.0  # for a save in progress, before a step is left out or the world changes


class _OtherMembers:
    """The members that are neither modules nor optimizers, as one schedule to the CheckpointManager."""

    def __init__(self, members: dict[str, Any]) -> None:
        self._members = members

    def state_dict(self) -> dict[str, Any]:
        return {name: member.state_dict() for name, member in self._members.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, member in self._members.items():
            member.load_state_dict(state_dict[name])


class DurableTier:
    """Saves and loads all members in one directory. Its methods are collective, in one generation at a time."""

    def __init__(
        self, directory: str | os.PathLike[str], members: Members, keep: int, *, saves_often: bool = False
    ) -> None:
        """saves_often: a step that a drain left in memory need not be written, a newer one is soon.

        Raises CheckpointError for a parameter that two optimizers train, ValueError for a name that a checkpoint cannot hold.

        Members that are built later are refused when they are.
        """
        self._directory, self._keep, self._saves_often = directory, keep, saves_often
        self._manager: CheckpointManager | None = None
        self._members = members
        members.when_built(self._refuse_unsavable)

    def _refuse_unsavable(self) -> None:
        """Refuse now what could not be saved later."""
        LiveObjects.of(**self._live)

    @property
    def _live(self) -> dict[str, Any]:
        """The members as arguments of a CheckpointManager. Nothing here holds those of a former world, which would take memory twice."""
        members = dict(self._members.items())
        optimizers = {name: member for name, member in members.items() if isinstance(member, torch.optim.Optimizer)}
        modules = {name: member for name, member in members.items() if isinstance(member, nn.Module)}
        others = {name: member for name, member in members.items() if name not in {**optimizers, **modules}}
        # One model and one schedule keep the names that a plain script's checkpoint has, so that either can read the other's.
        return {
            "model": modules[MODEL] if len(modules) == 1 else modules,
            "optimizer": optimizers,
            "scheduler": next(iter(others.values()), None) if len(others) <= 1 else _OtherMembers(others),
        }

    def generation(self) -> int:
        """Give this run's generation in the directory. Collective at its first use."""
        return self._opened(continues=True).claim()

    def load(self, *, fills_others: bool = False) -> Resume | None:
        """Load the newest checkpoint of any tier into the members; None when there is none.

        fills_others: only the holders of the result need to have loaded it; the caller fills the others from them. Not where a step
        that a drain left in memory must be written at once: that needs all ranks.
        """
        manager = self._opened(continues=False)
        load = manager.load_on_holders if fills_others and self._saves_often else manager.load_latest
        return load(**self._live)

    def save(self, step: int, extra: dict[str, Any], sample_log: SampleLog | None, *, waits: bool) -> None:
        """Save a step; return once it is durable (waits), or once it is copied to host memory.

        Unless it waits, a step is left out while an earlier one is still being written: training goes on whatever storage does.
        """
        manager = self._opened(continues=True)
        if not waits and "writes" in all_texts("writes" if manager.is_saving(SAVE_WAIT_S) else "idle"):
            if RankInWorld.current().rank == 0:
                log.warning("step %d is not saved, because storage is still writing the checkpoint before it", step)
            return
        save = manager.save if waits else manager.save_async
        save(step, **self._live, extra=extra, sample_log=sample_log)

    def overdue(self) -> WorldLost | None:
        """Wait a moment for a save in progress; give why it is abandoned if it takes longer. Not collective."""
        is_overdue = self._manager is not None and self._manager.is_saving(SAVE_WAIT_S)
        return WorldLost("the world changes, and its next checkpoint is of a newer step") if is_overdue else None

    def optimizer_norm(self) -> float | None:
        """Give one number of the optimizers' state, as the sample log has it of every checkpoint."""
        return norm_of_moments(LiveObjects.of(**self._live))()

    def close(self, error: BaseException | None) -> None:
        """End a generation. error: what ended it; then no save in progress is awaited."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.__exit__(type(error) if error else None, error, None)

    def _opened(self, *, continues: bool) -> CheckpointManager:
        """Give the generation's manager; made at its first use, because a generation in memory may need none.

        continues: its first use is a save, so the state came from memory.
        """
        if self._manager is None:
            self._manager = CheckpointManager(self._directory, keep=self._keep, continues=continues)
            self._manager.writes_resumed = not self._saves_often
            # `ProcessGroups` has built it so that it carries tensors of the host.
            self._manager.uses_default_group = True
        return self._manager
