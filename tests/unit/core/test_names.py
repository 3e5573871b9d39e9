"""Names, labels and ports."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastipod_operator.core.names import (
    LABEL_INCARNATION,
    LABEL_ORDINAL,
    LABEL_SPEC,
    MAX_INCARNATION,
    PodId,
    master_port,
    pod_id_of,
)
from elastipod_operator.core.sizes import MAX_REPLICAS


def labels(spec: str = "workers", ordinal: str = "3", incarnation: str = "2") -> dict[str, str]:
    return {LABEL_SPEC: spec, LABEL_ORDINAL: ordinal, LABEL_INCARNATION: incarnation}


@pytest.mark.parametrize(
    ("pod", "name"),
    [
        pytest.param(PodId("workers", 3, 0), "train-workers-3", id="the first of its place, as walkthroughs type it"),
        pytest.param(PodId("workers", 3, 2), "train-workers-3-2", id="a replacement"),
        pytest.param(PodId("16-nodes", 3, 0), "train-16-nodes-3", id="a spec that begins with a number"),
        pytest.param(PodId("pool2", 3, 0), "train-pool2-3", id="a digit at the end that is no number by itself"),
        pytest.param(PodId("a-1", 3, 0), "train-a-1-3-0", id="a spec that ends in a number"),
        pytest.param(PodId("7", 3, 0), "train-7-3-0", id="a spec that is a number"),
    ],
)
def test_a_pod_is_named_after_job_spec_ordinal_and_incarnation(pod: PodId, name: str) -> None:
    assert pod.name("train") == name


SPECS = st.from_regex(r"\A[a-b1-2](-?[a-b1-2]){0,4}\Z")
PODS = st.builds(PodId, SPECS, st.integers(0, 12), st.integers(0, 12))


@given(PODS, PODS)
@example(PodId("a", 1, 2), PodId("a-1", 2, 0))
@example(PodId("a-1", 2, 0), PodId("a-1-2", 0, 0))
@example(PodId("1", 1, 0), PodId("1-1", 0, 0))
def test_no_two_pods_of_a_job_have_one_name_whatever_their_specs_are_called(one: PodId, other: PodId) -> None:
    assert (one.name("job") == other.name("job")) is (one == other)


def test_the_longest_names_are_names_of_pods() -> None:
    assert len(PodId("s" * 63, MAX_REPLICAS - 1, MAX_INCARNATION).name("j" * 63)) <= 253


def test_labels_tell_who_a_pod_is() -> None:
    assert pod_id_of(labels()) == PodId("workers", 3, 2)
    assert pod_id_of(labels(ordinal="0", incarnation="0")) == PodId("workers", 0, 0)
    last = pod_id_of(labels(ordinal=str(MAX_REPLICAS - 1), incarnation=str(MAX_INCARNATION)))
    assert last == PodId("workers", MAX_REPLICAS - 1, MAX_INCARNATION)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param({}, id="no labels of ours"),
        pytest.param(labels(ordinal="x"), id="an ordinal that is no number"),
        pytest.param(labels(ordinal="-1"), id="an ordinal below zero"),
        pytest.param(labels(incarnation="-2"), id="an incarnation below zero"),
        pytest.param(labels(ordinal=str(MAX_REPLICAS)), id="an ordinal that no job has"),
        pytest.param(labels(incarnation=str(MAX_INCARNATION + 1)), id="an incarnation that no pod has"),
        pytest.param(labels(ordinal="1" * 5000), id="too many digits"),
        pytest.param(labels(spec=""), id="no spec"),
    ],
)
def test_labels_that_were_edited_into_nonsense_tell_nothing(found: dict[str, str]) -> None:
    assert pod_id_of(found) is None


@given(st.integers(0, 100_000))
def test_ports_are_usable_and_neighbours_are_apart(generation: int) -> None:
    port = master_port(generation)
    assert 10_000 <= port <= 18_990
    assert abs(port - master_port(generation + 1)) >= 10
