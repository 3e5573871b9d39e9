"""Jobs of thousands of pods: a decision costs twice as much for twice the pods, and the job object stays small."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    faulted,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    trains,
    transition,
)

from elastipod_operator.core.actions import StartWorkers, StopWorkers
from elastipod_operator.core.history import MAX_HISTORY, HistoryEntry, encode_history
from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_HISTORY, ANNOTATION_SIZE, ANNOTATION_STATE
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.snapshot import Policy, Snapshot
from elastipod_operator.kube.applied import encode_applied

LIMIT_BYTES = 256 * 1024


def wishes(size: int) -> Policy:
    """Give a policy for so many pods at least and a quarter more at most."""
    base = policy(size, size + size // 4, scaling_timeout=timedelta(0))
    return replace(base, sizes=replace(base.sizes, start=size))


def begins(size: int) -> Snapshot:
    """All agents of a new job are ready."""
    record = Record(transition=transition(TransitionKind.START, target_size=size, from_size=0))
    return observed(job(record, wishes(size)), [(pod(n), ready()) for n in range(size)])


def comes_up(size: int) -> Snapshot:
    """Half of the agents were started, the others are not yet."""
    pods = [(pod(n), running() if n % 2 else ready()) for n in range(size)]
    return observed(job(trains(size, running_since=None), wishes(size)), pods)


def trains_on(size: int) -> Snapshot:
    """All train; nothing is to be done. What lacks to the maximum is loading."""
    pods = [(pod(n), running()) for n in range(size)] + [
        (pod(n), ready(warming=True, answering_since=NOW)) for n in range(size, size + size // 4)
    ]
    return observed(job(trains(size), wishes(size)), pods)


def breaks(size: int) -> Snapshot:
    """One worker failed."""
    return observed(job(trains(size), wishes(size)), [(pod(n), running() if n else faulted()) for n in range(size)])


def calls_in(work: Callable[[], object]) -> int:
    """Count the calls of functions, comparisons of our own objects among them: the same on every machine."""
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return number


@pytest.mark.parametrize("situation", [begins, comes_up, trains_on, breaks])
def test_twice_the_pods_cost_twice_the_work(situation: Callable[[int], Snapshot]) -> None:
    small, large = situation(200), situation(400)
    assert calls_in(lambda: plan(large)) < 2.2 * calls_in(lambda: plan(small))


def test_the_situations_are_what_they_are_called() -> None:
    assert len(acts(plan(begins(200)), StartWorkers)) == 200
    assert len(acts(plan(comes_up(200)), StartWorkers)) == 100
    assert not plan(trains_on(200)).actions
    assert "50 more replicas import" in str(plan(trains_on(200)).conditions)
    assert len(acts(plan(breaks(200)), StopWorkers)) == 200


def test_a_job_of_4000_pods_at_the_end_of_its_days_is_a_small_object() -> None:
    """Every third pod made anew up to nine times, hundreds given up, a full history, templates of 20 KiB that were taken up."""
    members = tuple(pid(n, n * 7 % 10 if n % 3 == 0 else 0) for n in range(4000))
    lost = tuple(pid(n, n % 5) for n in range(0, 4000, 9))
    record = trains(
        4000,
        900,
        members=members,
        lost=lost,
        transition=transition(TransitionKind.RECOVERY, target_size=4000, message="x" * 1000),
    )
    assert decode(encode(record)).members == members
    entry = HistoryEntry(
        generation=900, from_size=4000, to_size=3999, kind=TransitionKind.RECOVERY, cause=OpenReason("ReplacementTimeout"), at=NOW,
        detected_at=NOW, running_at=NOW,
    )  # fmt: skip
    script = "\n".join(f"export SETTING_{n}={n * 7919 % 1000003:x}" for n in range(800))
    template = {"spec": {"containers": [{"name": "trainer", "image": "train:1", "command": ["sh", "-c", script]}]}}
    spec = {"nprocPerNode": "8", "replicaSpecs": [{"name": "workers", "replicas": 4000, "template": template}]}
    annotations = {
        ANNOTATION_STATE: encode(record),
        ANNOTATION_SIZE: "4000/4000/4000",
        ANNOTATION_HISTORY: encode_history((entry,) * (MAX_HISTORY + 10)),
        ANNOTATION_APPLIED: encode_applied(spec),
    }
    told = plan(observed(job(record, wishes(4000)), [(pod(member), running(900)) for member in members]))
    conditions = [
        {"type": c.type, "status": str(c.status), "reason": c.reason, "message": c.message} for c in told.conditions
    ]
    body = {"metadata": {"annotations": annotations}, "spec": spec, "status": {**told.status, "conditions": conditions}}
    assert len(json.dumps(template)) > 20_000
    assert len(json.dumps(body, default=str).encode()) < LIMIT_BYTES / 2  # as much again is left for managedFields
