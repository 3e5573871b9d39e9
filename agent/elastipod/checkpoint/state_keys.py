"""Whether all ranks hold the same tensors, whole or sharded. Checked whenever a plan is made.

Pipeline stages hold different tensors, each under its own optimizer group. Such a state could be written, but would fit no
rank when it is loaded, so it is refused while nothing is lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.optimizer_state import OPTIMIZER, STATE
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
    """Raise CheckpointError on all ranks when their states have different keys. Collective, from the training thread."""
    own = StateKeys.of(state)
    if comm.training_all_reduce(lambda: own.digest, lambda digests: len(set(digests)) == 1):
        return

    def compared(answers: list[list[list[str]]]) -> str | None:
        return describe_missing_keys([StateKeys(frozenset(keys), frozenset(empty)) for keys, empty in answers])

    if problem := comm.training_all_reduce(lambda: [sorted(own.keys), sorted(own.empty)], compared):
        raise CheckpointError(problem)


def describe_missing_keys(ranks: Sequence[StateKeys]) -> str | None:
    """Return a sentence on which ranks lack keys that others have, None if all have the same."""
    lacking: dict[str, tuple[int, ...]] = {}
    for key in sorted(set().union(*(each.keys for each in ranks))):
        without = tuple(rank for rank, each in enumerate(ranks) if key not in each.keys and not each.may_lack(key))
        if without:
            lacking[key] = without
    if not lacking:
        return None
    first = next(iter(lacking.values()))
    keys = [key for key, without in lacking.items() if without == first]
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    have = [rank for rank in range(len(ranks)) if rank not in first and keys[0] in ranks[rank].keys]
    return (
        f"this state cannot be saved: {format_ranks(first)} {'lacks' if len(first) == 1 else 'lack'} {', '.join(keys[:_NAMED])}{more}, "
        f"which {format_ranks(have)} {'has' if len(have) == 1 else 'have'}; stages of a pipeline, and parts that only some ranks "
        "have, are not supported"
    )


def _is_empty(tensor: object) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return isinstance(local, torch.Tensor) and local.numel() == 0
