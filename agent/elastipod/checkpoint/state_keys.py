"""Whether all ranks of a pipeline stage hold the same tensors, whole or sharded. Checked whenever a plan is made.

Without stages that is every rank. Parts that only some ranks have could be written, but would fit no rank when they are loaded, so
they are refused while nothing is lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.optimizer_state import OPTIMIZER, STATE
from elastipod.checkpoint.pipeline_stages import refuse_shared_weights
from elastipod.checkpoint.training_state import RANDOM, TrainingState
from elastipod.errors import CheckpointError
from elastipod.rank_ranges import format_ranks
from elastipod.torch_compat import DTensor

_NAMED = 3  # examples in a message


@dataclass(frozen=True, slots=True)
class StateKeys:
    """The keys of one rank's state: of tensors and values. empty: names of parameters of which this rank's shard is empty."""

    keys: frozenset[str]
    empty: frozenset[str]

    @classmethod
    def of(cls, state: TrainingState) -> StateKeys:
        weights: dict[str, Any] = state.nested["model"]
        return cls(
            frozenset(key for key in state.flat if not key.startswith(f"{RANDOM}.")),
            frozenset(name for name, tensor in weights.items() if _is_empty(tensor)),
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(sorted(self.keys)).encode()).hexdigest()

    def may_lack(self, key: str) -> bool:
        """Return whether a rank may lack a key that others have: some optimizers keep no state for an empty shard."""
        return any(key.startswith(f"{OPTIMIZER}.{STATE}.{name}.") for name in self.empty)


def check_same_keys(state: TrainingState, comm: Communicator) -> None:
    """Raise CheckpointError on all ranks when ranks of a stage have different keys, or stages have weights of the same name.

    Collective, from the training thread.
    """
    own, stage = StateKeys.of(state), state.stage

    def agree(answers: list[list[Any]]) -> bool:
        return len({(number, digest) for number, digest in answers}) == len({number for number, _ in answers})

    if stage.count > 1:
        weights = [(stage.number, sorted(state.nested["model"]))] if stage.speaks else []
        comm.training_all_reduce(lambda: weights, lambda answers: refuse_shared_weights(dict(chain(*answers))))
    if comm.training_all_reduce(lambda: [stage.number, own.digest], agree):
        return

    def compared(answers: list[tuple[int, list[str], list[str]]]) -> str | None:
        by_stage: dict[int, dict[int, StateKeys]] = {}
        for rank, (number, keys, empty) in enumerate(answers):
            by_stage.setdefault(number, {})[rank] = StateKeys(frozenset(keys), frozenset(empty))
        return next(filter(None, map(describe_missing_keys, by_stage.values())), None)

    if problem := comm.training_all_reduce(lambda: (stage.number, sorted(own.keys), sorted(own.empty)), compared):
        raise CheckpointError(problem)


def describe_missing_keys(ranks: Mapping[int, StateKeys]) -> str | None:
    """Return a sentence on which ranks lack keys that others have, None if all have the same."""
    lacking: dict[str, tuple[int, ...]] = {}
    for key in sorted(set().union(*(each.keys for each in ranks.values()))):
        without = tuple(rank for rank, each in ranks.items() if key not in each.keys and not each.may_lack(key))
        if without:
            lacking[key] = without
    if not lacking:
        return None
    first = next(iter(lacking.values()))
    keys = [key for key, without in lacking.items() if without == first]
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    have = [rank for rank, each in ranks.items() if rank not in first and keys[0] in each.keys]
    return (
        f"this state cannot be saved: {format_ranks(first)} {'lacks' if len(first) == 1 else 'lack'} {', '.join(keys[:_NAMED])}{more}, "
        f"which {format_ranks(have)} {'has' if len(have) == 1 else 'have'}; for stages of a pipeline pass CheckpointManager(..., "
        "mesh=), other parts that only some ranks have are not supported"
    )


def _is_empty(tensor: object) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return isinstance(local, torch.Tensor) and local.numel() == 0
