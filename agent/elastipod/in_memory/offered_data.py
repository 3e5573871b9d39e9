"""What ranks tell each other of their data, with their offers: then a world needs no further exchange for it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from elastipod.data import ElasticBatches
from elastipod.in_memory.offer_wire import RankData
from elastipod.in_memory.rank import RankState


def offered_data(
    plan: ElasticBatches, cut: Sequence[object], known: ElasticBatches | None, rank: RankState
) -> RankData:
    """Give what a rank tells. cut: how its script divides batches, as JSON values. known: its plan where it has trained, else None."""
    described = [plan.state_dict(plan.first_step)["source"], plan.epochs, plan.global_batch, cut]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    if known is None:
        return RankData(digest)
    own = () if rank.completed is None else (rank.completed, rank.completed + 1)
    steps = [step for step in (*own, *rank.images) if known.first_step <= step <= known.total_steps]
    return RankData(digest, {step: known.samples_after(step) for step in steps})


def position_text(plan: ElasticBatches, step: int, samples: int) -> str:
    """Give the position after a step as another rank with the same plan has it, which has trained so many samples."""
    return json.dumps({**plan.state_dict(plan.first_step), "step": step, "samples": samples})
