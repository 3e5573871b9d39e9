"""How a state is divided among ranks, without the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from elastipod.checkpoint.save_plan import LocalState, SavePlan, divide_state


def make_save_plan(states: Sequence[LocalState], *, is_in_memory: bool) -> SavePlan:
    """Divide the state. states: by rank. As `divide_state`."""
    told = [own.pack(rank) for rank, own in enumerate(states)]
    schemas = {holding.schema: schema for holding, schema in told}
    return divide_state([holding for holding, _ in told], schemas, is_in_memory=is_in_memory)
