"""What each simulated world is measured with; every case runs in a process of its own, for its memory."""

from __future__ import annotations

import json
import resource
import sys
import time
from statistics import median
from typing import Any

from bench.many_ranks.world import Cost, SimulatedCommunicator, run

from elastipod.checkpoint.collective_planning import plan_across_ranks
from elastipod.checkpoint.save_plan import Chunk, LocalState, SavePlan

PER_NODE = 8
SHAPES = ((4096, 4096), (16384, 4096), (4096, 16384), (4096,))  # as the layers of a transformer have them


def local_state_of(rank: int, world_size: int, tensors: int) -> LocalState:
    """Give what a rank of FSDP holds: its rows of each tensor."""
    chunks: list[Chunk] = []
    for number in range(tensors):
        shape = SHAPES[number % len(SHAPES)]
        start, end = shape[0] * rank // world_size, shape[0] * (rank + 1) // world_size
        sizes = (end - start, *shape[1:])
        num_bytes = 4 * sizes[0] * (shape[1] if len(shape) > 1 else 1)
        key = f"model.layers.{number // 9}.block.{number % 9}.weight"
        offsets = (start, *(0 for _ in shape[1:]))
        chunks.append(
            Chunk(key, ("model", f"layers.{number // 9}", number % 9), "float32", shape, offsets, sizes, num_bytes)
        )
    values = (("optimizer.param_groups", ("optimizer", "param_groups")), (f"random.{rank}", ("random", str(rank))))
    return LocalState(f"node-{rank // PER_NODE:04d}", tuple(chunks), values)


def plan(world_size: int, tensors: int) -> dict[str, Any]:
    """Have all ranks agree on the plan of a state, which all but rank 0 read then. Leaders of nodes do more than other ranks."""
    held = [local_state_of(rank, world_size, tensors) for rank in range(world_size)]  # not counted, as in `flat`

    def body(comm: SimulatedCommunicator) -> str:
        return plan_across_ranks(comm, lambda: held[comm.rank], is_in_memory=True)[0]

    costs, (text, *_) = run(world_size, body)
    before, began = _rss_bytes(), time.thread_time()
    made = SavePlan.from_json(text)
    made.layout(1)
    reading = {"cpu_s": time.thread_time() - began, "memory_bytes": max(0, _rss_bytes() - before)}
    return {**_summed(costs), "reading": reading, "plan_bytes": len(text), "chunks": len(made.chunks)}


def flat(world_size: int, tensors: int) -> dict[str, Any]:
    """What each rank did before: it heard every rank's chunks as JSON, and made an object of each (one rank is measured)."""
    texts = [_as_json(local_state_of(rank, world_size, tensors)) for rank in range(world_size)]
    before, began = _rss_bytes(), time.thread_time()
    chunks: dict[object, Chunk] = {}
    holders: dict[object, list[int]] = {}
    everyone = [[Chunk(*map(_tuples, each)) for each in json.loads(text)] for text in texts]
    for rank, own in enumerate(everyone):
        for chunk in own:
            chunks.setdefault(chunk.index, chunk)
            holders.setdefault(chunk.index, []).append(rank)
    seconds = time.thread_time() - began
    return {
        "cpu_s": seconds,
        "got_bytes": sum(map(len, texts)),
        "memory_bytes": _rss_bytes() - before,
        "connections": 2 * (world_size - 1),
        "chunks": len(chunks),
    }


def words(world_size: int, _: int) -> dict[str, Any]:
    """Agree once on three small facts, as every save does before its copy."""
    costs, _results = run(
        world_size,
        lambda comm: comm.training_all_reduce(
            lambda: [True, True, [3, 0]], lambda told: [all(map(all, told)), True, 0]
        ),
    )
    return _summed(costs)


def _summed(costs: list[Cost]) -> dict[str, Any]:
    others = costs[1:]
    return {
        "rank_0": {"cpu_s": costs[0].cpu_s, "got_bytes": costs[0].got_bytes, "connections": costs[0].connections},
        "others": {
            "cpu_s": max(each.cpu_s for each in others),
            "cpu_median_s": median(each.cpu_s for each in others),
            "got_bytes": max(each.got_bytes for each in others),
            "connections": max(each.connections for each in others),
        },
    }


def _as_json(held: LocalState) -> str:
    return json.dumps([[c.key, c.path, c.dtype, c.shape, c.offsets, c.sizes, c.num_bytes] for c in held.chunks])


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    case, world_size, tensors = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({"plan": plan, "flat": flat, "words": words}[case](world_size, tensors)))
