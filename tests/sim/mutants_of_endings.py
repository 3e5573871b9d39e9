"""Mistakes to plant in what decides about the end of a training, and in what a storage keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastipod.checkpoint.store import CheckpointStore
from elastipod_operator.core import recovery, running, transition
from elastipod_operator.core.record import Record
from elastipod_operator.core.replica import Health, Replica


def drain_workers_that_have_finished(patch: pytest.MonkeyPatch) -> None:
    real = running._all_completed

    def completed(members: list[Replica], record: Record) -> bool:
        return real(members, record) and all(member.health is not Health.DISRUPTED for member in members)

    patch.setattr(running, "_all_completed", completed)


def complete_with_the_first_member(patch: pytest.MonkeyPatch) -> None:
    def completed(members: list[Replica], record: Record) -> bool:
        return any(member.finished(record.generation) for member in members)

    patch.setattr(running, "_all_completed", completed)


def charge_nobody_for_a_save_that_failed(patch: pytest.MonkeyPatch) -> None:
    real = recovery.begin_recovery

    def begin(record: Record, *rest: Any) -> Record:
        begun = real(record, *rest)
        return begun if record.transition is None else replace(begun, retries=record.retries)

    patch.setattr(transition, "begin_recovery", begin)


def prune_the_newest(patch: pytest.MonkeyPatch) -> None:
    def prune(self: CheckpointStore, generation: int, keep: int, *_: Any, **__: Any) -> None:
        oldest_first = sorted(self.list_complete(), key=lambda one: (one.generation, one.step))
        self._delete(oldest_first[keep:], generation)

    patch.setattr(CheckpointStore, "prune", prune)
