"""One number that shows whether optimizer state came through a resize unharmed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
_PART = 1 << 16  # elements


def optimizer_norm(optimizer: torch.optim.Optimizer) -> float:
    """Give the L2 norm of Adam's first and second moments over the whole model, the same on every rank.

    Collective when any state is sharded. Sharded state (DTensors of FSDP2) is summed over the ranks, each element once
    however often it is replicated. Plain tensors, which DDP keeps equal on every rank, are taken from this rank. Sums are
    float64, so the norm depends on the sharding only by rounding of about 1e-15. 0.0 before the first step.
    """
    from elastipod.collectives import sum_over_ranks

    sharded = replicated = 0.0
    for tensor in _moments(optimizer):
        copies = _copies(tensor)
        if copies is None:
            replicated += _square(tensor)
        else:
            sharded += _square(tensor.to_local()) / copies  # type: ignore[attr-defined]  # a DTensor
    return math.sqrt(replicated + (sum_over_ranks(sharded) if is_sharded(optimizer) else 0.0))


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether any of the moments is distributed over ranks."""
    return any(_copies(tensor) is not None for tensor in _moments(optimizer))


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states: list[dict[str, Any]] = list(optimizer.state.values())
    return [state[name] for state in states for name in MOMENTS if name in state]


def _copies(tensor: torch.Tensor) -> int | None:
    """Give how many ranks hold each element of a distributed tensor, None for a plain one."""
    from elastipod.torch_compat import DTensor

    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    return math.prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate())


def _square(tensor: torch.Tensor) -> float:
    """Sum the squares, on a CPU in parts that fit into a cache: torch's norm with a wider type is slower there, as it copies all."""
    import torch

    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.device.type != "cpu":  # a part would cost as much as the launch of its kernels
        return float(torch.linalg.vector_norm(plain, dtype=torch.float64)) ** 2
    parts = (part.double() for part in torch.split(plain.reshape(-1), _PART))
    return float(sum(part.dot(part) for part in parts))
