"""The record: what was written is read again, and it stays small."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.builders import NOW, pid, trains, transition
from tests.unit.core.checked_values import NOTHING

from elastipod_operator.core.history import MAX_HISTORY, HistoryEntry, decode_history, encode_history, mark_running
from elastipod_operator.core.names import PodId, Slot
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import (
    FaultyReplica,
    NodeFaults,
    PartialGang,
    PhaseTimes,
    Record,
    ResizeStatistics,
    RestartMode,
    RestartWindow,
    Transition,
    TransitionKind,
)
from elastipod_operator.core.record_codec import MAX_BYTES, PACKED, NewerRecordError, RecordError, decode, encode

times = st.datetimes(
    datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)
).map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000))  # fmt: skip
maybe_times = st.none() | times
counts = st.integers(0, 10_000)
pods = st.builds(PodId, st.sampled_from(["base", "extra"]), st.integers(0, 50), st.integers(0, 3))
transitions = st.builds(
    Transition,
    kind=st.sampled_from(TransitionKind),
    cause=st.text(max_size=20),
    message=st.text(max_size=60).filter(lambda words: not NOTHING.search(words)),
    from_size=counts,
    target_size=counts,
    began_at=times,
    detected_at=times,
    deadline=times,
    graceful=st.booleans(),
    not_before=maybe_times,
    uses_budget=st.booleans(),
    is_budget_checked=st.booleans(),
    recreates_pods=st.booleans(),
    reach=st.sampled_from(RestartMode),
    is_shortened=st.booleans(),
)
spans = st.integers(0, 10**9).map(lambda ms: timedelta(milliseconds=ms))
names = st.text(max_size=20)
sums = st.lists(st.tuples(names, counts), max_size=3).map(tuple)
records = st.builds(
    Record, generation=counts, members=st.lists(pods, unique=True, max_size=30).map(tuple), master_addr=st.text(max_size=20),
    transition=st.none() | transitions, lost=st.lists(pods, unique=True, max_size=5).map(tuple),
    incarnations=st.dictionaries(st.builds(Slot, st.sampled_from(["base", "extra"]), st.integers(0, 50)), st.integers(1, 9)),
    window_since=maybe_times, running_since=maybe_times, resized_at=maybe_times, recovered_at=maybe_times,
    fault_at=maybe_times, started_at=maybe_times, ended_at=maybe_times, restarts=counts, retries=counts,
    consecutive_failures=counts, best_step=st.integers(-1, 10**12), stalled_recoveries=counts,
    window=st.builds(RestartWindow, counts, maybe_times, counts, counts),
    faulty_replicas=st.lists(st.builds(FaultyReplica, pods, st.integers(-1, 9), names), max_size=3).map(tuple),
    node_faults=st.lists(st.builds(NodeFaults, names, counts, times), max_size=3).map(tuple),
    size_before_growth=counts, resize_failures=counts, resize_failed_at=maybe_times,
    gang=st.none() | st.builds(PartialGang, times, counts, counts, maybe_times), resize_began_at=maybe_times,
    resize_statistics=st.builds(ResizeStatistics, st.none() | spans, st.lists(st.tuples(counts, spans), max_size=3).map(tuple)),
    suspended_time=spans, shrank_after_fault=st.booleans(), agents_serve_store=st.booleans(), is_full_restart=st.booleans(),
    phase_times=st.builds(PhaseTimes, names, maybe_times, sums, names, sums),
)  # fmt: skip


@given(records)
def test_what_was_written_is_read_again(record: Record) -> None:
    assert decode(encode(record)) == record
    assert encode(decode(encode(record))) == encode(record)


def test_an_outcome_is_read_again() -> None:
    record = replace(trains(), outcome="Failed", outcome_reason=OpenReason("WorkerCrash"), outcome_message="boom")
    assert decode(encode(record)) == record


def test_consecutive_pods_take_one_run() -> None:
    members = (pid(0), pid(1), pid(2), pid(3, 1), pid(4), pid(0, spec="extra"))
    assert json.loads(encode(Record(members=members)))["members"] == [["workers", "0-2,3.1,4"], ["extra", "0"]]


def after_losses(number: int, share: float, times: int) -> Record:
    """Give the record of a job that lost a share of its pods again and again: survivors first, replacements last."""
    rng = Random(1)
    members, incarnations = [pid(n) for n in range(number)], {}
    for _ in range(times):
        lost = {m for m in members if rng.random() < share}
        for pod in lost:
            incarnations[pod.slot] = pod.incarnation + 1
        members = [m for m in members if m not in lost] + sorted(pid(m.ordinal, m.incarnation + 1) for m in lost)
    return replace(
        trains(), members=tuple(members), incarnations=incarnations,
        transition=transition(message="m" * 600), lost=tuple(members[-50:]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("share", "times"),
    [
        pytest.param(0.0, 0, id="undisturbed"),
        pytest.param(0.1, 1, id="one in ten was replaced"),
        pytest.param(0.02, 40, id="forty times one in fifty was lost"),
        pytest.param(0.5, 4, id="four times half of them were lost"),
    ],
)
def test_four_thousand_pods_fit(share: float, times: int) -> None:
    record = after_losses(4000, share, times)
    text = encode(record)
    assert len(text.encode()) < MAX_BYTES
    assert decode(text) == record


def test_a_full_restart_of_four_thousand_pods_fits() -> None:
    """Every pod is given up at once, and each was at another incarnation."""
    pods = tuple(pid(n, n % 7) for n in range(4000))
    record = Record(lost=pods, incarnations={p.slot: p.incarnation + 1 for p in pods})
    assert decode(encode(record)) == record
    assert len(encode(record)) < MAX_BYTES


def test_an_enormous_record_is_written_all_the_same() -> None:
    """The limit is our own wish; a job of sixteen thousand shuffled pods must not stand still for it."""
    members = [pid(n, n % 5) for n in range(16_000)]
    Random(2).shuffle(members)
    record = Record(members=tuple(members))
    assert decode(encode(record)) == replace(record, incarnations=record.incarnations)


def test_long_texts_are_cut() -> None:
    record = replace(
        trains(transition=transition(message="m" * 50_000)), outcome="Failed", outcome_message="o" * 50_000
    )
    assert len(encode(record)) < MAX_BYTES


def bomb() -> str:
    return PACKED + base64.b85encode(zlib.compress(b" " * (64 << 20), 9)).decode()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("{", id="half a record"),
        pytest.param("[]", id="something else"),
        pytest.param('{"v":1}', id="fields are missing"),
        pytest.param('{"v":0}', id="a version that never was"),
        pytest.param(PACKED + "###", id="something packed that is not"),
        pytest.param(PACKED + "VmVy", id="packed by somebody else"),
        pytest.param(encode(Record(members=tuple(pid(n, n % 7) for n in range(2000))))[:-5], id="packed and cut off"),
        pytest.param(bomb(), id="a small text that unpacks to a very large one"),
        pytest.param(encode(trains()).replace('"members":[', '"members":[1,'), id="a number in the place of pods"),
        pytest.param(encode(trains()).replace('"0-1"', "7"), id="a number in the place of runs"),
        pytest.param("[" * 100_000, id="brackets without end"),
        pytest.param(encode(trains()).replace('"0-1"', '"1-x"'), id="a run that is none"),
        pytest.param(encode(trains()).replace('"0-1"', '"0-99999999999"'), id="a run without end"),
        pytest.param(encode(trains()).replace("12:00", "yesterday").replace("11:00", "yesterday"), id="a time that is none"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_said_to_be_so(text: str) -> None:
    with pytest.raises(RecordError):
        decode(text)


def test_a_record_of_a_later_version_is_told_from_a_damaged_one() -> None:
    with pytest.raises(NewerRecordError, match="version 2"):
        decode('{"v":2}')


def test_a_record_of_the_first_release_is_read() -> None:
    """As it was written before there were windows, phase_times_of_jobs and the rest."""
    text = (
        '{"budget":[2,1,0,70],"generation":3,"incarnations":[["workers","1.2"]],"lost":[],"master":"10.0.0.0",'
        '"members":[["workers","0,1.2"]],"times":[null,"2026-03-01T11:00:00.000Z",null,null,null,'
        '"2026-03-01T11:00:00.000Z",null],"transition":["resize","C","m",2,3,"2026-03-01T12:00:00.000Z",'
        '"2026-03-01T12:00:00.000Z","2026-03-01T12:10:00.000Z",true,null,false],"v":1}'
    )
    record = decode(text)
    assert (record.restarts, record.retries, record.best_step, record.stalled_recoveries) == (2, 1, 70, 0)
    assert record.members == (pid(0), pid(1, 2))
    assert record.transition is not None
    assert not record.transition.is_budget_checked


def entry(generation: int) -> HistoryEntry:
    return HistoryEntry(
        generation=generation,
        from_size=2,
        to_size=4,
        kind=TransitionKind.RESIZE,
        cause=Reason.CAPACITY_AVAILABLE,
        at=NOW,
        detected_at=NOW,
    )


def test_history_keeps_the_newest_entries_and_notes_when_they_ran() -> None:
    entries = tuple(entry(n) for n in range(1, MAX_HISTORY + 10))
    kept = decode_history(encode_history(entries))
    assert [e.generation for e in kept] == list(range(10, MAX_HISTORY + 10))
    later = NOW + timedelta(seconds=4)
    marked = mark_running(kept, 12, later)
    assert [e.generation for e in marked if e.running_at == later] == [12]
    assert mark_running(marked, 12, later + timedelta(seconds=9)) == marked


@pytest.mark.parametrize("text", ["", "{}", "[1]", "7", '[{"generation":1}]', "[" * 100_000])
def test_a_damaged_history_counts_as_empty(text: str) -> None:
    assert decode_history(text) == ()
