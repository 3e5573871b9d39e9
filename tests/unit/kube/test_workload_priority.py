"""Where the priority of a Workload comes from, and what an edited one changes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.kube.bodies import job_body
from tests.unit.kube.queue_bodies import admitted, workload_body
from tests.unit.kube.workload_bodies import POD, Body, ask, two_specs

from elastipod_operator.kube.workloads import (
    Priority,
    PrioritySource,
    base_priority_source,
    increment_priority,
    is_placed_alike,
    own_priority_source,
    ranked,
    workload_fact,
)


def labelled(name: str) -> Body:
    return {"metadata": {"labels": {"kueue.x-k8s.io/priority-class": name}}, "spec": {}}


@pytest.mark.parametrize(
    ("labels", "base", "elastic", "wish"),
    [
        ({"kueue.x-k8s.io/priority-class": "a"}, labelled("b"), None, PrioritySource("WorkloadPriorityClass", "a")),
        ({}, labelled("b"), labelled("c"), PrioritySource("WorkloadPriorityClass", "b")),
        ({}, {"spec": POD}, labelled("c"), PrioritySource("WorkloadPriorityClass", "c")),
        ({}, {"spec": POD}, None, PrioritySource("PriorityClass", "high")),
        ({}, {"spec": {}}, {"spec": POD}, PrioritySource()),
        ({}, {"metadata": None, "spec": None}, {}, PrioritySource()),
    ],
)
def test_where_the_priority_of_a_base_comes_from(labels: Body, base: Body, elastic: Body, wish: PrioritySource) -> None:
    spec = {"replicaSpecs": [{"name": "base", "template": base}, {"name": "elastic", "template": elastic}]}
    assert base_priority_source(job_body(labels=labels), spec) == wish


@pytest.mark.parametrize(
    ("number", "counts", "base", "elastic", "name"),
    [
        (1, {"elastic": 1}, "high", "low", "low"),
        (1, {"elastic": 1}, "", "low", "low"),
        (1, {"elastic": 1}, "high", "high", ""),
        (1, {"elastic": 1}, "high", "", ""),
        (1, {"base": 1, "elastic": 1}, "high", "low", ""),
        (1, {"base": 1, "elastic": 0}, "high", "low", ""),
        (0, {"elastic": 1}, "high", "low", ""),
    ],
)
def test_an_elastic_spec_with_a_class_of_its_own_uses_it(
    number: int, counts: dict[str, Any], base: str, elastic: str, name: str
) -> None:
    spec = two_specs({"spec": {"priorityClassName": base}}, {"spec": {"priorityClassName": elastic}})
    assert own_priority_source(spec, ask(number, **counts)) == (PrioritySource(name=name) if name else None)


@pytest.mark.parametrize(
    ("base", "extras"),
    [
        (0, -1_000_000_000),
        (-10, -1_000_000_010),
        (5, -999_999_995),
        (2_000_000_000, -999_000_000),
        (-(2**31), -1_001_000_000),
    ],
)
def test_extras_stand_below_every_base(base: int, extras: int) -> None:
    assert increment_priority(base) == Priority(extras)
    assert -(2**31) <= extras < 2**31


def test_specs_that_ask_for_the_same_nodes() -> None:
    a, b = two_specs()["replicaSpecs"]
    assert is_placed_alike(a, b)
    assert is_placed_alike(a, {**b, "template": {"spec": {**POD, "containers": []}}})
    assert not is_placed_alike(a, {**b, "template": {"spec": {**POD, "nodeSelector": {"pool": "spot"}}}})
    assert is_placed_alike({"template": {"spec": {"nodeSelector": {}}}}, {"template": None})


# -- priorities that were edited


def rank(
    *,
    wish: str = "",
    ref: tuple[str, str] | None = None,
    priority: int = 0,
    number: int = 0,
    base: int | None = None,
    elastic: str = "",
    reserved: bool = True,
) -> tuple[bool, bool]:
    """Give whether a Workload's priority is another than the job wishes, and whether that must stay so."""
    named = {"priorityClassRef": {"kind": ref[0], "name": ref[1]}} if ref else {}
    status = {"conditions": admitted()} if reserved else {}
    body = workload_body(
        number, status=status, spec={"priority": priority, **named, "podSets": [{"name": "elastic", "count": 1}]}
    )
    fact = workload_fact(body)
    below = workload_fact(workload_body(spec={"priority": base})) if base is not None else None
    assert fact is not None
    job = job_body(labels={"kueue.x-k8s.io/priority-class": wish} if wish else {})
    template = {"spec": {"priorityClassName": elastic} if elastic else {}}
    found = ranked(fact, job, two_specs({"spec": {}}, template), below)
    return found.has_outdated_priority, found.is_priority_fixed


OF_QUEUE, OF_PODS = "WorkloadPriorityClass", "PriorityClass"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        pytest.param({"wish": "a", "ref": (OF_QUEUE, "a")}, (False, False), id="as it is wished"),
        pytest.param({}, (False, False), id="no class and none wished"),
        pytest.param({"ref": (OF_PODS, "default")}, (False, False), id="the cluster's default"),
        pytest.param(
            {"wish": "b", "ref": (OF_QUEUE, "a")}, (True, False), id="another label, as with Kueue's own jobs"
        ),
        pytest.param({"wish": "b"}, (True, True), id="a label that came with quota"),
        pytest.param({"wish": "b", "reserved": False}, (True, False), id="a label that came in the queue"),
        pytest.param({"ref": (OF_QUEUE, "a")}, (True, True), id="a label that went"),
        pytest.param({"ref": (OF_QUEUE, "a"), "reserved": False}, (True, False), id="a label that went in the queue"),
        pytest.param(
            {"number": 1, "base": 5, "priority": -999_999_995}, (False, False), id="an increment beside its base"
        ),
        pytest.param(
            {"number": 1, "base": 7, "priority": -999_999_995}, (True, False), id="an increment follows its base"
        ),
        pytest.param({"number": 1, "priority": 3}, (False, False), id="an increment without a base"),
        pytest.param(
            {"number": 1, "elastic": "x", "ref": (OF_PODS, "x"), "base": 0}, (False, False), id="a class of its own"
        ),
        pytest.param(
            {"number": 1, "elastic": "y", "ref": (OF_PODS, "x"), "base": 0}, (True, True), id="another one of its own"
        ),
        pytest.param(
            {"number": 1, "elastic": "y", "ref": (OF_PODS, "x"), "base": 0, "reserved": False},
            (True, False),
            id="and in the queue",
        ),
        pytest.param({"number": 1, "ref": (OF_PODS, "x"), "base": 0}, (True, True), id="its own one went"),
    ],
)
def test_priorities_are_compared_with_what_the_job_wishes(about: dict[str, Any], expected: tuple[bool, bool]) -> None:
    assert rank(**about) == expected
