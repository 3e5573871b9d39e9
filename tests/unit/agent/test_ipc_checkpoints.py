"""Which checkpoint is the newest complete one."""

from __future__ import annotations

import pytest

from elastipod_agent.core.checkpoint_series import MAX_SERIES, CheckpointSeries

MODEL, DATA = "model_checkpoint", "data_checkpoint"


def series(**expected: int) -> CheckpointSeries:
    one = CheckpointSeries()
    one.expect("run", expected)
    return one


def test_a_step_is_complete_when_as_many_ranks_as_expected_have_reported_each_part() -> None:
    one = series(model_checkpoint=2, data_checkpoint=1)
    one.report("run", 5, "/x/5", MODEL, 0)
    one.report("run", 5, "/x/5", MODEL, 0)
    assert one.latest("run") is None, "the same rank twice is one rank"
    one.report("run", 5, "/x/5", MODEL, 1)
    assert one.latest("run") is None, "the data part is missing"
    one.report("run", 5, None, DATA, 1)
    assert one.latest("run") == "/x/5"
    assert one.progress() == {"run": {"progressData": "/x/5", "progressCount": 5, "progressReported": True}}


def test_the_newest_complete_step_wins_whatever_is_half_done() -> None:
    one = series(model_checkpoint=2)
    one.report("run", 9, "/x/9", MODEL, 0)
    for rank in (0, 1):
        one.report("run", 5, "/x/5", MODEL, rank)
    assert one.latest("run") == "/x/5"
    one.report("run", 4, "/x/4", MODEL, 0)
    one.report("run", 4, "/x/4", MODEL, 1)
    assert one.latest("run") == "/x/5", "older ones come too late"
    one.report("run", 9, "/x/9", MODEL, 1)
    assert one.latest("run") == "/x/9"


def test_nothing_is_complete_while_no_part_is_expected() -> None:
    one = series(model_checkpoint=0, data_checkpoint=0)
    one.report("run", 5, "/x/5", MODEL, 0)
    assert one.latest("run") is None
    assert one.progress() == {}


@pytest.mark.parametrize(
    "entry", [None, {}, {"progressCount": True}, {"progressCount": -1}, {"progressCount": 7, "progressData": 1}]
)
def test_an_entry_of_a_start_that_is_none_says_nothing(entry: object) -> None:
    one = series(model_checkpoint=1)
    one.begin_run({"run": entry})
    assert one.latest("run") is None
    assert one.progress() == {}


def test_what_a_start_names_holds_until_something_newer_is_complete() -> None:
    one = series(model_checkpoint=1)
    one.report("run", 9, "/x/9", MODEL, 0)
    one.begin_run({"run": {"progressData": "/x/7", "progressCount": 7}, "odd": "text", "bad": {"progressCount": "x"}})
    assert one.latest("run") == "/x/7", "another pod did not have step 9"
    one.report("run", 8, "/x/8", MODEL, 0)
    assert one.latest("run") == "/x/8"
    one.begin_run({})
    assert one.latest("run") == "/x/8", "an operator that says nothing takes nothing away"


def test_a_script_that_goes_back_beyond_what_the_start_has_named_completes_its_own_steps() -> None:
    """The named checkpoint may be gone or torn: the script has fallen back to an older one, and saves from there on."""
    one = series(model_checkpoint=1)
    one.begin_run({"run": {"progressData": "/x/200", "progressCount": 200}})
    one.report("run", 150, "/x/150", MODEL, 0)
    assert one.latest("run") == "/x/150"
    one.report("run", 140, "/x/140", MODEL, 0)
    assert one.latest("run") == "/x/150", "that one comes too late"


def test_a_pod_says_whether_its_ranks_report_a_series_in_this_run() -> None:
    one = series(model_checkpoint=2)
    one.report("run", 5, "/x/5", MODEL, 0)
    assert one.progress() == {"run": {"progressData": None, "progressCount": -1, "progressReported": True}}
    named = {"run": {"progressData": "/x/4", "progressCount": 4}}
    one.begin_run(named)
    assert one.progress() == named
    one.report("run", 5, "/x/5", MODEL, 0)
    assert one.progress() == {"run": {**named["run"], "progressReported": True}}


def test_half_reported_steps_do_not_outlive_their_run_or_pile_up() -> None:
    one = series(model_checkpoint=2)
    one.report("run", 5, "/x/5", MODEL, 0)
    one.begin_run({})
    one.report("run", 5, "/x/5", MODEL, 1)
    assert one.latest("run") is None
    for step in range(10, 1000):
        one.report("run", step, "/x", MODEL, 0)
    one.report("run", 999, "/x/999", MODEL, 1)
    assert one.latest("run") == "/x/999"
    one.report("run", 10, "/x/10", MODEL, 1)
    assert one.latest("run") == "/x/999"


def test_the_number_of_series_is_bounded() -> None:
    one = CheckpointSeries()
    for index in range(MAX_SERIES):
        one.expect(f"run-{index}", {MODEL: 1})
    with pytest.raises(ValueError, match="exceeds the limit of 64"):
        one.expect("another", {MODEL: 1})
    with pytest.raises(ValueError, match="exceeds the limit of 64"):
        one.report("another", 1, "/x", MODEL, 0)
    one.begin_run({"another": {"progressData": "/x", "progressCount": 1}})
    assert one.latest("another") is None
