"""Records that somebody edited: what they say is refused or decided about, whatever stands in them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.slow import all_but_first
from tests.unit.core.builders import (
    NOW,
    faulted,
    job,
    observed,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import NodeFaults, PartialGang, Record, TransitionKind
from elastipod_operator.core.record_codec import RecordError, decode, encode
from elastipod_operator.core.snapshot import ObservedAgent, ObservedPod

DRAINS = transition(TransitionKind.RECOVERY, not_before=NOW + seconds(5), graceful=True)
RECORDS = {
    "trains": trains(),
    "in transition": trains(transition=DRAINS),
    "gives places back": trains(transition=DRAINS, gang=PartialGang(NOW, released_until=NOW + seconds(20))),
    "has a past": trains(
        window_since=NOW, resized_at=NOW, recovered_at=NOW, fault_at=NOW, started_at=NOW, first_pod_at=NOW, resize_began_at=NOW,
        resize_failed_at=NOW, suspended_time=timedelta(seconds=5), node_faults=(NodeFaults("node-1", 1, NOW),),
    ),
    "has ended": trains(outcome="Failed", outcome_reason="WorkerCrash", ended_at=NOW),
}  # fmt: skip
EDITS: tuple[object, ...] = (
    "9999-12-31T23:59:59.999Z",
    "0001-01-01T00:00:00Z",
    "2999-12-31T00:00:00Z",
    10**30,
    -1,
    None,
    [],
    "x",
)
PODS: tuple[list[tuple[ObservedPod, ObservedAgent]], ...] = (
    [],
    [(pod(0), faulted()), (pod(1), running())],
    [(pod(n), ready()) for n in range(4)],
)


def edited(body: Any, value: object) -> Iterator[Any]:
    """Give copies of a record's body, in each of which one thing says something else."""

    def places(part: Any, way: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if way:
            yield way
        for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
            yield from places(part[key], (*way, key))

    for *way, last in places(body, ()):
        changed = part = copy.deepcopy(body)
        for key in way:
            part = part[key]
        part[last] = value
        yield changed


@pytest.mark.parametrize("record", all_but_first(RECORDS.values(), 2), ids=RECORDS)
def test_whatever_stands_in_a_record_ends_no_decision(record: Record) -> None:
    decided = 0
    for body in (body for value in EDITS for body in edited(json.loads(encode(record)), value)):
        try:
            found = decode(json.dumps(body))
        except RecordError:
            continue
        for pods, deleting_since in ((pods, at) for pods in PODS for at in (None, NOW)):
            snapshot = observed(job(found, policy(), deleting_since=deleting_since), pods)
            for wait_s in (0, 5000):
                encode(plan(replace(snapshot, now=NOW + seconds(wait_s))).record)
                decided += 1
    assert decided > 100
