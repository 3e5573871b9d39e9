"""Small facts that all ranks must share, as JSON over the default process group; a single process needs none.

JSON and not pickled objects: what arrives from another rank is data, never code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastipod.errors import CheckpointError, ElastipodError, FencedError

log = logging.getLogger(__name__)

T = TypeVar("T")

FENCED, FAILED = "fenced", "failed"


def rank_and_world() -> tuple[int, int]:
    """Give (rank, world size) of the default process group, (0, 1) where there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def from_rank_zero(decide: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``decide`` on rank 0 and give its (JSON-able) value on every rank. Collective; by default over the default group.

    What is raised there is raised on every rank: FencedError as itself, anything else as CheckpointError.
    """
    rank, world_size = rank_and_world()
    answer = capture_outcome(decide) if rank == 0 else {}
    if world_size > 1:
        answer = _broadcast(answer, group)
    value: T = unwrap_outcome(answer)
    return value


def all_gather_json(produce: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``produce`` on every rank and give all (JSON-able) values, by rank, on every rank. Collective; as `from_rank_zero`.

    When it fails anywhere, CheckpointError is raised everywhere and names the first rank that failed and why.
    """
    _, world_size = rank_and_world()
    mine = capture_outcome(produce)
    answers = _all_gather(mine, group) if world_size > 1 else [mine]
    return [unwrap_outcome(answer, f"rank {rank}: ") for rank, answer in enumerate(answers)]


def sum_over_ranks(value: float) -> float:
    """Add a number over all ranks, in float64. Collective."""
    if rank_and_world()[1] == 1:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=_device())
    dist.all_reduce(total)
    return float(total.item())


def unwrap_outcome(answer: Mapping[str, Any], whose: str = "") -> Any:
    """Give what a rank came to, or raise what it raised, with ``whose`` before it. answer: as `capture_outcome` made it."""
    if FENCED in answer:
        raise FencedError(answer[FENCED])
    if FAILED in answer:
        raise CheckpointError(f"{whose}{answer[FAILED]}")
    return answer["value"]


def capture_outcome(action: Callable[[], object]) -> dict[str, Any]:
    """Run something and give what came of it, value or failure, in a form that travels as JSON."""
    try:
        return {"value": action()}
    except FencedError as error:
        return {FENCED: str(error)}
    except (ElastipodError, OSError) as error:
        return {FAILED: str(error)}
    except Exception as error:  # the others wait for an answer, whatever went wrong here
        log.exception("this rank failed")
        return {FAILED: f"{type(error).__name__}: {error}"}


def _device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Give the device whose tensors a group can carry."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _encoded(value: object, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decoded(data: torch.Tensor) -> dict[str, Any]:
    content = bytearray(data.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(data)
    value: dict[str, Any] = json.loads(content)
    return value


def _broadcast(value: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    device = _device(group)
    data = _encoded(value, device)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0, group=group)
    if dist.get_rank() != 0:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0, group=group)
    return _decoded(data)


def _all_gather(value: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    device = _device(group)
    data = _encoded(value, device)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(each.item()) for each in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_decoded(part[:size]) for part, size in zip(parts, sizes, strict=True)]
