"""What one job can make the operator hold and do is bounded, whatever stands in its spec and in its annotations."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from tests.counted_calls import calls_in
from tests.unit.core.builders import acts, job, observed, policy, transition

from elastipod_operator.core.actions import CreatePod
from elastipod_operator.core.growth_mode import GrowthMode
from elastipod_operator.core.plan import plan
from elastipod_operator.core.pod_runs import MAX_PODS
from elastipod_operator.core.quota import MAX_CACHED_SLOTS, quota_requests_for
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.record_codec import RecordError, decode, encode
from elastipod_operator.core.sizes import MAX_REPLICAS, SizeError, SizeRequest, Sizes, resolve
from elastipod_operator.core.snapshot import SpecLimits
from elastipod_operator.kube import job_annotations

MIB = 1 << 20
NOTE = Path(__file__).parents[3] / "docs/design/bounds.md"


def kept_bytes(work: Callable[[], object]) -> int:
    """Count the bytes that some work leaves in memory."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        held = work()
        after = tracemalloc.get_traced_memory()[0]
        del held
        return after - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        pytest.param(SizeRequest((MAX_REPLICAS + 1,), (None,)), "spec.replicaSpecs[].replicas", id="a fixed size"),
        pytest.param(
            SizeRequest((2,), (MAX_REPLICAS + 1,), elastic=True), "spec.replicaSpecs[].maxReplicas", id="the maximum"
        ),
        pytest.param(
            SizeRequest((0, 0), (MAX_REPLICAS, 1), elastic=True),
            "spec.replicaSpecs[].maxReplicas",
            id="maxima together",
        ),
        pytest.param(
            SizeRequest((2,), (None,), elastic=True, max_replicas=MAX_REPLICAS + 1),
            "spec.elasticPolicy.maxReplicas",
            id="the policy's maximum",
        ),
        pytest.param(
            SizeRequest((2,), (4,), elastic=True, spares=MAX_REPLICAS), "spec.replicaSpecs[].spares", id="with spares"
        ),
    ],
)
def test_a_job_of_too_many_replicas_is_refused_and_the_field_named(wish: SizeRequest, words: str) -> None:
    with pytest.raises(SizeError) as refused:
        resolve(wish)
    assert words in str(refused.value)
    assert str(MAX_REPLICAS) in str(refused.value)


def test_the_largest_job_is_accepted_and_its_sizes_take_no_memory_each() -> None:
    largest = SizeRequest((1,), (MAX_REPLICAS,), elastic=True)
    assert resolve(largest).maximum == MAX_REPLICAS
    assert kept_bytes(lambda: [resolve(largest) for _ in range(100)]) < MIB


def test_the_largest_job_costs_a_bounded_number_of_calls() -> None:
    snapshot = observed(
        job(Record(transition=transition(TransitionKind.START)), policy(2, MAX_REPLICAS, growth=GrowthMode.MAXIMUM))
    )
    assert len(acts(plan(snapshot), CreatePod)) == MAX_REPLICAS
    assert calls_in(lambda: plan(snapshot)) < 30 * MAX_REPLICAS


def test_a_record_of_more_pods_than_a_job_may_have_is_not_read() -> None:
    text = encode(Record(generation=1))
    for field, most in {"members": MAX_REPLICAS, "lost": MAX_PODS, "incarnations": MAX_PODS}.items():
        decode(text.replace(f'"{field}":[]', f'"{field}":[["w","0-{most - 1}"]]'))
        with pytest.raises(RecordError):
            decode(text.replace(f'"{field}":[]', f'"{field}":[["w","0-{most}"]]'))


@pytest.mark.slow
def test_records_that_were_read_are_kept_up_to_a_number_of_pods() -> None:
    """A text of a few bytes may stand for thousands of pods: counting texts bounds nothing."""
    text = encode(Record(generation=1))
    full = [f'[["w{n}","0-{MAX_REPLICAS - 1}"]]' for n in range(20)]
    texts = [text.replace('"members":[]', f'"members":{members}') for members in full]

    def read() -> None:
        for one in texts:
            job_annotations.decode_record(one)

    assert kept_bytes(read) < 24 * MIB


@pytest.mark.slow
def test_shares_that_were_worked_out_are_kept_up_to_a_number_of_pods() -> None:
    def work_out() -> None:
        for n in range(6):
            quota_requests_for(tuple(range(1, MAX_REPLICAS + 1)), (SpecLimits(f"w{n}", MAX_REPLICAS),))

    assert kept_bytes(work_out) < 35 * MIB
    assert quota_requests_for.weight <= MAX_CACHED_SLOTS


def test_sizes_of_few_values_are_a_tuple_and_of_many_a_range_that_reads_alike() -> None:
    many = resolve(SizeRequest((1,), (1000,), elastic=True))
    assert (many.minimum, many.maximum, many.fit(500), many.fit(0), 77 in many.allowed) == (1, 1000, 500, 0, True)
    bounded = resolve(SizeRequest((1,), (1000,), elastic=True, ceiling=600))
    assert (bounded.maximum, bounded.start, len(bounded.allowed)) == (600, 1, 600)
    assert replace(many, start=5) == Sizes(many.allowed, 5)


def table() -> list[tuple[int, str]]:
    """Give the limits that the design note states, and where it says that they stand."""
    rows = re.findall(r"^\| [^|]+ \| ([0-9]+) \| `([^`]+)` \|", NOTE.read_text(), re.MULTILINE)
    return [(int(limit), where) for limit, where in rows]


def test_the_design_note_states_every_limit_as_it_is() -> None:
    assert len(table()) > 15
    for limit, where in table():
        module, _, name = where.rpartition(".")
        assert getattr(import_module(f"elastipod_operator.{module}"), name) == limit, where
