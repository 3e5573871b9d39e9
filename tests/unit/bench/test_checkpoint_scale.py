"""What each rank's work on the plan of a checkpoint is: all of it, in the agreement and after it."""

from __future__ import annotations

from typing import Any

import pytest
from bench import checkpoint_scale
from bench.many_ranks import cases
from bench.many_ranks.world import Cost


def measured(**others: float) -> dict[str, Any]:
    ranks = {"cpu_s": 0.5, "got_bytes": 1e6, "connections": 7}
    return {
        "rank_0": ranks,
        "others": {**ranks, "cpu_s": 0.25, "cpu_median_s": 0.01, **others},
        "reading": {"cpu_s": 0.04, "memory_bytes": 1e6},
    }


def test_another_rank_is_shown_with_its_part_in_the_agreement_and_with_reading_the_plan() -> None:
    flat = {"cpu_s": 4.0, "got_bytes": 1e9, "memory_bytes": 1e9, "connections": 510}
    rows = checkpoint_scale._rows(256, 900, {"plan": [measured()], "flat": [flat], "words": [measured()]})
    found = {row.metric: row.ours.median for row in rows if row.ours is not None}
    assert found["plan: processor, rank 0, 256 ranks"] == 0.5
    assert found["plan: processor, another rank, 256 ranks"] == pytest.approx(0.05)
    assert found["plan: processor, the busiest other rank, 256 ranks"] == pytest.approx(0.29)


def test_the_work_of_others_is_that_of_the_busiest_and_of_the_middle_one() -> None:
    found = cases._summed([Cost(cpu_s=each) for each in (9.0, 1.0, 2.0, 6.0)])
    assert (found["rank_0"]["cpu_s"], found["others"]["cpu_s"], found["others"]["cpu_median_s"]) == (9.0, 6.0, 2.0)
