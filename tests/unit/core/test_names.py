"""Names, labels and ports (decisions 7 and 20)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_operator.core.names import (
    LABEL_INCARNATION,
    LABEL_ORDINAL,
    LABEL_SPEC,
    PodId,
    master_port,
    pod_id_of,
)


def labels(spec: str = "workers", ordinal: str = "3", incarnation: str = "2") -> dict[str, str]:
    return {LABEL_SPEC: spec, LABEL_ORDINAL: ordinal, LABEL_INCARNATION: incarnation}


def test_a_pod_is_named_after_job_spec_ordinal_and_incarnation() -> None:
    assert PodId("workers", 3, 2).name("train") == "train-workers-3-2"


def test_labels_tell_who_a_pod_is() -> None:
    assert pod_id_of(labels()) == PodId("workers", 3, 2)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param({}, id="no labels of ours"),
        pytest.param(labels(ordinal="x"), id="an ordinal that is no number"),
        pytest.param(labels(ordinal="-1"), id="an ordinal below zero"),
        pytest.param(labels(incarnation="-2"), id="an incarnation below zero"),
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
