"""The record as text and back. Pods are written as runs of ordinals, long texts packed: thousands of pods fit into 16 KiB."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from .names import PodId
from .record import (
    FaultyReplica,
    NodeFaults,
    PartialGang,
    PhaseTimes,
    Record,
    RequeueBackoff,
    ResizeStatistics,
    RestartMode,
    RestartWindow,
    Transition,
    TransitionKind,
)
from .sizes import MAX_REPLICAS

VERSION = 1
MAX_BYTES = 16 * 1024
"""What a record should take at most (decision 1)."""
PACK_BEYOND = 4 * 1024
PACKED = "z:"
# Whoever may edit the job may write anything there; nothing of ours unpacks to more.
MAX_UNPACKED = 8 << 20
MAX_TEXT = 1000
MAX_READABLE_RUNS = 64
# Of two specs each slot may have had a pod, and as many pods that were given up may not be gone yet.
MAX_PODS = 2 * MAX_REPLICAS
NO_INCARNATION = -1
# Far enough from the first and the last time that can be written down, for the longest wait to be added or taken off.
VALID_YEARS = range(1970, 3000)


class RecordError(ValueError):
    """The annotation holds something that this version cannot read."""


class NewerRecordError(RecordError):
    """A later version of the operator wrote it: whoever cannot read it must leave the job alone. owner: UID of that job."""

    owner: str = ""


def encode(record: Record) -> str:
    """Give the annotation's text, deterministic for equal records."""
    body: dict[str, Any] = {
        "v": VERSION,
        "generation": record.generation,
        "members": _encode_pods(record.members),
        "master": record.master_addr,
        "lost": _encode_pods(record.lost),
        "incarnations": _encode_pods(_extra_incarnations(record)),
        "budget": [
            record.restarts,
            record.retries,
            record.consecutive_failures,
            record.best_step,
            record.stalled_recoveries,
        ],
        "times": [
            format_time(t)
            for t in (
                record.window_since,
                record.running_since,
                record.resized_at,
                record.recovered_at,
                record.fault_at,
                record.started_at,
                record.ended_at,
            )
        ],
        **_optional_parts(record),
    }
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    if len(text) <= PACK_BEYOND:
        return text
    return PACKED + base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def _optional_parts(record: Record) -> dict[str, Any]:
    """Give what most records lack."""
    parts = _optional_times(record)
    if record.owner:
        parts["uid"] = record.owner
    if record.transition:
        t = record.transition
        parts["transition"] = [
            t.kind.value,
            t.cause,
            t.message[:MAX_TEXT],
            t.from_size,
            t.target_size,
            format_time(t.began_at),
            format_time(t.detected_at),
            format_time(t.deadline),
            t.graceful,
            format_time(t.not_before),
            t.uses_budget,
            t.is_budget_checked,
            t.recreates_pods,
            t.reach.value,
        ]
        if t.is_shortened:
            parts["shortened"] = True
    if record.window != RestartWindow():
        w = record.window
        parts["window"] = [w.number, format_time(w.since), w.restarts, w.full_restarts]
    if record.faulty_replicas or record.is_full_restart:
        rows = [[c.pod.spec, c.pod.ordinal, c.pod.incarnation, c.rank, c.node] for c in record.faulty_replicas]
        parts["culprits"] = [record.is_full_restart, rows]
    if record.node_faults:
        parts["offences"] = [[o.node, o.times, format_time(o.at)] for o in record.node_faults]
    if record.size_before_growth or record.resize_failures or record.resize_failed_at:
        parts["growth"] = [record.size_before_growth, record.resize_failures, format_time(record.resize_failed_at)]
    if record.gang:
        g = record.gang
        parts["gang"] = [format_time(g.since), g.bound, g.tries, format_time(g.rest_until)]
    if record.resize_began_at or record.resize_statistics != ResizeStatistics():
        m = record.resize_statistics
        paces = [[size, _ms(pace)] for size, pace in m.step_times]
        parts["measures"] = [format_time(record.resize_began_at), None if m.pause is None else _ms(m.pause), paces]
    if record.suspended_time:
        parts["idle"] = _ms(record.suspended_time)
    if record.shrank_after_fault:
        parts["shrunk"] = True
    if record.phase_times != PhaseTimes():
        parts["ledger"] = [
            record.phase_times.phase,
            format_time(record.phase_times.since),
            [list(row) for row in record.phase_times.booked],
        ]
    if record.queue or record.requeue_backoff:
        parts["queue"] = [
            record.queue,
            *(
                [record.requeue_backoff.tries, format_time(record.requeue_backoff.until)]
                if record.requeue_backoff
                else ()
            ),
        ]
    if record.ceiling:
        parts["ceiling"] = record.ceiling
    if record.outcome:
        parts["outcome"] = [record.outcome, record.outcome_reason, record.outcome_message[: 2 * MAX_TEXT]]
    return parts


def _optional_times(record: Record) -> dict[str, Any]:
    times = {"begun": record.generation_began_at, "accepted": record.accepted_at, "pods": record.first_pod_at}
    return {key: format_time(at) for key, at in times.items() if at}


def _extra_incarnations(record: Record) -> list[PodId]:
    """Give the incarnations that the members do not tell already; NO_INCARNATION for members whose one is not on record."""
    told = {member.slot: member.incarnation for member in record.members}
    extra = [PodId(s.spec, s.ordinal, i) for s, i in record.incarnations.items() if told.get(s) != i]
    return sorted([*extra, *(PodId(s.spec, s.ordinal, NO_INCARNATION) for s in told if s not in record.incarnations)])


def decode(text: str) -> Record:
    """Read an annotation written by encode(). Raises RecordError with what is wrong with it."""
    try:
        body = json.loads(_unpack(text) if text.startswith(PACKED) else text)
        if isinstance(body["v"], int) and body["v"] > VERSION:
            newer = NewerRecordError(
                f"the state record has version {body['v']}; this operator reads version {VERSION} and leaves the job alone"
            )
            newer.owner = str(body.get("uid", ""))
            raise newer
        if body["v"] != VERSION:
            raise RecordError(f"the state record has version {body['v']}; this operator reads version {VERSION}")
        return _record(body)
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise RecordError(f"the state record cannot be read: {type(error).__name__}: {error}") from error


def _record(body: dict[str, Any]) -> Record:
    # Later operators may write more into every list, and an earlier one wrote less: what is unknown is left out.
    restarts, retries, failures, best, *stalled = body["budget"]
    window, settled, resized, recovered, fault, started, ended = (parse_time(t) for t in body["times"][:7])
    members = _decode_pods(body["members"], MAX_REPLICAS)
    outcome = body.get("outcome", ["", "", ""])
    is_full, faulty_replicas, *_ = body.get("culprits", [False, []])
    size_before_growth, resize_failures, resize_failed_at, *_ = body.get("growth", [0, 0, None])
    resize_began_at, pause, paces, *_ = body.get("measures", [None, None, []])
    phase, since, booked, *_ = body.get("ledger", ["", None, []])
    queue, *shed = body.get("queue", [""])
    from_members = {m.slot: m.incarnation for m in members}
    extra = {pod.slot: pod.incarnation for pod in _decode_pods(body["incarnations"])}
    return Record(
        generation=int(body["generation"]),
        members=members,
        master_addr=str(body["master"]),
        transition=_transition(body) if "transition" in body else None,
        lost=_decode_pods(body["lost"]),
        incarnations={slot: number for slot, number in {**from_members, **extra}.items() if number != NO_INCARNATION},
        window_since=window, running_since=settled, resized_at=resized, recovered_at=recovered, fault_at=fault,
        generation_began_at=parse_time(body.get("begun")), first_pod_at=parse_time(body.get("pods")),
        accepted_at=parse_time(body.get("accepted")), started_at=started, ended_at=ended,
        restarts=int(restarts), retries=int(retries), consecutive_failures=int(failures), best_step=int(best),
        stalled_recoveries=int(stalled[0]) if stalled else 0,
        window=_window(body["window"]) if "window" in body else RestartWindow(),
        faulty_replicas=tuple(_faulty_replica(row) for row in faulty_replicas),
        is_full_restart=bool(is_full),
        node_faults=tuple(NodeFaults(str(node), int(times), parse_required_time(at)) for node, times, at, *_ in body.get("offences", [])),
        size_before_growth=int(size_before_growth), resize_failures=int(resize_failures), resize_failed_at=parse_time(resize_failed_at),
        gang=_gang(body["gang"]) if "gang" in body else None,
        resize_began_at=parse_time(resize_began_at),
        resize_statistics=ResizeStatistics(
            None if pause is None else _from_ms(pause), tuple((int(size), _from_ms(pace)) for size, pace, *_ in paces)
        ),
        suspended_time=_from_ms(body.get("idle", 0)), shrank_after_fault=bool(body.get("shrunk", False)),
        phase_times=PhaseTimes(str(phase), parse_time(since), tuple((str(name), int(ms)) for name, ms, *_ in booked)),
        queue=str(queue), requeue_backoff=RequeueBackoff(int(shed[0]), parse_required_time(shed[1])) if shed else None,
        owner=str(body.get("uid", "")),
        ceiling=int(body.get("ceiling", 0)),
        outcome=str(outcome[0]), outcome_reason=str(outcome[1]), outcome_message=str(outcome[2]),
    )  # fmt: skip


def _unpack(text: str) -> str:
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(base64.b85decode(text[len(PACKED) :]), MAX_UNPACKED)
    except (zlib.error, binascii.Error) as error:
        raise RecordError(f"the state record cannot be unpacked: {error}") from error
    if not unpacker.eof:
        raise RecordError(f"the state record is cut off, or unpacks to more than {MAX_UNPACKED} bytes")
    return raw.decode()


def _encode_pods(pods: tuple[PodId, ...] | list[PodId]) -> list[list[str]]:
    """Write pods in their order: for each stretch of one spec its name and runs such as `0-6,7.2,9-12` (7.2: incarnation 2).

    Many runs are written as three columns of numbers, which pack well: steps from the end of the run before, lengths,
    incarnations.
    """
    stretches: list[tuple[str, list[list[int]]]] = []
    for before, pod in pairwise((None, *pods)):
        assert pod is not None
        if before is None or before.spec != pod.spec:
            stretches.append((pod.spec, []))
        runs = stretches[-1][1]
        if runs and (runs[-1][1] + 1, runs[-1][2]) == (pod.ordinal, pod.incarnation):
            runs[-1][1] = pod.ordinal
        else:
            runs.append([pod.ordinal, pod.ordinal, pod.incarnation])
    return [_stretch(spec, runs) for spec, runs in stretches]


def _stretch(spec: str, runs: list[list[int]]) -> list[str]:
    if len(runs) <= MAX_READABLE_RUNS:
        return [spec, ",".join(_run(*run) for run in runs)]
    ends = [0, *(last + 1 for _, last, _ in runs)]
    steps = (first - end for (first, _, _), end in zip(runs, ends, strict=False))
    columns = steps, (last - first for first, last, _ in runs), (incarnation for _, _, incarnation in runs)
    return [spec, *(",".join(map(str, column)) for column in columns)]


def _run(first: int, last: int, incarnation: int) -> str:
    ordinals = str(first) if first == last else f"{first}-{last}"
    return f"{ordinals}.{incarnation}" if incarnation else ordinals


def _decode_pods(stretches: list[list[str]], most: int = MAX_PODS) -> tuple[PodId, ...]:
    """Read what _encode_pods() wrote. most: of more pods than that no record of ours tells."""
    pods: list[PodId] = []
    for spec, *columns in stretches:
        for first, last, incarnation in _read_columns(*columns[:3]) if len(columns) >= 3 else _read_runs(columns[0]):
            if first < 0 or not 0 <= last - first < most - len(pods):
                raise RecordError(f"{first}-{last} is no run of pods")
            pods += (PodId(str(spec), ordinal, incarnation) for ordinal in range(first, last + 1))
    return tuple(pods)


def _read_runs(runs: str) -> Iterator[tuple[int, int, int]]:
    for run in runs.split(","):
        ordinals, _, incarnation = run.partition(".")
        first, _, last = ordinals.partition("-")
        yield int(first), int(last or first), int(incarnation or 0)


def _read_columns(steps: str, lengths: str, incarnations: str) -> Iterator[tuple[int, int, int]]:
    end = 0
    columns = (map(int, column.split(",")) for column in (steps, lengths, incarnations))
    for step, length, incarnation in zip(*columns, strict=True):
        first = end + step
        end = first + length + 1
        yield first, end - 1, incarnation


def _transition(body: dict[str, Any]) -> Transition:
    values = body["transition"]
    kind, cause, message, from_size, target_size, began, detected, deadline, graceful, not_before, counted, *later = (
        values
    )
    later += [False, False, RestartMode.IN_PROCESS][len(later) :]  # earlier operators wrote less
    weighed, full, reach, *_ = later
    return Transition(
        kind=TransitionKind(kind), cause=str(cause), message=str(message), from_size=int(from_size), target_size=int(target_size),
        began_at=parse_required_time(began), detected_at=parse_required_time(detected), deadline=parse_required_time(deadline),
        graceful=bool(graceful), not_before=parse_time(not_before), uses_budget=bool(counted), is_budget_checked=bool(weighed),
        recreates_pods=bool(full), reach=RestartMode(reach), is_shortened=bool(body.get("shortened", False)),
    )  # fmt: skip


def _faulty_replica(values: list[Any]) -> FaultyReplica:
    spec, ordinal, incarnation, rank, node, *_ = values
    return FaultyReplica(PodId(str(spec), int(ordinal), int(incarnation)), int(rank), str(node))


def _window(values: list[Any]) -> RestartWindow:
    number, since, restarts, full, *_ = values
    return RestartWindow(int(number), parse_time(since), int(restarts), int(full))


def _gang(values: list[Any]) -> PartialGang:
    since, bound, tries, rest_until, *_ = values
    return PartialGang(parse_required_time(since), int(bound), int(tries), parse_time(rest_until))


def format_time(at: datetime | None) -> str | None:
    """Write a time, to the millisecond."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def parse_time(text: str | None) -> datetime | None:
    """Read a time; one without a zone is UTC. Raises RecordError for one with which nobody could reckon."""
    at = datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
    if at is not None and at.year not in VALID_YEARS:
        raise RecordError(f"the time {text} is none of this job")
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at


def parse_required_time(text: str | None) -> datetime:
    """Read a time that must be there. Raises RecordError."""
    at = parse_time(text)
    if at is None:
        raise RecordError("a time is missing")
    return at


def _ms(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _from_ms(number: Any) -> timedelta:
    return timedelta(milliseconds=int(number))
