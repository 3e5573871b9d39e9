"""What lines and their absence make of a log rule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.core.log_rule_tracker import Matches, RuleState, RuleTracker, SteadyClock, next_deadline
from elastipod_agent.core.log_rules import LogRule


def tracker(**fields: Any) -> RuleTracker:
    return RuleTracker(rule=LogRule(name="r", log_pattern=fields.pop("log_pattern", "loss: (.*)"), **fields))


def matches(*values: float, count: int | None = None, line: str = "the line", is_over: bool = False) -> Matches:
    return Matches(count=len(values) if count is None else count, line=line, values=values, is_over=is_over)


def test_no_first_match_in_time_is_a_hang_from_the_deadline_on() -> None:
    rule = tracker(expected_start_cutoff_s=120, expected_recurring_s=5)
    assert rule.deadline == 120
    assert rule.check_silence(119.9).state is RuleState.WAITING
    hanging = rule.check_silence(120)
    assert (hanging.state, hanging.reason) == (RuleState.HANGING, "LogHang_r")
    assert hanging.message() == "log rule r: no line matched loss: (.*) in the first 120 s of the workers"


@pytest.mark.parametrize("first", [0, 1], ids=["before the first match", "after it"])
def test_a_long_pattern_is_cut_in_the_message(first: int) -> None:
    for length, shown in ((120, "x" * 120), (121, "x" * 117 + "...")):
        rule = tracker(expected_start_cutoff_s=1, expected_recurring_s=1, log_pattern="x" * length)
        rule = rule.add_matches(0.5, matches(count=first)) if first else rule
        assert f" line matched {shown} " in rule.check_silence(100).message()


def test_no_further_match_in_time_is_a_hang_that_shows_the_last_line() -> None:
    rule = tracker(expected_start_cutoff_s=120, expected_recurring_s=30).add_matches(
        50, matches(count=3, line="loss: 1")
    )
    assert (rule.state, rule.deadline) == (RuleState.HEALTHY, 80)
    hanging = rule.add_matches(70, matches(count=1, line="loss: 2")).check_silence(100)
    assert hanging.reason == "LogHang_r"
    assert "no further line matched loss: (.*) for 30 s, after 4; the last was: loss: 2" in hanging.message()


def test_only_a_recurring_time_waits_for_the_first_match_for_ever() -> None:
    rule = tracker(expected_recurring_s=30)
    assert rule.deadline is None
    assert rule.check_silence(1e9).state is RuleState.WAITING
    assert rule.add_matches(100, matches(count=1)).deadline == 130


def test_only_a_start_time_wants_one_match() -> None:
    rule = tracker(expected_start_cutoff_s=10).add_matches(9, matches(count=1))
    assert rule.deadline is None
    assert rule.check_silence(1e9).state is RuleState.HEALTHY


@pytest.mark.parametrize(
    ("operator", "bad"),
    [
        pytest.param("gt", (2.5,), id="gt: above is bad"),
        pytest.param("lt", (1.5,), id="lt: below is bad"),
        pytest.param("eq", (2.0,), id="eq: equal is bad"),
        pytest.param("gteq", (2.0, 2.5), id="gteq: equal or above is bad"),
        pytest.param("lteq", (2.0, 1.5), id="lteq: equal or below is bad"),
    ],
)
def test_operators_say_what_is_bad(operator: str, bad: tuple[float, ...]) -> None:
    for value in (1.5, 2.0, 2.5):
        after = tracker(metric_threshold=2.0, operator=operator).add_matches(1, matches(value))
        assert (after.state is RuleState.SLOW) == (value in bad)


def test_slow_takes_so_many_bad_numbers_in_a_row_over_batches() -> None:
    rule = tracker(metric_threshold=2.0, operator="gt", metric_evaluation_points=3)
    rule = rule.add_matches(1, matches(5, 5, 1, 5)).add_matches(2, matches(6))
    assert (rule.state, rule.num_bad) == (RuleState.HEALTHY, 2)
    slow = rule.add_matches(3, matches(7, line="loss: 7"))
    assert slow.reason == "LogSlow_r"
    assert slow.message() == "log rule r: the number was above 2 3 times in a row; the last is 7: loss: 7"


def test_a_single_bad_number_is_said_to_be_so_once() -> None:
    slow = tracker(metric_threshold=2.0, operator="gt").add_matches(1, matches(7, line="loss: 7"))
    assert slow.message() == "log rule r: the number was above 2 once; the last is 7: loss: 7"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"metric_threshold": 1.0}, id="threshold without operator"),
        pytest.param({"operator": "gt"}, id="operator without threshold"),
        pytest.param({}, id="nothing"),
    ],
)
def test_a_rule_without_anything_to_expect_only_counts(fields: dict[str, Any]) -> None:
    rule = tracker(**fields).add_matches(1, matches(5, 5, 5))
    assert (rule.state, rule.num_matches, rule.deadline) == (RuleState.HEALTHY, 3, None)


def test_a_match_can_be_the_fault() -> None:
    rule = tracker(fault_on_match=True, log_pattern="Xid").add_matches(1, matches(count=1, line="Xid 79 " + "x" * 9999))
    assert rule.reason == "LogFault_r"
    assert rule.message().startswith("log rule r: a line that means a fault was printed: Xid 79 xxx")
    assert len(rule.message()) < 500


def test_a_stop_pattern_ends_the_watching_after_what_came_before() -> None:
    rule = tracker(expected_start_cutoff_s=10, expected_recurring_s=10).add_matches(5, matches(count=2, is_over=True))
    assert (rule.num_matches, rule.is_watched, rule.deadline) == (2, False, None)
    assert rule.check_silence(1e9).add_matches(1e9, matches(count=1)) == rule
    assert tracker(fault_on_match=True).add_matches(5, matches(is_over=True)).reason == ""


def test_lines_that_were_not_looked_at_put_the_hang_off() -> None:
    rule = tracker(expected_start_cutoff_s=10).restart_silence(8)
    assert rule.check_silence(17).state is RuleState.WAITING
    assert rule.check_silence(18).reason == "LogHang_r"


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.sampled_from(["match", "bad", "look", "unsure", "stop"])),
        max_size=30,
    )
)
def test_a_bad_state_is_final_and_comes_for_a_reason(steps: list[tuple[float, str]]) -> None:
    rule = tracker(expected_start_cutoff_s=20, expected_recurring_s=10, metric_threshold=2, operator="gt")
    now = 0.0
    for passed_s, what in steps:
        now += passed_s
        before = rule
        if what == "look":
            rule = rule.check_silence(now)
        elif what == "unsure":
            rule = rule.restart_silence(now)
        else:
            rule = rule.add_matches(now, matches(3 if what == "bad" else 1, is_over=what == "stop"))
        if before.reason or before.is_over:
            assert rule == before
        elif rule.state is RuleState.HANGING:
            assert now >= (before.deadline or 0)
        elif rule.state is RuleState.SLOW:
            assert what == "bad"
        assert not rule.reason or rule.message()


def test_the_next_deadline_is_the_first() -> None:
    rules = [tracker(expected_start_cutoff_s=9), tracker(expected_start_cutoff_s=7), tracker()]
    assert next_deadline(rules) == 7
    assert next_deadline([tracker()]) is None


def test_the_clock_does_not_count_what_the_agent_missed() -> None:
    clock = SteadyClock(1000.0, 1.0)
    assert clock.at(1001.0) == 1.0
    assert clock.at(1003.0) == 3.0  # late, but not away
    assert clock.at(1603.0) == 4.0
    assert clock.at(1604.0) == 5.0
    assert clock.at(1600.0) == 5.0  # never backwards
    assert clock.at(1604.5) == 5.5
