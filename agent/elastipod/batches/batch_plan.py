"""Divides a global batch among ranks and passes, or refuses with sizes that work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastipod.errors import BatchSizeError
from elastipod.mesh import place_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MAX_NAMED = 8  # sizes that an error message names
_UNEVEN_KEYS = ("num_dp_groups_with_small_batch_size", "small_local_batch_size", "large_local_batch_size")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How every rank trains its part of a full global batch.

    data_parallel: number of ranks that train on different samples. local_sizes: samples of each of them, for
    `ElasticBatches.iterate`; their sum is the global batch. micro_batch: maximum number of samples in one pass. passes: forward
    and backward passes per optimizer step, the same on every rank.
    """

    global_batch: int
    data_parallel: int
    micro_batch: int
    passes: int
    local_sizes: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        """True when all ranks have the same number of samples."""
        return len(set(self.local_sizes)) == 1


@dataclass(frozen=True, slots=True)
class UnevenBatch:
    """HyperPod's uneven batch: the first ``num_small`` data-parallel ranks train ``small`` samples, the others ``large``."""

    num_small: int
    small: int
    large: int

    @classmethod
    def from_config(cls, block: Mapping[str, Any]) -> UnevenBatch | None:
        """Read the block `uneven_batch` of a recipe; None when `use_uneven_batch` is false or absent. Raises BatchSizeError."""
        wanted = block.get("use_uneven_batch") or False
        if not isinstance(wanted, bool):
            raise BatchSizeError(f"uneven_batch.use_uneven_batch is {wanted!r}; it must be true or false")
        if not wanted:
            return None
        values = []
        for name in _UNEVEN_KEYS:
            value = block.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise BatchSizeError(f"uneven_batch.{name} is {value!r}; it must be a whole number, at least 0")
            values.append(value)
        return cls(*values)

    def local_sizes(self, global_batch: int, data_parallel: int) -> tuple[int, ...]:
        """Give the samples of each rank. Raises BatchSizeError, with a block that works, unless they sum up to the batch."""
        if self.num_small > data_parallel:
            raise BatchSizeError(
                f"uneven_batch.num_dp_groups_with_small_batch_size is {self.num_small}, but there are {data_parallel} "
                f"data-parallel ranks; {_suggest_even(global_batch, data_parallel)}"
            )
        num_large = data_parallel - self.num_small
        total = self.small * self.num_small + self.large * num_large
        if total != global_batch:
            raise BatchSizeError(
                f"uneven_batch gives {self.num_small} x {self.small} + {num_large} x {self.large} = {total} samples, but "
                f"the global batch is {global_batch}; {_suggest_even(global_batch, data_parallel)}"
            )
        return (self.small,) * self.num_small + (self.large,) * num_large


def plan_batch(
    global_batch: int,
    world_size: int | None = None,
    *,
    dp_mesh: DeviceMesh | None = None,
    max_micro_batch: int | None = None,
    even: bool = False,
    uneven_batch: UnevenBatch | None = None,
    model_parallel: int = 1,
) -> BatchPlan:
    """Give the plan for a global batch at a world size: as few passes as the memory allows, of sizes as equal as possible.

    world_size: all ranks. model_parallel: ranks that train on the same samples together (tensor x pipeline parallel). dp_mesh:
    instead of both, a mesh as for `ElasticBatches.iterate`; the sizes in messages are then numbers of data-parallel ranks.
    max_micro_batch: samples of one pass that fit into a rank's memory; None: no limit. even: refuse sizes at which some ranks have
    one sample more than others. uneven_batch: use these parts instead of the most even ones.
    Any rank may call it; no collective. Raises BatchSizeError, which names sizes that work.
    """
    if dp_mesh is not None and model_parallel != 1:
        raise TypeError("model_parallel is in dp_mesh already; leave it out")
    if (world_size is None) == (dp_mesh is None):
        raise TypeError("give either world_size or dp_mesh")
    if world_size is None:
        world_size = place_of(None, None, dp_mesh).world_size
    _check_positive(global_batch=global_batch, world_size=world_size, model_parallel=model_parallel)
    if max_micro_batch is not None:
        _check_positive(max_micro_batch=max_micro_batch)
    usable = _UsableWorldSizes(global_batch, model_parallel, even and uneven_batch is None)
    if world_size % model_parallel:
        raise BatchSizeError(
            f"{world_size} ranks cannot be cut into groups of {model_parallel} (tensor x pipeline parallel); "
            f"{usable.near(world_size)}"
        )
    data_parallel = world_size // model_parallel
    if data_parallel > global_batch:
        raise BatchSizeError(
            f"a global batch of {global_batch} leaves {data_parallel - global_batch} of {data_parallel} data-parallel ranks "
            f"without samples; {usable.near(world_size)}, or a global batch of {data_parallel} and more"
        )
    if not usable.at(world_size):
        below = global_batch // data_parallel * data_parallel
        raise BatchSizeError(
            f"a global batch of {global_batch} cannot be shared out evenly to {data_parallel} data-parallel ranks; "
            f"{usable.near(world_size)}, or a global batch of {below} or {below + data_parallel}, or uneven parts (even=False)"
        )
    if uneven_batch is not None:
        sizes = uneven_batch.local_sizes(global_batch, data_parallel)
    else:
        small, num_large = divmod(global_batch, data_parallel)
        sizes = (small,) * (data_parallel - num_large) + (small + 1,) * num_large
    return _with_passes(global_batch, sizes, max_micro_batch)


def world_sizes(global_batch: int, up_to: int, *, even: bool = False, model_parallel: int = 1) -> list[int]:
    """Give the world sizes up to ``up_to`` that `plan_batch` accepts, for `replicaDiscreteValues`. Raises BatchSizeError."""
    _check_positive(global_batch=global_batch, model_parallel=model_parallel)
    usable = _UsableWorldSizes(global_batch, model_parallel, even)
    return [world for world in range(model_parallel, up_to + 1, model_parallel) if usable.at(world)]


@dataclass(frozen=True, slots=True)
class _UsableWorldSizes:
    """The world sizes at which a global batch can be trained."""

    global_batch: int
    model_parallel: int
    even: bool

    def at(self, world_size: int) -> bool:
        data_parallel, rest = divmod(world_size, self.model_parallel)
        return (
            not rest
            and 1 <= data_parallel <= self.global_batch
            and not (self.even and self.global_batch % data_parallel)
        )

    def near(self, world_size: int) -> str:
        """Give the nearest sizes that work, as text for a message."""
        largest = self.global_batch * self.model_parallel
        by_distance = sorted(
            (world for world in range(self.model_parallel, largest + 1, self.model_parallel) if self.at(world)),
            key=lambda world: abs(world - world_size),
        )
        return f"world sizes that would work: {', '.join(map(str, sorted(by_distance[:MAX_NAMED])))}"


def _with_passes(global_batch: int, sizes: Sequence[int], max_micro_batch: int | None) -> BatchPlan:
    largest = max(sizes)
    passes = -(-largest // (max_micro_batch or largest))
    return BatchPlan(global_batch, len(sizes), -(-largest // passes), passes, tuple(sizes))


def _suggest_even(global_batch: int, data_parallel: int) -> str:
    small, num_large = divmod(global_batch, data_parallel)
    if not num_large:
        return f"what would work: {small} samples on each of {data_parallel} ranks, without uneven_batch"
    return (
        f"what would work: num_dp_groups_with_small_batch_size {data_parallel - num_large}, "
        f"small_local_batch_size {small}, large_local_batch_size {small + 1}"
    )


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise BatchSizeError(f"{name} is {value}; it must be at least 1")
