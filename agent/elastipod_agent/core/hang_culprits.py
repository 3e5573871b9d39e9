"""Which workers of a hang are to be killed, so that those that wait for them in a collective get free.

A collective of gloo that waits for a peer ends when that peer is gone, and by nothing else, so a rank that hangs is killed, not awaited.
Only where other workers of the job can go on with what they hold in memory: elsewhere all processes end anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastipod_agent.core.hang import Hang
from elastipod_agent.core.hang_message import main_thread

# Frames of the main thread of a worker that waits for others: a collective, a backward pass that reduces gradients, an agreement. DDP
# broadcasts buffers with a function of torch's C++ code.
_WAITS = ("torch/distributed/", "torch/autograd/", "elastipod/", "_sync_buffers (nn/parallel/distributed.py:")
_PLANNED_FAULT = "elastipod/chaos.py:"  # that waits for nobody, wherever it happens


@dataclass(frozen=True, slots=True)
class SuspectWorker:
    """One living worker of a hang.

    stacks: as the interpreter writes them, or "". is_unresponsive: it was asked for its stacks and did not write them. uses_device: it has
    a device open, whose collectives the main thread does not wait for where it calls them.
    """

    local_rank: int
    stacks: str = ""
    is_unresponsive: bool = False
    uses_device: bool = False


def hang_culprits(hang: Hang, suspects: Sequence[SuspectWorker]) -> frozenset[int]:
    """Give the local ranks that hang by themselves. Nobody where that is not known: then the operator's stop decides.

    A worker that is a step behind holds up those ahead, as does one without a step in this generation where another has made one; their
    steps of a generation before say nothing. One that does not even write its stacks is stopped, or stuck in the kernel. And
    one that is outside of any collective does not wait for a peer, unless it waits for a device.
    """
    steps: Mapping[int, int] = {one.local_rank: one.step if one.has_reported else -1 for one in hang.silent}
    newest = max(steps.values(), default=-1)
    return frozenset(
        one.local_rank
        for one in suspects
        if one.local_rank in steps
        and (steps[one.local_rank] < newest or one.is_unresponsive or _is_outside_of_collectives(one))
    )


def _is_outside_of_collectives(worker: SuspectWorker) -> bool:
    if not worker.stacks:
        return False
    frames = main_thread(worker.stacks)
    if any(_PLANNED_FAULT in frame for frame in frames):
        return True
    if worker.uses_device:
        return False
    return bool(frames) and not any(place in frame for frame in frames for place in _WAITS)
