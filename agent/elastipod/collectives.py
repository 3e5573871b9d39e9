"""Collectives over the default process group for small facts: JSON values, numbers, and what became of an action.

Values travel as JSON and are never pickled, so what arrives from another rank is data and cannot run as code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastipod.errors import CheckpointError, ElastipodError, FencedError
from elastipod.rank_in_world import RankInWorld

log = logging.getLogger(__name__)

T = TypeVar("T")

FENCED, FAILED = "fenced", "failed"


def all_gather_json(produce: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``produce`` on every rank and give all results, in rank order, on every rank. Collective.

    Results must be JSON values. group: by default the default process group. A failure on any rank is raised on every rank:
    FencedError as itself, anything else as CheckpointError that names the first rank that failed.
    """
    outcome = capture_outcome(produce)
    outcomes = _all_gather(outcome, group) if RankInWorld.current().world_size > 1 else [outcome]
    return [unwrap_outcome(each, f"rank {rank}: ") for rank, each in enumerate(outcomes)]


def sum_over_ranks(value: float) -> float:
    """Give the sum of ``value`` over all ranks of the default process group, in float64. Collective."""
    if RankInWorld.current().world_size == 1:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=group_device())
    dist.all_reduce(total)
    return float(total.item())


def capture_outcome(action: Callable[[], object]) -> dict[str, Any]:
    """Run ``action`` and give its result or its failure as a JSON object, to be sent to other ranks. Never raises Exception."""
    try:
        return {"value": action()}
    except FencedError as error:
        return {FENCED: str(error)}
    except (ElastipodError, OSError) as error:
        return {FAILED: str(error)}
    except Exception as error:  # the other ranks wait for an answer, whatever went wrong here
        log.exception("this rank failed")
        return {FAILED: f"{type(error).__name__}: {error}"}


def unwrap_outcome(outcome: Mapping[str, Any], prefix: str = "") -> Any:
    """Give the result in an outcome of `capture_outcome`, or raise its failure.

    prefix: put in front of the text of a CheckpointError. Raises FencedError, CheckpointError.
    """
    if FENCED in outcome:
        raise FencedError(outcome[FENCED])
    if FAILED in outcome:
        raise CheckpointError(f"{prefix}{outcome[FAILED]}")
    return outcome["value"]


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Give the device whose tensors a group can carry."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def text_as_tensor(text: str, device: torch.device) -> torch.Tensor:
    """Give a text's bytes as a tensor, to be sent."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def text_of_tensor(data: torch.Tensor) -> str:
    """Give the text that another rank sent as bytes."""
    content = bytearray(data.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(data)
    return content.decode()


def all_gather_texts(
    text: str, group: dist.ProcessGroup | None = None, check_size: Callable[[int], object] = lambda size: None
) -> list[str]:
    """Give every rank's text, by rank. Collective. check_size: raises for a number of bytes that a rank announces and must not send."""
    device = group_device(group)
    data = text_as_tensor(text, device)
    sizes: list[int] = gather(torch.tensor([len(data)], dtype=torch.int64, device=device), group).flatten().tolist()
    for size in sizes:
        check_size(size)
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    return [text_of_tensor(part[:size]) for part, size in zip(gather(padded, group), sizes, strict=True)]


def gather(own: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Give every rank's tensor of one dimension as rows, by rank. Collective. own: as large on all ranks, on the group's device."""
    size = dist.get_world_size(group)
    # With gloo it takes two thirds of the time of a collective into a list of tensors, and sends the same.
    gathered = torch.empty(size * own.numel(), dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(gathered, own, group=group)
    return gathered.view(size, own.numel())


def _all_gather(value: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    return [json.loads(text) for text in all_gather_texts(json.dumps(value), group)]
