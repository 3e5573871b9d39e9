"""The training state as checkpoints see it: tensors that this rank holds a box of, and plain values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from elastipod.checkpoints.plan import Chunk, Held, num_bytes
from elastipod.checkpoints.rng import random_state
from elastipod.checkpoints.values import packed
from elastipod.errors import CheckpointError
from elastipod.ranks import rank_and_world
from elastipod.torch_names import DTensor

SCHEDULER = "scheduler"
RANDOM = "random"  # one per rank, under "random.<rank>"


class Scheduler(Protocol):
    """Anything that gives and takes its state as a dictionary of plain values, as torch's LR schedulers do."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class State:
    """One look at the live state; its tensors are those that training goes on with, nothing is copied."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, rank: int
    ) -> None:
        """Collective, as far as torch's get_state_dict is. Raises CheckpointError for a value that cannot be saved."""
        self.nested = nested_state(model, optimizer)
        if scheduler is not None:
            self.nested[SCHEDULER] = _packed(scheduler.state_dict(), "the scheduler's state")
        self.nested[RANDOM] = {str(rank): random_state()}
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(self.nested, is_coordinator=True)
        self.flat: dict[str, Any] = self._planner.state_dict

    def signature(self) -> tuple[object, ...]:
        """Give what a plan depends on; equal signatures have equal plans."""
        return tuple(
            (key, value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else key
            for key, value in self.flat.items()
        )

    def held(self, node: str) -> Held:
        """List what this rank holds."""
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
                continue  # a rank beyond the end of a small sharded tensor
            bytes_of_box = num_bytes(sizes, dtype.itemsize)
            name = str(dtype).removeprefix("torch.")
            chunks.append(Chunk(key, tuple(paths[key]), name, shape, tuple(data.chunk.offsets), sizes, bytes_of_box))
        return Held(node, tuple(chunks), tuple(values))

    def tensor(self, chunk: Chunk) -> torch.Tensor:
        """Give the live tensor of a chunk that this rank holds."""
        found = self._planner.lookup_object(MetadataIndex(chunk.key, torch.Size(chunk.offsets)))
        assert isinstance(found, torch.Tensor), chunk.key
        return found.detach()

    def values(self) -> dict[str, str]:
        """Give the plain values that this rank holds, packed. Raises CheckpointError for one that cannot be saved."""
        return {key: _packed(value, key) for key, value in self.flat.items() if not isinstance(value, torch.Tensor)}


def nested_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Give model and optimizer as nested dictionaries of live tensors, under names that do not depend on DDP or sharding.

    Raises CheckpointError for an optimizer of another model.
    """
    own = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        raise CheckpointError(
            f"{strangers} parameters of the optimizer are not the model's; make the optimizer from model.parameters(), after the "
            "model was sharded (fully_shard) or otherwise given new parameters"
        )
    with _no_process_group_needed():
        weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def make_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Give an optimizer that has made no step the state that its first step would make, with no values in it yet.

    torch's own way makes that step, with gradients of zeros: it costs several times what the loading costs, in memory too. It
    is left to do so for optimizers that are not known here. Gives whether the state was made.
    """
    names = _MOMENTS.get(type(optimizer))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if names is None or optimizer.state or any(parameter.grad is not None for parameter in parameters):
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = [name for name, is_kept in names.items() if parameter.requires_grad and is_kept(group)]
            if not kept:
                continue
            state = optimizer.state[parameter] = {
                name: torch.empty_like(parameter, requires_grad=False, memory_format=torch.preserve_format)
                for name in kept
            }
            if "exp_avg" in state:
                is_fused = bool(group.get("fused"))
                is_wide = torch.get_default_dtype() == torch.float64 and not is_fused
                device = parameter.device if is_fused or group.get("capturable") else None
                state["step"] = torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=device)
    return bool(optimizer.state)


_ADAM: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "exp_avg": lambda group: True,
    "exp_avg_sq": lambda group: True,
    "max_exp_avg_sq": lambda group: bool(group["amsgrad"]),
}
_MOMENTS: Mapping[type, Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: {"momentum_buffer": lambda group: bool(group["momentum"])},
}


def apply_state(nested: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the state to model and optimizer."""
    live = {_memory_of(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # The parameters themselves, where what was filled is their memory: torch would copy it onto itself otherwise.
    weights = {
        key: live.get(_memory_of(value), value) if isinstance(value, torch.Tensor) else value
        for key, value in nested["model"].items()
    }
    with _no_process_group_needed():
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=nested["optimizer"])


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Give what two tensors have in common only if they are two names of the same numbers."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return isinstance(tensor, DTensor), local.device, local.data_ptr(), local.stride(), tensor.shape, tensor.dtype


def _packed(value: object, name: str) -> str:
    try:
        return packed(value, name)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


@contextmanager
def _no_process_group_needed() -> Iterator[None]:
    """torch warns of a missing process group even where one process is all there is."""
    if rank_and_world()[1] > 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*unavailable or uninitialized")
        yield
