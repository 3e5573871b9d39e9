"""This agent beside the original one: the same requests in every state, and every difference meant and explained."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e.original_differences import ALLOWED, unexplained
from tests.e2e.original_script import LANES, Observation, compare, run_lane
from tests.e2e.original_steps import STEPS
from tests.e2e.original_walk import random_walk
from tests.long_runs import LongRun
from tests.peers import peer_python

MAKES = ("original", "elastipod")
WALKS, CALLS = 12, 250


@pytest.mark.long("differential")
def test_every_call_in_every_state_is_answered_alike(tmp_path: Path) -> None:
    peer_python("original")  # made before many agents want it
    # The longest first.
    lanes = sorted(LANES, key=lambda lane: -sum(not step.lanes or lane.name in step.lanes for step in STEPS))
    with ThreadPoolExecutor(len(lanes) * len(MAKES)) as pool:
        runs = {(lane.name, make): pool.submit(run_lane, lane, tmp_path, make) for make in MAKES for lane in lanes}
    seen: dict[tuple[str, str], dict[str, Observation]] = {key: run.result() for key, run in runs.items()}

    found = [
        difference
        for lane in lanes
        for difference in compare(lane.name, seen[lane.name, "elastipod"], seen[lane.name, "original"])
    ]
    steps = sum(len(seen[lane.name, "original"]) for lane in lanes)
    print(f"{steps} steps in {len(lanes)} states; {len(found)} fields differ, for {len(ALLOWED)} reasons")
    assert not unexplained(found), "\n".join(map(str, unexplained(found)))
    unused = [allowed for allowed in ALLOWED if not any(allowed.covers(difference) for difference in found)]
    assert not unused, f"no difference is left for these reasons: {unused}"


@pytest.mark.timeout(3600)
@pytest.mark.long("differential")
def test_random_calls_are_answered_alike(tmp_path: Path, long_run: LongRun) -> None:
    peer_python("original")
    rng = random.Random(long_run.seed)
    seeds = [rng.randrange(2**32) for _ in range(WALKS)]
    with ThreadPoolExecutor(2) as pool:
        walks = list(pool.map(lambda seed: random_walk(seed, CALLS, tmp_path), seeds))
    visits = sum((walk.visits for walk in walks), Counter[str]())
    long_run.count(
        walks=len(walks),
        calls=sum(walk.calls for walk in walks),
        meant_differences=sum(len(walk.differences) for walk in walks),
        **{f"calls_while_{state}": number for state, number in sorted(visits.items())},
    )
    not_meant = [
        f"walk {seed}: {difference}"
        for seed, walk in zip(seeds, walks, strict=True)
        for difference in unexplained(walk.differences)
    ]
    assert not not_meant, "\n".join(not_meant)
    assert set(visits) == {"ready", "running", "completed", "faulted", "stopping"}
