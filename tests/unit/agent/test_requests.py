"""Bodies of the control API: what is taken, and the field that a refusal names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.core.log_rules import parse_log_rules
from elastipod_agent.core.requests import (
    BadBody,
    PrepareRequest,
    StartRequest,
    StopRequest,
    UpdateRequest,
    parse_prepare,
    parse_start,
    parse_stop,
    parse_update,
)

BODY: dict[str, Any] = {"rank": 1, "nnodes": 4, "faultCount": 2, "master_addr": "10.0.0.1", "master_port": 10020}


def test_the_full_body_of_the_plain_protocol_is_taken() -> None:
    rules = [{"name": "loss", "logPattern": r"loss (\d+)", "operator": "gt"}]
    progress = {"p": {"progressData": "/c", "progressCount": 3}}
    body = BODY | {
        "master_port": "10020",
        "log_monitoring_configuration": rules,
        "ipVersion": "ipv4",
        "rankIps": [{"rank": 0, "ip": "10.0.0.1"}],
        "worker_data": {"any": 1},
        "spare": 0,
        "progress": progress,
        "a_field_of_tomorrow": 1,
    }
    fields: dict[str, Any] = {
        "rank": 1, "nnodes": 4, "fault_count": 2, "master_addr": "10.0.0.1", "master_port": 10020, "log_rules": parse_log_rules(rules),
        "ip_version": "ipv4", "rank_ips": ({"rank": 0, "ip": "10.0.0.1"},), "worker_data": {"any": 1}, "is_spare": False,
        "generation": None,
    }  # fmt: skip
    start = parse_start(body)
    assert start == StartRequest(**fields, progress=progress)
    assert start.run_generation == 3, "counted from the faults when none is given"
    assert parse_update(body | {"generation": 5}) == UpdateRequest(**fields | {"generation": 5})


def test_where_an_agent_serves_the_store_its_port_is_named() -> None:
    assert (parse_start(BODY).store_port, parse_start(BODY).store) == (None, "")
    assert parse_start(BODY | {"store_port": "8080"}).store == "10.0.0.1:8080"
    prepare = {"nnodes": 2, "master_addr": "10.0.0.1", "master_port": 10020}
    assert parse_prepare(prepare).store == "10.0.0.1:10020"
    assert parse_prepare(prepare | {"store_port": 8080}).store == "agent://10.0.0.1:8080"
    for parse, body in ((parse_start, BODY), (parse_update, BODY), (parse_prepare, prepare)):
        with pytest.raises(BadBody) as caught:
            parse(body | {"store_port": 0})
        assert caught.value.field == "store_port"


def test_preparing_needs_the_number_of_pods_only() -> None:
    assert parse_prepare({"nnodes": 2}) == PrepareRequest(nnodes=2)
    assert parse_prepare({"nnodes": 2, "generation": 3}) == PrepareRequest(nnodes=2, generation=3)
    for body in ({}, {"nnodes": 0}, {"nnodes": None}):
        with pytest.raises(BadBody) as caught:
            parse_prepare(body)
        assert caught.value.field == "nnodes"


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("rank", 0, 1 << 20),
        ("nnodes", 1, 1 << 20),
        ("faultCount", 0, 1 << 40),
        ("master_port", 1, 65535),
        ("generation", 1, 1 << 40),
    ],
)
def test_numbers_have_bounds_which_are_named(field: str, low: int, high: int) -> None:
    for number in (low, high):
        parse_start(BODY | {"spare": True, field: number})
    for number in (low - 1, high + 1):
        with pytest.raises(BadBody) as caught:
            parse_start(BODY | {"spare": True, field: number})
        assert str(caught.value) == f"{field}: is {number}; it must be between {low} and {high}"
        assert (caught.value.field, caught.value.problem) == (field, str(caught.value).partition(": ")[2])


@pytest.mark.parametrize("read", [parse_start, parse_update, parse_prepare, parse_stop])
def test_a_body_is_an_object(read: Callable[[object], object]) -> None:
    for body, kind in (([], "a list"), ("x", "a string"), (1, "a number"), (True, "a boolean")):
        with pytest.raises(BadBody) as caught:
            read(body)
        assert (caught.value.field, str(caught.value)) == ("", f"the body must be a JSON object, not {kind}")


def test_optional_fields_may_be_null_or_missing() -> None:
    nulls = dict.fromkeys(("log_monitoring_configuration", "ipVersion", "rankIps", "worker_data", "progress", "spare"))
    assert parse_start(BODY) == parse_start(BODY | nulls)
    assert parse_start(BODY | {"generation": 9}).run_generation == 9


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        pytest.param({"rank": None}, "rank", "must be an integer, not null", id="null rank"),
        pytest.param({"rank": "one"}, "rank", "must be an integer, not a string", id="rank in words"),
        pytest.param({"rank": True}, "rank", "must be an integer, not a boolean", id="boolean rank"),
        pytest.param({"rank": 4}, "rank", "is 4 but nnodes is 4", id="rank outside the job"),
        pytest.param({"rank": -1}, "rank", "must be between", id="negative rank"),
        pytest.param({"nnodes": 0}, "nnodes", "must be between 1", id="no pods"),
        pytest.param({"faultCount": 1.5}, "faultCount", "must be an integer", id="half a fault"),
        pytest.param({"master_addr": ""}, "master_addr", "non-empty", id="empty master"),
        pytest.param({"master_addr": "10.0.0.1\0"}, "master_addr", "control characters", id="master with a zero byte"),
        pytest.param({"master_port": 70000}, "master_port", "must be between 1 and 65535", id="port"),
        pytest.param({"master_port": []}, "master_port", "not a list", id="port as list"),
        pytest.param({"rankIps": [1]}, "rankIps.0", "must be an object", id="rank addresses"),
        pytest.param({"progress": 5}, "progress", "must be an object", id="progress"),
        pytest.param({"spare": "perhaps"}, "spare", "must be true or false, not a string", id="spare"),
        pytest.param({"spare": 1.5}, "spare", "must be true or false, not a number", id="half a spare"),
        pytest.param({"generation": 0}, "generation", "must be between 1", id="generation 0"),
        pytest.param({"log_monitoring_configuration": {}}, "log_monitoring_configuration", "list of rules", id="rules"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(BadBody, match=words.replace("[", r"\[")) as caught:
        parse_start(BODY | changes)
    assert caught.value.field == field


@pytest.mark.parametrize("missing", list(BODY))
def test_required_fields_are_required(missing: str) -> None:
    with pytest.raises(BadBody) as caught:
        parse_update({name: value for name, value in BODY.items() if name != missing})
    assert caught.value.field == missing


def test_a_spare_may_have_a_rank_beyond_the_job() -> None:
    assert parse_start(BODY | {"rank": 4, "spare": True}).is_spare


def test_stop() -> None:
    assert parse_stop(None) == parse_stop({}) == StopRequest()
    assert [parse_stop(body).leaves for body in ({}, {"leaves": None}, {"leaves": False}, {"leaves": True})] == [
        None,
        None,
        False,
        True,
    ]
    stop = parse_stop({"restart_mode": "ipr", "is_graceful": True, "timeout": 600, "generation": 3})
    assert stop == StopRequest(is_graceful=True, timeout_s=600.0, restart_mode="ipr", generation=3)
    for body, field in (
        ({"timeout": []}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": "nan"}, "timeout"),
        ({"timeout": "x"}, "timeout"),
        ({"is_graceful": "x"}, "is_graceful"),
        ({"is_graceful": 2}, "is_graceful"),
    ):
        with pytest.raises(BadBody) as caught:
            parse_stop(body)
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field}: must be ")


def test_a_drain_may_name_the_start_that_follows() -> None:
    start = {"rank": 1, "nnodes": 2, "faultCount": 3, "master_addr": "10.0.0.1", "master_port": 20000, "generation": 4}
    told = parse_stop({"is_graceful": True, "next": start}).next_start
    assert told is not None
    assert (told.rank, told.run_generation, told.is_early) == (1, 4, False)
    assert [parse_stop(body).next_start for body in ({}, {"next": None})] == [None, None]
    assert parse_start(start | {"early": True}).is_early


@pytest.mark.parametrize(
    ("body", "field"), [("soon", "next"), ({"rank": 2, "nnodes": 2}, "next.rank"), ({"rank": 0}, "next.nnodes")]
)
def test_a_start_that_follows_is_checked_with_the_stop(body: Any, field: str) -> None:
    with pytest.raises(BadBody) as error:
        parse_stop({"is_graceful": True, "next": body})
    assert error.value.field == field


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), ("yes", True), ("1", True), (1, True), (1.0, True), ("no", False), ("off", False)],
)
def test_booleans_are_taken_in_the_spellings_of_other_clients(text: object, value: bool) -> None:
    assert parse_stop({"is_graceful": text}).is_graceful is value
    assert parse_start(BODY | {"spare": text}).is_spare is value


def test_any_number_but_0_makes_a_spare() -> None:
    assert [parse_start(BODY | {"spare": number}).is_spare for number in (-1, 0, 2)] == [True, False, True]


@pytest.mark.parametrize(("text", "rank"), [("1", 1), (" 1 ", 1), ("+1", 1), (1.0, 1)])
def test_numbers_are_taken_in_the_spellings_of_other_clients(text: object, rank: int) -> None:
    assert parse_start(BODY | {"rank": text}).rank == rank


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [(-1, 0.0), (0, 0.0), ("90", 90.0), (1.5, 1.5), (10**12, 604800.0), (10**400, 604800.0), ("1e400", 604800.0)],
)
def test_no_length_of_time_keeps_a_stop_from_being_one(timeout: object, seconds: float) -> None:
    assert parse_stop({"is_graceful": True, "timeout": timeout}).timeout_s == seconds


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(st.sampled_from([*BODY, "generation", "progress", "rankIps", "log_monitoring_configuration"]), json_values)
def test_any_json_is_taken_or_refused_in_words(field: str, value: Any) -> None:
    for parse in (parse_start, parse_update, parse_stop):
        for body in (BODY | {field: value}, value):
            assert _refusal(parse, body) != ""


def _refusal(parse: Callable[[object], object], body: object) -> str | None:
    try:
        parse(body)
    except BadBody as error:
        return error.problem
    return None
