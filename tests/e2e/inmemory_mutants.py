"""Mistakes that a change of the world could make, planted in the second generation of a worker. The notary must see each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastipod
from elastipod.data import Batch, ElasticBatches
from elastipod.in_memory import elastic_state
from elastipod.in_memory.memory_state import MemoryState

GENERATION = 2
NEWCOMER = 2  # the rank that joins in generation 2 of a job that grows from two ranks to three
MUTANTS = {
    "old and new DDP": "the reduced gradient of",
    "a wrong divisor": "the reduced gradient of",
    "a lost random state": "the random state is not that of its step on rank 2",
    "a repeated batch": "the ranks' samples together are not the batch of step",
    "a batch skipped by one rank": "the ranks' samples together are not the batch of step",
    "a step skipped by one rank": "the ranks are at different steps",
    "a step skipped by all ranks": "is trained with the state after step",
    "a batch skipped by all ranks": "begins after",
    "stale moments": "the state of rank 2 differs from that of rank 0, in optimizer.state.",
    "a group left out": "the state of rank 2 differs from that of rank 0, in",
}

_active = ""
_former: list[DistributedDataParallel] = []


def wrap(model: nn.Module) -> nn.Module:
    """Wrap as any script does, or as the mutants would."""
    if _active == "old and new DDP" and _is_now() and _former:
        # What torch has for a changed group: survivors keep their DDP, newcomers make one.
        _former[0]._update_process_group(dist.group.WORLD)  # type: ignore[no-untyped-call]
        return _former[0]
    # Without its own comparison of parameters, for which survivors' DDP would not be there.
    made = DistributedDataParallel(model, init_sync=_active != "old and new DDP")
    if _active == "a wrong divisor" and _is_now():
        made.register_comm_hook(None, _divide_by_former_size)
    _former[:] = [made]
    return made


def plant(mutant: str, state: elastipod.State) -> None:
    """Let a mistake happen in generation 2."""
    global _active
    _active = mutant
    if mutant == "old and new DDP":
        _keep_reducer()
    if mutant == "a lost random state":
        _replace(elastic_state, "seed_new_rank", lambda step, rank: torch.manual_seed(99))
    if mutant == "a repeated batch":
        _train_another_batch(-1)
    if mutant == "a batch skipped by one rank":
        _train_another_batch(1)
    if mutant == "a step skipped by one rank":
        _skip_a_step(NEWCOMER)
    if mutant == "a step skipped by all ranks":
        _skip_a_step()
    if mutant == "a batch skipped by all ranks":
        _skip_a_batch()
    if mutant == "stale moments":
        _forget_moments()
    if mutant == "a group left out":
        state._apply = _leave_out_a_group


def _is_now(rank: int | None = None) -> bool:
    is_generation = os.environ.get("ELASTIPOD_GENERATION") == str(GENERATION)
    return is_generation and rank in (None, int(os.environ["RANK"]))


def _replace(module: Any, name: str, mutant: Any) -> None:
    right = getattr(module, name)

    def chosen(*arguments: Any) -> Any:
        return (mutant if _is_now(NEWCOMER) else right)(*arguments)

    setattr(module, name, chosen)


def _divide_by_former_size(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda each: each.value()[0])


# DDP looks at the annotations themselves, which are texts in this file.
_divide_by_former_size.__annotations__.update(
    {"bucket": vars(dist)["GradBucket"], "return": torch.futures.Future[torch.Tensor]}
)


def _keep_reducer() -> None:
    from elastipod.in_memory import world_life

    right: Callable[[nn.Module], None] = vars(world_life)["detach_reducer"]
    setattr(world_life, "detach_reducer", lambda model: None if _former and model is _former[0] else right(model))  # noqa: B010


def _train_another_batch(distance: int) -> None:
    """Have the newcomer train the samples of a step before, or after, the one that it should."""
    right = ElasticBatches.iterate_at

    def other(self: ElasticBatches, *arguments: Any, **options: Any) -> Iterator[Batch]:
        for batch in right(self, *arguments, **options):
            if _is_now(NEWCOMER):
                found = replace(self, first_step=0, first_sample=0).batch(batch.step + distance, NEWCOMER, 3)
                batch = replace(batch, indices=found.indices)
            yield batch

    ElasticBatches.iterate_at = other  # type: ignore[method-assign]


def _skip_a_step(rank: int | None = None) -> None:
    """Leave out the first step of the new world: its number and its samples. rank: that does so, None for all."""
    right = ElasticBatches.iterate_at

    def shorter(self: ElasticBatches, *arguments: Any, **options: Any) -> Iterator[Batch]:
        batches = right(self, *arguments, **options)
        if _is_now(rank):
            next(batches)
        return batches

    ElasticBatches.iterate_at = shorter  # type: ignore[method-assign]


def _skip_a_batch() -> None:
    """Have all ranks take the position in the data for one that is a batch further on, after the same number of steps."""
    right = ElasticBatches.resumed

    def further(self: ElasticBatches, state: Mapping[str, Any]) -> ElasticBatches:
        return right(self, {**state, "samples": state["samples"] + self.global_batch} if _is_now() else state)

    ElasticBatches.resumed = further  # type: ignore[method-assign]


def _forget_moments() -> None:
    right = MemoryState.finish_filling

    def forgetful(self: MemoryState) -> None:
        if _is_now(NEWCOMER):
            for moments in self.members["optimizer"].state.values():
                moments["exp_avg"].zero_()
        right(self)

    MemoryState.finish_filling = forgetful  # type: ignore[method-assign]


def _leave_out_a_group(state: elastipod.State) -> None:
    if _is_now(NEWCOMER):
        next(iter(state.optimizer.param_groups[0]["params"])).grad = None
    elastic_state._apply_to_members(state)
