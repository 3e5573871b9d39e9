"""Log rules: what is taken and what a refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod_agent.core.log_rules import MAX_RULES, parse_log_rules


def test_a_rule_with_every_field() -> None:
    (rule,) = parse_log_rules(
        [
            {
                "name": "JobStart",
                "logPattern": r".*TFLOPs: (\d+\.?\d*).*",
                "expectedStartCutOffInSeconds": 120,
                "expectedRecurringFrequencyInSeconds": "30",
                "stopPattern": "done",
                "metricThreshold": -5,
                "operator": "lteq",
                "metricEvaluationDataPoints": 25,
                "faultOnMatch": True,
            }
        ]
    )
    assert (rule.name, rule.expected_start_cutoff_s, rule.expected_recurring_s) == ("JobStart", 120.0, 30.0)
    assert (rule.metric_threshold, rule.operator, rule.metric_evaluation_points) == (-5.0, "lteq", 25)
    assert rule.fault_on_match


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        pytest.param("x", "list of rules", id="no list"),
        pytest.param([1], "rule 0 must be an object", id="no object"),
        pytest.param([{"logPattern": "x"}], "rule 0: name", id="no name"),
        pytest.param(
            [{"name": 7, "logPattern": "x"}], "rule 0: name must be a non-empty string", id="a number as name"
        ),
        pytest.param([{"name": "", "logPattern": "x"}], "rule 0: name must be a non-empty string", id="empty name"),
        pytest.param(
            [{"name": "a", "logPattern": "x", "expectedStartCutOffInSeconds": -1}],
            "expectedStartCutOffInSeconds is -1; it must not be negative",
            id="negative time",
        ),
        pytest.param(
            [{"name": "a", "logPattern": "x", "metricThreshold": True}], "metricThreshold must be", id="boolean"
        ),
        pytest.param([{"name": "a", "logPattern": 7}], "logPattern must be a string of at most", id="no text"),
        pytest.param([{"name": "a", "logPattern": "x", "stopPattern": "("}], "stopPattern is not a regular", id="stop"),
        pytest.param([{"name": "a"}], "rule 'a': logPattern must be", id="no pattern"),
        pytest.param([{"name": "a", "logPattern": "("}], "logPattern is not a regular expression", id="bad pattern"),
        pytest.param(
            [{"name": "a", "logPattern": "(?i)" + "[Ā-\uffff]" * 800}],
            "it has 800 sets with ranges of characters, and 800 of these reach beyond U\\+00FF; at most 64 and 2 are allowed",
            id="slow to compile",
        ),
        pytest.param([{"name": "a", "logPattern": "x", "operator": ">"}], "operator is '>'", id="operator"),
        pytest.param([{"name": "a", "logPattern": "x", "metricThreshold": "y"}], "metricThreshold", id="threshold"),
        pytest.param([{"name": "a", "logPattern": "x" * 5000}], "at most 4096", id="long pattern"),
        pytest.param([{"name": "a", "logPattern": "x"}] * (MAX_RULES + 1), "at most 64", id="many rules"),
    ],
)
def test_bad_rules(rules: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_log_rules(rules)


def test_a_group_within_the_number_is_taken() -> None:
    (rule,) = parse_log_rules([{"name": "a", "logPattern": r".*loss: (\d+(\.\d+)?).*"}])
    assert rule.log_pattern == r".*loss: (\d+(\.\d+)?).*"


def test_a_rule_with_as_little_as_possible() -> None:
    (rule,) = parse_log_rules([{"name": "a", "logPattern": "x", "stopPattern": "", "metricEvaluationDataPoints": 0}])
    assert (rule.stop_pattern, rule.operator, rule.metric_threshold) == (None, None, None)
    assert (rule.expected_start_cutoff_s, rule.expected_recurring_s, rule.fault_on_match) == (None, None, False)
    assert rule.metric_evaluation_points == 1
    (fault,) = parse_log_rules([{"name": "a", "logPattern": "x" * 4096, "faultOnMatch": "true"}])
    assert fault.fault_on_match is False, "a text is no boolean"
    assert fault.metric_evaluation_points == 1
    assert len(parse_log_rules([{"name": "a", "logPattern": "x"}] * MAX_RULES)) == MAX_RULES
