"""How an error of the operator itself gets into a job's conditions."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.core.builders import LONG_AGO, NOW

from elastipod_operator.core.conditions.operator_error import with_operator_error
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.snapshot import Condition

CREATED = Condition("Created", True, Reason.ACCEPTED, "the job was accepted", LONG_AGO)
RUNS = Condition("Running", True, Reason.TRAINING, "2 replicas train", LONG_AGO)
WARNS = Condition("Warning", False, Reason.NO_PROGRESS, "no newer step", LONG_AGO)
ERROR = Condition("Warning", False, Reason.OPERATOR_ERROR, "KeyError: 'a'", NOW)


def test_the_state_stays_last() -> None:
    assert with_operator_error((CREATED, RUNS), ERROR.message, NOW) == (CREATED, ERROR, RUNS)


def test_a_job_without_conditions_gets_its_first() -> None:
    assert with_operator_error((), ERROR.message, NOW) == (ERROR, replace(CREATED, since=NOW))


def test_other_warnings_hold_beside_it() -> None:
    both = replace(WARNS, reason=Reason.OPERATOR_ERROR, message="KeyError: 'a'; no newer step")
    assert with_operator_error((CREATED, WARNS, RUNS), ERROR.message, NOW) == (CREATED, both, RUNS)
    assert with_operator_error((CREATED, both, RUNS), ERROR.message, NOW) is None, "it is reported already"


def test_of_two_errors_the_newest_is_reported() -> None:
    newest = replace(ERROR, message="ValueError: b")
    assert with_operator_error((CREATED, ERROR, RUNS), "ValueError: b", NOW) == (CREATED, newest, RUNS)


def test_the_same_words_elsewhere_are_no_report() -> None:
    quoted = replace(RUNS, message=ERROR.message)
    assert with_operator_error((CREATED, quoted), ERROR.message, NOW) == (CREATED, ERROR, quoted)
