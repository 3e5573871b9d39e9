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
from elastipod.message_slots import BODY_BYTES, parse_slot, slot_of
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


def all_gather_texts(
    text: str, group: dist.ProcessGroup | None = None, check_size: Callable[[int], object] = lambda size: None
) -> list[str]:
    """Give every rank's text, by rank. Collective. check_size: raises for a number of bytes that a rank announces and must not send."""
    device, data = group_device(group), text.encode()
    slots = gather(_as_tensor(slot_of(data), device), group)
    starts = [parse_slot(_as_bytes(slot)) for slot in slots]
    for _, left in starts:
        check_size(BODY_BYTES + left)
    longest = max(left for _, left in starts)
    if longest <= 0:
        return [start.decode() for start, _ in starts]
    rests = gather(_as_tensor(data[BODY_BYTES:].ljust(longest, b"\0"), device), group)
    return [
        (start + _as_bytes(rest[: max(left, 0)])).decode() for (start, left), rest in zip(starts, rests, strict=True)
    ]


def broadcast_text(source: int, text: str | None, check_size: Callable[[int], object] = lambda size: None) -> str:
    """Give the text of one rank on every rank; only there it must not be None. Collective. check_size: as for `all_gather_texts`."""
    device, data = group_device(), b"" if text is None else text.encode()
    slot = _as_tensor(slot_of(data), device)
    dist.broadcast(slot, src=source)
    start, left = parse_slot(_as_bytes(slot))
    check_size(BODY_BYTES + left)
    if left <= 0:
        return start.decode()
    rest = _as_tensor(data[BODY_BYTES:].ljust(left, b"\0"), device)
    dist.broadcast(rest, src=source)
    return (start + _as_bytes(rest)).decode()


def _as_tensor(data: bytes | bytearray, device: torch.device) -> torch.Tensor:
    """Give bytes as a tensor of one dimension, to be sent; at least one byte."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _as_bytes(data: torch.Tensor) -> bytes:
    """Give the bytes that another rank has sent."""
    content = bytearray(data.numel())
    if content:
        torch.frombuffer(content, dtype=torch.uint8).copy_(data)
    return bytes(content)


def gather(own: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Give every rank's tensor of one dimension as rows, by rank. Collective. own: as large on all ranks, on the group's device."""
    size = dist.get_world_size(group)
    # With gloo it takes two thirds of the time of a collective into a list of tensors, and sends the same.
    gathered = torch.empty(size * own.numel(), dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(gathered, own, group=group)
    return gathered.view(size, own.numel())


def _all_gather(value: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    return [json.loads(text) for text in all_gather_texts(json.dumps(value), group)]
