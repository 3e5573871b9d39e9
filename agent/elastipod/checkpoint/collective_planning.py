"""Creating the save plan of all ranks on rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from elastipod.checkpoint.chunk_table import expand_runs, run_lengths
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.save_plan import LocalState, PackedLocalState, StateSchema, divide_state, text_digest
from elastipod.errors import CheckpointError
from elastipod.json_records import decode, encode

DOMAIN_ENV = "ELASTIPOD_FAILURE_DOMAIN"  # what fails together with this pod's node: a rack, a zone


def plan_across_ranks(
    comm: Communicator, capture: Callable[[], LocalState], *, is_in_memory: bool
) -> tuple[str, list[str]]:
    """Have rank 0 divide the state; return the plan as text, and the ranks' failure domains. Collective.

    Each rank sends the offsets and sizes of its chunks as packed numbers. Names and shapes, which ranks usually share, come from
    one rank for each schema. From the training thread. Raises CheckpointError.
    """
    schemas: dict[str, StateSchema] = {}  # this rank's; on rank 0, all of them
    packed_states: list[PackedLocalState] = []  # on rank 0

    def describe() -> dict[str, Any]:
        own, schema = capture().pack(comm.rank)
        schemas[own.schema] = schema
        return {"holding": encode(own), "domain": os.environ.get(DOMAIN_ENV, "")}

    def combine(answers: list[dict[str, Any]]) -> dict[str, Any]:
        packed_states.extend(decode(PackedLocalState, answer["holding"]) for answer in answers)
        senders = {own.schema: rank for rank, own in reversed([*enumerate(packed_states)]) if own.schema not in schemas}
        return {"domains": run_lengths(answer["domain"] for answer in answers), "tellers": [*senders.values()]}

    def collect(answers: list[list[str]]) -> None:
        schemas.update((text_digest(text), StateSchema.from_json(text)) for texts in answers for text in texts)

    answer = comm.training_all_reduce(describe, combine)
    if senders := answer["tellers"]:
        comm.training_all_reduce(
            lambda: [schema.to_json() for schema in schemas.values()] if comm.rank in senders else [], collect
        )

    def planned() -> str:
        try:
            return divide_state(packed_states, schemas, is_in_memory=is_in_memory).to_json()
        except ValueError as error:
            raise CheckpointError(f"this state cannot be saved: {error}") from error

    return comm.training_broadcast(planned), list(expand_runs(answer["domains"]))
