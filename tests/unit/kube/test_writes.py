"""How the outcome of a write to the API server is counted."""

from __future__ import annotations

from contextlib import suppress

import pytest
from prometheus_client import REGISTRY

from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.writes import timed_write

OUTCOMES = ("ok", "conflict", "failed")


def counted() -> dict[str, float]:
    name = "elastipod_api_writes_total"
    return {one: REGISTRY.get_sample_value(name, {"what": "thing", "outcome": one}) or 0.0 for one in OUTCOMES}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        pytest.param(None, "ok", id="a write that succeeds"),
        pytest.param(ApiError(409, 'secrets "llm" already exists'), "conflict", id="an object that exists"),
        pytest.param(ApiError(409, "the object has been modified"), "conflict", id="somebody else was quicker"),
        pytest.param(
            ApiError(409, 'admission webhook "x" denied the request'), "failed", id="a webhook with this status"
        ),
        pytest.param(ApiError(403, "forbidden"), "failed", id="a right that is missing"),
        pytest.param(TimeoutError(), "failed", id="no answer"),
    ],
)
async def test_an_object_that_somebody_else_made_or_changed_is_no_failure(
    error: Exception | None, outcome: str
) -> None:
    async def call() -> str:
        if error is not None:
            raise error
        return "written"

    before = counted()
    with suppress(ApiError, TimeoutError):
        assert await timed_write("thing", call()) == "written"
        assert error is None, "it is raised"
    assert {one: number - before[one] for one, number in counted().items() if number != before[one]} == {outcome: 1}
