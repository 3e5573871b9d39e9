"""The record: what was written is read again, and it stays small (decision 1)."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.builders import NOW, pid, trains, transition

from elastipod_operator.core.names import PodId, Slot
from elastipod_operator.core.record import (
    MAX_BYTES,
    MAX_HISTORY,
    HistoryEntry,
    Kind,
    Record,
    RecordError,
    Transition,
    decode,
    decode_history,
    encode,
    encode_history,
    mark_running,
)

times = st.datetimes(
    datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)
).map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000))  # fmt: skip
maybe_times = st.none() | times
counts = st.integers(0, 10_000)
pods = st.builds(PodId, st.sampled_from(["base", "extra"]), st.integers(0, 50), st.integers(0, 3))
transitions = st.builds(
    Transition, kind=st.sampled_from(Kind), cause=st.text(max_size=20), message=st.text(max_size=60), from_size=counts,
    goal=counts, began_at=times, detected_at=times, deadline=times, graceful=st.booleans(), not_before=maybe_times,
    counted=st.booleans(),
)  # fmt: skip
records = st.builds(
    Record, generation=counts, members=st.lists(pods, unique=True, max_size=30).map(tuple), master_addr=st.text(max_size=20),
    transition=st.none() | transitions, lost=st.lists(pods, unique=True, max_size=5).map(tuple),
    incarnations=st.dictionaries(st.builds(Slot, st.sampled_from(["base", "extra"]), st.integers(0, 50)), st.integers(1, 9)),
    window_since=maybe_times, settled_at=maybe_times, resized_at=maybe_times, recovered_at=maybe_times,
    incident_at=maybe_times, started_at=maybe_times, ended_at=maybe_times, restarts=counts, retries=counts,
    failures_in_row=counts, best_step=st.integers(-1, 10**12),
)  # fmt: skip


@given(records)
def test_what_was_written_is_read_again(record: Record) -> None:
    assert decode(encode(record)) == record
    assert encode(decode(encode(record))) == encode(record)


def test_an_outcome_is_read_again() -> None:
    record = replace(trains(), outcome="Failed", outcome_reason="WorkerCrash", outcome_message="boom")
    assert decode(encode(record)) == record


def test_consecutive_pods_take_one_run() -> None:
    members = (pid(0), pid(1), pid(2), pid(3, 1), pid(4), pid(0, spec="extra"))
    assert json.loads(encode(Record(members=members)))["members"] == [["workers", "0-2,3.1,4"], ["extra", "0"]]


@pytest.mark.parametrize(
    "replaced_share", [pytest.param(0.0, id="undisturbed"), pytest.param(0.1, id="one in ten was replaced")]
)
def test_four_thousand_pods_fit(replaced_share: float) -> None:
    rng = Random(1)
    replaced = {n for n in range(4000) if rng.random() < replaced_share}
    members = tuple(pid(n) for n in range(4000) if n not in replaced) + tuple(pid(n, 1) for n in sorted(replaced))
    record = replace(
        trains(), members=members, transition=transition(message="m" * 600),
        incarnations={Slot("workers", n): 1 for n in replaced},
    )  # fmt: skip
    assert len(encode(record).encode()) < MAX_BYTES


def test_a_record_that_grows_too_large_is_refused() -> None:
    members = tuple(pid(n, n % 7) for n in range(4000))
    with pytest.raises(RecordError, match="more than 16384"):
        encode(Record(members=members))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("{", id="half a record"),
        pytest.param("[]", id="something else"),
        pytest.param('{"v":1}', id="fields are missing"),
        pytest.param('{"v":2}', id="a version of the future"),
        pytest.param(encode(trains()).replace('"0-1"', '"1-x"'), id="a run that is none"),
        pytest.param(encode(trains()).replace('"0-1"', '"0-99999999999"'), id="a run without end"),
        pytest.param(encode(trains()).replace("12:00", "yesterday").replace("11:00", "yesterday"), id="a time that is none"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_said_to_be_so(text: str) -> None:
    with pytest.raises(RecordError):
        decode(text)


def entry(generation: int) -> HistoryEntry:
    return HistoryEntry(
        generation=generation,
        from_size=2,
        to_size=4,
        kind=Kind.RESIZE,
        cause="CapacityAvailable",
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


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"generation":1}]'])
def test_a_damaged_history_counts_as_empty(text: str) -> None:
    assert decode_history(text) == ()
