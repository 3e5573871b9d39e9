"""Values of the core that no test may make, whatever it asserts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.builders import NOW, job, pid, trains

from elastipod_operator.core.actions import CreatePod, JobEvent, StopWorkers
from elastipod_operator.core.conditions.draft import ConditionDraft
from elastipod_operator.core.reasons import OpenReason, Reason

WRONG: Any = None


def test_what_is_right_can_be_made() -> None:
    JobEvent(Reason.STARTED, "text")
    JobEvent(OpenReason("LogHang_loss"), "text")
    ConditionDraft("Scaling", False, Reason.QUEUED, "text")
    ConditionDraft("Running", False, Reason.FAILED, "text")
    ConditionDraft("Failed", True, Reason.WORKER_FAULT, "text")
    CreatePod(pid(0), 2, only_on=("node-0",))


def test_a_condition_has_a_reason_that_is_documented_for_it() -> None:
    with pytest.raises(AssertionError, match="documented otherwise"):
        ConditionDraft("Warning", False, Reason.AT_MAXIMUM, "text")


def test_fields_have_the_types_that_they_declare() -> None:
    with pytest.raises(AssertionError, match="'status': None"):
        ConditionDraft("Scaling", WRONG, Reason.QUEUED, "text")
    with pytest.raises(AssertionError, match="'reason': None"):
        JobEvent(WRONG, "text")
    with pytest.raises(AssertionError, match="'only_on'"):
        CreatePod(pid(0), 2, only_on=(WRONG,))
    with pytest.raises(AssertionError, match="'generation': True"):
        StopWorkers("pod", True, graceful=True, timeout_s=1)
    with pytest.raises(AssertionError, match="'resize_statistics'"):
        trains(resize_statistics=WRONG)
    with pytest.raises(AssertionError, match="'phase_times'"):
        job(trains(phase_times=NOW))


def test_people_are_not_told_of_none() -> None:
    with pytest.raises(AssertionError, match="says None"):
        ConditionDraft("Running", True, Reason.TRAINING, "2 replicas train in generation None")
    with pytest.raises(AssertionError, match="says None"):
        JobEvent(Reason.STARTED, "None: more replicas are ready")
