"""The training state as checkpoints see it: tensors, of which this rank holds a chunk, and plain values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from elastipod.checkpoint.live_objects import LiveObjects, prefix_of
from elastipod.checkpoint.live_objects import Scheduler as Scheduler
from elastipod.checkpoint.optimizer_state import GROUPS, OPTIMIZER, optimizer_state, refuse_needed_closure
from elastipod.checkpoint.rng import random_state
from elastipod.checkpoint.save_plan import Chunk, LocalState, num_bytes
from elastipod.checkpoint.stateful_members import STATEFUL, TENSORS, stateful_state
from elastipod.checkpoint.value_codec import encode_value
from elastipod.errors import CheckpointError
from elastipod.rank_in_world import RankInWorld
from elastipod.torch_compat import DTensor, has_plain_names, names_ignored_by_ddp, names_in_checkpoints

MODEL, SCHEDULER = "model", "scheduler"
RANDOM = "random"  # one per rank, under "random.<rank>"


class TrainingState:
    """A snapshot of references to the live state; tensors are not copied."""

    def __init__(self, live: LiveObjects, rank: int) -> None:
        """Collective as far as torch's get_model_state_dict is. Raises CheckpointError for a value that cannot be saved."""
        refuse_needed_closure(live.optimizers.values())
        self.nested = nested_state(live)
        self.stage = live.stage
        if live.schedulers:
            texts = {
                name: _encode_value(each.state_dict(), f"the state of the scheduler {name}".rstrip())
                for name, each in live.schedulers.items()
            }
            self.nested[SCHEDULER] = texts.get("", texts)
        if live.stateful:
            self.nested[STATEFUL] = stateful_state(live.stateful)
        self.nested[RANDOM] = {str(rank): random_state()}
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(self.nested, is_coordinator=True)
        self.flat: dict[str, Any] = self._planner.state_dict

    def signature(self) -> tuple[object, ...]:
        """Return what a plan depends on; equal signatures have equal plans."""
        return tuple(
            (key, value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else key
            for key, value in self.flat.items()
        )

    def local_state(self, node: str) -> LocalState:
        """Return what this rank holds."""
        paths = self._planner.mappings
        chunks: list[Chunk] = []
        values: list[tuple[str, tuple[str | int, ...]]] = []
        for item in self._planner.create_local_plan().items:
            key = item.index.fqn
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                values.append((key, tuple(paths[key])))
                continue
            data = item.tensor_data
            sizes, shape, dtype = tuple(data.chunk.sizes), tuple(data.size), data.properties.dtype
            if 0 in sizes and 0 not in shape:
                continue  # the rank is beyond the end of a small sharded tensor
            bytes_of_box = num_bytes(sizes, dtype.itemsize)
            name = str(dtype).removeprefix("torch.")
            chunks.append(Chunk(key, tuple(paths[key]), name, shape, tuple(data.chunk.offsets), sizes, bytes_of_box))
        return LocalState(node, tuple(chunks), tuple(values))

    def tensor(self, chunk: Chunk) -> torch.Tensor:
        """Return the live tensor of a chunk that this rank holds."""
        found = self._planner.lookup_object(MetadataIndex(chunk.key, torch.Size(chunk.offsets)))
        assert isinstance(found, torch.Tensor), chunk.key
        return found.detach()

    def values(self) -> dict[str, str]:
        """Return the plain values of this rank, encoded. Raises CheckpointError for one that cannot be saved."""
        return {
            key: _encode_value(value, key) for key, value in self.flat.items() if not isinstance(value, torch.Tensor)
        }


def nested_state(live: LiveObjects) -> dict[str, Any]:
    """Return models and optimizers as nested dictionaries of live tensors, by names that do not depend on DDP or sharding.

    Neither is changed. Raises CheckpointError for an optimizer of other models.
    """
    weights = {
        f"{prefix_of(name)}{key}": value
        for name, model in live.models.items()
        for key, value in _weights_of(model).items()
    }
    if live.is_weights_only:
        return {MODEL: weights}
    found = optimizer_state(live)
    return {MODEL: weights, OPTIMIZER: {**found, GROUPS: live.stage.own_groups(found[GROUPS])}}


def replica_local_keys(live: LiveObjects) -> set[str]:
    """Return the keys of tensors that may differ between replicas: buffers, what DDP was told to ignore, and those of loaders."""
    found: set[str] = set()
    for name, model in live.models.items():
        wrapped = (model, getattr(model, "module", model))  # before and after wrapping in DDP
        ignored: set[str] = set().union(*map(names_ignored_by_ddp, wrapped))
        buffers = names_in_checkpoints(model, (buffer for buffer, _ in model.named_buffers()))
        found |= {f"{MODEL}.{prefix_of(name)}{each}" for each in ignored.union(buffers.values())}
    for name, state in stateful_state(live.stateful).items():
        found |= {f"{STATEFUL}.{name}.{TENSORS}.{key}" for key in state.get(TENSORS, ())}
    return found


def load_models(weights: dict[str, Any], live: LiveObjects) -> None:
    """Load the weights of `nested_state` into the models."""
    for name, model in live.models.items():
        tensors = {_memory_of(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        prefix = prefix_of(name)
        # Pass the parameters themselves if their memory was filled: torch would copy it onto itself otherwise.
        own = {
            key.removeprefix(prefix): tensors.get(_memory_of(value), value)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in weights.items()
            if key.startswith(prefix)
        }
        if has_plain_names(model):
            model.load_state_dict(own)
        else:
            with _no_process_group_needed():
                set_model_state_dict(model, own)


def _weights_of(model: torch.nn.Module) -> dict[str, Any]:
    if has_plain_names(model):
        return model.state_dict()
    with _no_process_group_needed():
        return get_model_state_dict(model)


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors only if they are the same memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return isinstance(tensor, DTensor), local.device, local.data_ptr(), local.stride(), tensor.shape, tensor.dtype


def _encode_value(value: object, name: str) -> str:
    try:
        return encode_value(value, name)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


@contextmanager
def _no_process_group_needed() -> Iterator[None]:
    """Suppress torch's warning about a missing process group in a single process."""
    if RankInWorld.current().world_size > 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*unavailable or uninitialized")
        yield
