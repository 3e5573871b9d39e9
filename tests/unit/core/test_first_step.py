"""When the status of a generation that has just begun is due."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import NOW, job, observed, pod, running, seconds, trains, transition

from elastipod_operator.core.first_step import status_waits_until
from elastipod_operator.core.next_generation import FIRST_STEP_PATIENCE
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record
from elastipod_operator.core.replica import Replicas

NOBODY = Replicas({}, {}, all_silent=False)
BEGUN = trains(generation=3, running_since=None, generation_began_at=NOW)
DUE = NOW + FIRST_STEP_PATIENCE


@pytest.mark.parametrize(
    ("changes", "now", "expected"),
    [
        pytest.param({}, NOW, DUE, id="it has just begun"),
        pytest.param({}, DUE - seconds(0.1), DUE, id="no step for a while"),
        pytest.param({}, DUE, None, id="no step for longer"),
        pytest.param({}, NOW - seconds(1), None, id="a clock that was ahead"),
        pytest.param({"running_since": NOW}, NOW, None, id="it has made its first step"),
        pytest.param({"generation": 1}, NOW, None, id="the first one, before which nothing trained"),
        pytest.param({"generation_began_at": None}, NOW, None, id="of an earlier version"),
        pytest.param({"transition": transition()}, NOW, None, id="it ends"),
        pytest.param({"outcome": "Completed"}, NOW, None, id="the job has ended"),
        pytest.param({"members": ()}, NOW, None, id="suspended"),
    ],
)
def test_a_status_waits_for_the_first_step_of_a_generation(
    changes: dict[str, Any], now: datetime, expected: datetime | None
) -> None:
    record: Record = replace(BEGUN, **changes)
    assert status_waits_until(record, NOBODY, now) == expected


def test_a_plan_looks_again_when_its_status_is_due() -> None:
    pods = [(pod(n), running(3)) for n in range(2)]
    todo = plan(observed(job(BEGUN), pods))
    assert todo.status_waits
    assert todo.wake_at is not None
    assert todo.wake_at <= DUE
    assert todo.events == (), "those of conditions come with the status"
    due = plan(observed(job(BEGUN), pods, now=DUE))
    assert not due.status_waits
    assert due.events != ()
    deleted = plan(observed(job(BEGUN, deleting_since=NOW), pods))
    assert not deleted.status_waits
