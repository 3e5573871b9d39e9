"""Mistakes to plant in the generation that follows a drain, where agents begin it by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastipod_operator.core import next_generation, pod_removal, transition
from elastipod_operator.core.record import NextGeneration, Record
from elastipod_operator.core.replica import Replica, Replicas


def use_the_number_again_that_agents_were_told(patch: pytest.MonkeyPatch) -> None:
    real = next_generation.new_generation

    def new_generation(record: Record, replicas: Replicas, chosen: Sequence[Replica]) -> NextGeneration:
        return replace(real(record, replicas, chosen), generation=record.generation + 1)

    patch.setattr(transition, "new_generation", new_generation)


def forget_the_newest_generation_that_was_told(patch: pytest.MonkeyPatch) -> None:
    real = next_generation.new_generation

    def new_generation(record: Record, replicas: Replicas, chosen: Sequence[Replica]) -> NextGeneration:
        return real(replace(record, newest_told=0), replicas, chosen)

    patch.setattr(transition, "new_generation", new_generation)


def end_newcomers_that_train_already(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pod_removal, "has_begun_next", lambda replica, record: False)
