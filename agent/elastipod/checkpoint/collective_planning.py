"""Making the save plan of all ranks on rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from elastipod.checkpoint.chunk_table import expand_runs, run_lengths
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.save_plan import (
    LocalState,
    PackedLocalState,
    StateSchema,
    divide_state,
    text_digest,
)
from elastipod.errors import CheckpointError

DOMAIN_ENV = "ELASTIPOD_FAILURE_DOMAIN"  # what fails together with this pod's node, such as its rack or zone


def plan_across_ranks(
    comm: Communicator, capture: Callable[[], LocalState], *, is_in_memory: bool
) -> tuple[str, list[str]]:
    """Have rank 0 divide the state, from what all ranks hold; give the plan as text, and the ranks' failure domains.

    A rank tells where its boxes lie, in numbers. What ranks usually have in common, names and shapes, comes from one rank of each
    kind only. From the training's threads; collective. Raises CheckpointError.
    """
    schemas: dict[str, StateSchema] = {}  # this rank's; on rank 0, all
    holdings: list[PackedLocalState] = []  # on rank 0

    def told() -> dict[str, Any]:
        own, schema = capture().pack(comm.rank)
        schemas[own.schema] = schema
        return {"holding": own.as_json(), "domain": os.environ.get(DOMAIN_ENV, "")}

    def heard(answers: list[dict[str, Any]]) -> dict[str, Any]:
        holdings.extend(PackedLocalState.from_json(answer["holding"]) for answer in answers)
        tellers = {own.schema: rank for rank, own in reversed([*enumerate(holdings)]) if own.schema not in schemas}
        return {"domains": run_lengths(answer["domain"] for answer in answers), "tellers": [*tellers.values()]}

    def learnt(told: list[list[str]]) -> None:
        schemas.update((text_digest(text), StateSchema.from_json(text)) for texts in told for text in texts)

    answer = comm.training_all_reduce(told, heard)
    if tellers := answer["tellers"]:
        comm.training_all_reduce(
            lambda: [schema.to_json() for schema in schemas.values()] if comm.rank in tellers else [], learnt
        )

    def planned() -> str:
        try:
            return divide_state(holdings, schemas, is_in_memory=is_in_memory).to_json()
        except ValueError as error:
            raise CheckpointError(f"this state cannot be saved: {error}") from error

    return comm.training_broadcast(planned), list(expand_runs(answer["domains"]))
