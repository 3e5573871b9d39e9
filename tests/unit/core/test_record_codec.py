"""The annotations as they lie at the API server: another version of the operator must be able to read them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta, timezone

import pytest
from tests.unit.core.builders import NOW, pid, seconds, trains, transition

from elastipod_operator.core.depth_reasons import DepthReason
from elastipod_operator.core.history import HistoryEntry, decode_history, encode_history, mark_running
from elastipod_operator.core.names import PodId, Slot, master_port
from elastipod_operator.core.pod_runs import MAX_PODS
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import (
    Depth,
    FaultyReplica,
    NodeFaults,
    PartialGang,
    PhaseTimes,
    Record,
    ResizeStatistics,
    RestartMode,
    RestartWindow,
    TransitionKind,
)
from elastipod_operator.core.record_codec import (
    MAX_UNPACKED,
    NewerRecordError,
    RecordError,
    decode,
    encode,
    format_time,
    parse_required_time,
    parse_time,
)

AT = [NOW + seconds(n) for n in range(20)]
SHOWN = [f"2026-03-01T12:00:{n:02}.000Z" for n in range(20)]

FULL = Record(
    generation=7,
    members=(pid(0), pid(1), pid(2, 3), PodId("extra", 5, 0)),
    master_addr="10.0.0.9",
    lost=(pid(8, 1),),
    transition=transition(
        TransitionKind.RECOVERY,
        cause="WorkerCrash",
        message="boom",
        from_size=4,
        target_size=3,
        began_at=AT[7],
        detected_at=AT[8],
        deadline=AT[9],
        graceful=False,
        not_before=AT[10],
        uses_budget=True,
        is_budget_checked=True,
        recreates_pods=True,
        reach=RestartMode.PROCESSES,
        depth=Depth.POD,
        depth_reason="again",
        depth_code=DepthReason.REPEATED_FAILURES,
        leavers=(pid(2, 3),),
    ),
    agents_serve_store=True,
    failures_in_place=25,
    failed_in_place=(pid(2, 3),),
    faults_without_step=28,
    step_at_fault=29,
    resizes_undone=27,
    incarnations={Slot("workers", 0): 0, Slot("workers", 1): 4, Slot("workers", 9): 2},
    generation_began_at=AT[18],
    window_since=AT[0],
    running_since=AT[1],
    resized_at=AT[2],
    recovered_at=AT[3],
    fault_at=AT[4],
    started_at=AT[5],
    ended_at=AT[6],
    restarts=11,
    retries=12,
    consecutive_failures=13,
    best_step=14,
    stalled_recoveries=15,
    window=RestartWindow(16, AT[11], 17, 18),
    faulty_replicas=(FaultyReplica(pid(2, 3), 2, "node-2"),),
    is_full_restart=True,
    shrank_after_fault=True,
    node_faults=(NodeFaults("node-2", 3, AT[12]),),
    size_before_growth=19,
    resize_failures=20,
    resize_failed_at=AT[13],
    gang=PartialGang(AT[14], 21, 22, AT[15]),
    resize_began_at=AT[16],
    resize_statistics=ResizeStatistics(seconds(1.5), ((2, seconds(0.25)),)),
    suspended_time=seconds(23),
    phase_times=PhaseTimes("training", AT[17], (("starting", 24),), "process", (("memory", 26),)),
    outcome="Failed",
    outcome_reason=OpenReason("WorkerCrash"),
    outcome_message="o",
)

WRITTEN = {
    "v": 1,
    "generation": 7,
    "members": [["workers", "0-1,2.3"], ["extra", "5"]],
    "master": "10.0.0.9",
    "served": True,
    "lost": [["workers", "8.1"]],
    "incarnations": [["extra", "5.-1"], ["workers", "1.4,2.-1,9.2"]],
    "budget": [11, 12, 13, 14, 15],
    "times": SHOWN[:7],
    "transition": [
        "recovery",
        "WorkerCrash",
        "boom",
        4,
        3,
        *SHOWN[7:10],
        False,
        SHOWN[10],
        True,
        True,
        True,
        "process_level_restart",
        "pod",
        "again",
        "RepeatedFailures",
    ],
    "leavers": [["workers", "2.3"]],
    "deeper": 25,
    "failing": [["workers", "2.3"]],
    "steps": [28, 29],
    "undone": 27,
    "window": [16, SHOWN[11], 17, 18],
    "culprits": [True, [["workers", 2, 3, 2, "node-2"]]],
    "offences": [["node-2", 3, SHOWN[12]]],
    "growth": [19, 20, SHOWN[13]],
    "gang": [SHOWN[14], 21, 22, SHOWN[15]],
    "measures": [SHOWN[16], 1500, [[2, 250]]],
    "idle": 23000,
    "shrunk": True,
    "begun": SHOWN[18],
    "ledger": ["training", SHOWN[17], [["starting", 24]], "process", [["memory", 26]]],
    "outcome": ["Failed", "WorkerCrash", "o"],
}


def test_every_field_has_its_place() -> None:
    assert json.loads(encode(FULL)) == WRITTEN
    assert decode(json.dumps(WRITTEN)) == FULL


def test_what_a_record_lacks_is_not_written() -> None:
    assert json.loads(encode(Record())) == {
        "v": 1, "generation": 0, "members": [], "master": "", "lost": [], "incarnations": [], "budget": [0, 0, 0, -1, 0],
        "times": [None] * 7,
    }  # fmt: skip
    assert decode(encode(Record())) == Record()


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(Record(size_before_growth=1), id="a growth"),
        pytest.param(Record(resize_failures=1), id="failures"),
        pytest.param(Record(resize_failed_at=NOW), id="a failure"),
        pytest.param(Record(resize_began_at=NOW), id="a pause"),
        pytest.param(Record(resize_statistics=ResizeStatistics(seconds(1))), id="the last pause"),
        pytest.param(Record(resize_statistics=ResizeStatistics(None, ((1, seconds(1)),))), id="a pace"),
        pytest.param(Record(gang=PartialGang(NOW)), id="a gang"),
        pytest.param(Record(phase_times=PhaseTimes("training")), id="a phase"),
        pytest.param(Record(suspended_time=seconds(1)), id="idle time"),
        pytest.param(Record(window=RestartWindow(1)), id="a window"),
    ],
)
def test_each_part_is_written_by_itself(record: Record) -> None:
    assert decode(encode(record)) == record
    assert encode(record) != encode(Record())


def test_the_text_is_short_and_in_order() -> None:
    text = encode(FULL)
    assert " " not in text
    assert list(json.loads(text)) == sorted(WRITTEN)


def test_texts_are_cut() -> None:
    long = replace(FULL, transition=transition(message="m" * 1001), outcome_message="o" * 2001)
    short = decode(encode(long))
    assert short.transition is not None
    assert (short.transition.message, short.outcome_message) == ("m" * 1000, "o" * 2000)


@pytest.mark.parametrize(
    ("later", "weighed", "full", "reach"),
    [
        pytest.param([], False, False, RestartMode.IN_PROCESS, id="nothing"),
        pytest.param([True, True], True, True, RestartMode.IN_PROCESS, id="weighed and full"),
        pytest.param([False, True, "job_level_restart"], False, True, RestartMode.JOB, id="and how far"),
    ],
)
def test_transitions_of_earlier_operators(later: list[object], weighed: bool, full: bool, reach: RestartMode) -> None:
    body = json.loads(encode(trains(transition=transition())))
    body["transition"] = [*body["transition"][:11], *later]
    found = decode(json.dumps(body)).transition
    assert found is not None
    assert (found.is_budget_checked, found.recreates_pods, found.reach) == (weighed, full, reach)


@pytest.mark.parametrize("code", [[], ["OfALaterOperator"]])
def test_why_a_change_went_as_deep_may_be_unknown(code: list[str]) -> None:
    """Operators before the code end their lists with the sentence; a later one may have codes that this one lacks."""
    began = transition(depth=Depth.POD, depth_reason="again", depth_code=DepthReason.REPEATED_FAILURES)
    body = json.loads(encode(trains(transition=began)))
    assert body["transition"].pop() == "RepeatedFailures"
    body["transition"] += code
    found = decode(json.dumps(body)).transition
    assert found == replace(began, depth_code=DepthReason.UNKNOWN)


@pytest.mark.parametrize(
    ("number", "columns"),
    [pytest.param(64, 2, id="sixty-four runs are written out"), pytest.param(65, 4, id="more of them as columns")],
)
def test_many_runs_are_written_as_columns(number: int, columns: int) -> None:
    members = tuple(pid(3 * n + k, n % 3) for n in range(number) for k in range(2))
    text = encode(Record(members=members, incarnations={m.slot: m.incarnation for m in members}))
    assert [len(stretch) for stretch in json.loads(text)["members"]] == [columns]
    assert decode(text).members == members
    if columns == 4:
        assert json.loads(text)["members"][0][1].startswith("0,1,1,1,"), "steps from the end of the run before"
        assert set(json.loads(text)["members"][0][2].split(",")) == {"1"}


def test_pods_out_of_order_are_read_in_their_order() -> None:
    members = tuple(pid(n) for n in (5, 3, 4, 0)) + tuple(pid(200 - 2 * n) for n in range(80))
    assert decode(encode(Record(members=members))).members == members


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(f"0-{MAX_PODS - 1}", id="as many pods as two specs had"),
        pytest.param("7-7", id="one"),
    ],
)
def test_runs_that_can_be(run: str) -> None:
    body = json.loads(encode(Record()))
    body["lost"] = [["workers", run]]
    first, _, last = run.partition("-")
    assert len(decode(json.dumps(body)).lost) == int(last) - int(first) + 1


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(f"0-{MAX_PODS}", id="one pod too many"),
        pytest.param("0-20000,40000-60000", id="together too many"),
        pytest.param("5-4", id="backwards"),
        pytest.param("-1", id="below zero"),
    ],
)
def test_runs_that_cannot_be(runs: str) -> None:
    body = json.loads(encode(Record()))
    body["lost"] = [["workers", runs]]
    with pytest.raises(RecordError):
        decode(json.dumps(body))


def test_records_beyond_four_kibibytes_are_packed() -> None:
    small = Record(master_addr="x" * (4096 - len(encode(Record()))))
    assert (len(encode(small)), encode(small)[0]) == (4096, "{")
    large = replace(small, master_addr=small.master_addr + "x")
    assert encode(large).startswith("z:")
    assert decode(encode(large)) == large


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param('{"v":0}', "version 0; this operator reads version 1", id="a version that never was"),
        pytest.param('{"v":"x"}', "version x", id="no version"),
        pytest.param("z:###", "cannot be unpacked", id="packed by nobody"),
        pytest.param(encode(Record(master_addr="x" * 9000))[:-5], "cut off", id="cut off"),
        pytest.param("{}", "cannot be read: KeyError", id="nothing in it"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(text: str, words: str) -> None:
    with pytest.raises(RecordError, match=words) as refusal:
        decode(text)
    assert not isinstance(refusal.value, NewerRecordError)
    assert MAX_UNPACKED >= 1 << 20


def test_a_time_that_must_be_there() -> None:
    with pytest.raises(RecordError, match="a time is missing"):
        parse_required_time(None)
    assert parse_required_time(SHOWN[3]) == AT[3]


def test_times_are_written_in_utc_to_the_millisecond() -> None:
    there = NOW.astimezone(timezone(timedelta(hours=2))) + timedelta(microseconds=123_999)
    assert (format_time(there), format_time(None)) == ("2026-03-01T12:00:00.123Z", None)
    assert (parse_time("2026-03-01T12:00:00"), parse_time(None), parse_time("")) == (NOW, None, None)
    assert parse_time("2026-03-01T14:00:00+02:00") == NOW


# ---- the history

ENTRY = HistoryEntry(
    generation=2,
    from_size=2,
    to_size=3,
    kind=TransitionKind.RESIZE,
    cause=OpenReason("C"),
    at=AT[1],
    detected_at=AT[0],
    running_at=AT[2],
)


def test_the_history_as_it_is_written() -> None:
    text = encode_history((ENTRY, replace(ENTRY, generation=3, running_at=None)))
    first = {"generation": 2, "from": 2, "to": 3, "kind": "resize", "cause": "C", "at": SHOWN[1], "detected_at": SHOWN[0],
             "running_at": SHOWN[2]}  # fmt: skip
    assert json.loads(text) == [first, {**first, "generation": 3, "running_at": None}]
    assert " " not in text
    assert decode_history(text) == (ENTRY, replace(ENTRY, generation=3, running_at=None))


def test_when_a_generation_ran_is_noted_for_it_alone() -> None:
    entries = (
        replace(ENTRY, running_at=None),
        replace(ENTRY, generation=3, running_at=None),
        replace(ENTRY, generation=4),
    )
    marked = mark_running(entries, 3, AT[9])
    assert [e.running_at for e in marked] == [None, AT[9], AT[2]]
    assert mark_running(entries, 4, AT[9]) == entries


@pytest.mark.parametrize(
    ("generation", "port"), [(0, 10_000), (1, 10_010), (899, 18_990), (900, 10_000), (901, 10_010)]
)
def test_the_port_of_a_generation(generation: int, port: int) -> None:
    assert master_port(generation) == port
