"""Small facts that all ranks must share, as JSON over the default process group; a single process needs none.

JSON and not pickled objects: what arrives from another rank is data, never code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastipod.errors import CheckpointError, FencedError

T = TypeVar("T")

_FENCED, _FAILED = "fenced", "failed"


def rank_and_world() -> tuple[int, int]:
    """Give (rank, world size) of the default process group, (0, 1) where there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def from_rank_zero(decide: Callable[[], T]) -> T:
    """Run ``decide`` on rank 0 and give its (JSON-able) value on every rank. Collective.

    An OSError or CheckpointError there is raised on every rank: FencedError as itself, others as CheckpointError.
    """
    rank, world_size = rank_and_world()
    answer = _tried(decide) if rank == 0 else {}
    if world_size > 1:
        answer = _broadcast(answer)
    if _FENCED in answer:
        raise FencedError(answer[_FENCED])
    if _FAILED in answer:
        raise CheckpointError(answer[_FAILED])
    value: T = answer["value"]
    return value


def from_every_rank(produce: Callable[[], T]) -> list[T]:
    """Run ``produce`` on every rank and give all (JSON-able) values, by rank, on every rank. Collective.

    When it fails anywhere, CheckpointError is raised everywhere and names the first rank that failed and why.
    """
    _, world_size = rank_and_world()
    mine = _tried(produce)
    answers = _all_gather(mine) if world_size > 1 else [mine]
    for rank, answer in enumerate(answers):
        if _FENCED in answer:
            raise FencedError(answer[_FENCED])
        if _FAILED in answer:
            raise CheckpointError(f"rank {rank}: {answer[_FAILED]}")
    return [answer["value"] for answer in answers]


def sum_over_ranks(value: float) -> float:
    """Add a number over all ranks, in float64. Collective."""
    if rank_and_world()[1] == 1:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=_device())
    dist.all_reduce(total)
    return float(total.item())


def _tried(action: Callable[[], T]) -> dict[str, Any]:
    try:
        return {"value": action()}
    except FencedError as error:
        return {_FENCED: str(error)}
    except (CheckpointError, OSError) as error:
        return {_FAILED: str(error)}


def _device() -> torch.device:
    """Give the device whose tensors the default group can carry."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _encoded(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device())


def _decoded(data: torch.Tensor) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(bytes(data.tolist()))
    return value


def _broadcast(value: dict[str, Any]) -> dict[str, Any]:
    data = _encoded(value)
    length = torch.tensor([len(data)], dtype=torch.int64, device=_device())
    dist.broadcast(length, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=_device())
    dist.broadcast(data, src=0)
    return _decoded(data)


def _all_gather(value: dict[str, Any]) -> list[dict[str, Any]]:
    data = _encoded(value)
    length = torch.tensor([len(data)], dtype=torch.int64, device=_device())
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    sizes = [int(each.item()) for each in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_device())
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [_decoded(part[:size]) for part, size in zip(parts, sizes, strict=True)]
