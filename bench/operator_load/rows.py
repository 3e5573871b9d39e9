"""The rows of the operator's report: what is held against what, and the limits of spec'd sizes."""

from __future__ import annotations

from dataclasses import dataclass

from bench.common.report import Better, Reach, Row
from bench.common.samples import Samples
from bench.operator_load.parts import BARE, JOB_CONTROLLER, OTHER, OURS, Sizes


@dataclass(frozen=True, slots=True)
class Line:
    """One metric. against: the peer's side, where there is one."""

    metric: str
    unit: str
    how: str
    reach: Reach | None = None
    better: Better = Better.SMALLER
    against: str = ""


# Seconds after the last READY within which so many agents are to be started; smaller ones: as a thousand.
START_LIMITS = {1000: 2.0, 4000: 8.0}
WHOLE = (
    "one pass over a job: reads, decision, record and status, calls to its agents; pods are made and deleted beside it"
)
OF_EACH = "of the times of all passes in a run"
ALONE = "the other client: a record, then a status beside the pods of one job, made and deleted in turn, each 1.5 s after the last"
OBJECT_LIMIT_KIB, RECORD_LIMIT_KIB = 256.0, 16.0


def rows(samples: Samples, sizes: Sizes, parts: list[str]) -> list[Row]:
    """Draw the rows of these parts from what was measured; a row stands there too when it failed, and says so."""
    lines = {"starts": _starts, "creations": _creations, "fleet": _fleet}
    return [_row(samples, line, part) for part in parts for line in lines[part](sizes)]


def _starts(sizes: Sizes) -> list[Line]:
    found: list[Line] = []
    for count in sizes.starts:
        limit = next((limit for size, limit in START_LIMITS.items() if count <= size), None)
        found += [
            Line(
                f"start of {count} agents", "s",
                "all fake agents become READY in one moment, until the last was given its rank by /start; ranks are checked to be 0..n-1",
                None if limit is None else Reach.median(limit),
            ),
            Line(
                f"start of {count} agents, processor", "s",
                "processor time of the operator from that moment until all agents run",
            ),
            Line(
                f"restart of {count} agents in place", "s",
                "a worker of one agent crashes, until the last agent was started again: /stop to all, all READY, /start to all",
            ),
            Line(
                f"job object at {count} pods", "KiB", "the job as the API server gives it, record and history included",
                Reach.worst(OBJECT_LIMIT_KIB),
            ),
            Line(f"record at {count} pods", "KiB", "its annotation elastipod.io/state", Reach.worst(RECORD_LIMIT_KIB)),
        ]  # fmt: skip
    return found


def _creations(sizes: Sizes) -> list[Line]:
    count = sizes.restart
    return [
        Line(
            "pods created", "pods/s",
            f"{count} pods of one job; the bare loop posts the same pods as the same user, 16 calls at once like the operator; "
            "from the first to the last that a watch shows, kwok sets them running meanwhile",
            Reach.ratio(0.8), Better.LARGER, BARE,
        ),
        Line(
            "all pods recreated", "s",
            f"full restart of a job of {count} pods, from a worker's crash to the last new pod that runs; "
            f"the bare loop deletes {count} pods one by one and posts as many",
            Reach.ratio(0.8), Better.SMALLER, BARE,
        ),
        Line(
            "pods created", "pods/s",
            f"as before; the peer: Kubernetes' controller of batch/v1, an Indexed Job of {count} such pods, 200 calls a second allowed "
            "to it (by default 20)",
            None, Better.LARGER, JOB_CONTROLLER,
        ),
        Line(
            "all pods recreated", "s",
            f"as before; the peer restarts as JobSet does: its Job of {count} pods is deleted with them and created again; "
            "without the time to notice the crash, which ours contains",
            None, Better.SMALLER, JOB_CONTROLLER,
        ),
    ]  # fmt: skip


def _fleet(sizes: Sizes) -> list[Line]:
    what = f"{sizes.jobs} jobs with {sizes.pods} pods"
    return [
        Line("fleet trains", "s", f"{what}: from the first job posted until all agents run"),
        Line("fleet trains, processor", "s", "processor time of the operator for that"),
        Line("fleet trains, pass without pods p99", "ms", f"{WHOLE}, {OF_EACH}"),
        Line(
            "idle processor", "% of a core", f"{what} that train and change nothing, for a minute; process time of the operator",
            Reach.median(5),
        ),
        Line("idle memory", "MiB", "resident memory of the operator (VmRSS)", Reach.worst(400)),
        Line("idle heartbeats", "per s", "answers of agents that the operator asked for"),
        Line("idle passes", "per s", "passes of the operator over its jobs"),
        Line("idle calls, leases", "per s", "reads and renewals of the leader lease, by the API server's audit log", Reach.worst(1.1)),
        Line("idle calls, others", "calls", "all others in that minute, new watches included", Reach.worst(0)),
        Line(
            "churn processor", "% of a core",
            f"{sizes.churn:g} events a second: a worker's crash, a job resized to half and back, a job deleted and recreated, in turn",
        ),
        Line("churn events", "per s", "events that were begun"),
        Line("churn events in vain", "events", "those after which the job did not train again within 90 s", Reach.worst(0)),
        Line("churn passes", "per s", "passes of the operator over its jobs"),
        Line("churn calls", "per s", "calls of the operator to the API server"),
        Line("churn pass without pods p50", "ms", f"{WHOLE}, {OF_EACH}; {ALONE}", against=OTHER),
        Line("churn pass without pods p99", "ms", f"as before; {ALONE}", Reach.worst(100), against=OTHER),
        Line("churn pod p50", "ms", f"from the order of a pod, or of its deletion, to the answer; {ALONE}", against=OTHER),
        Line("churn pod p99", "ms", f"as before; {ALONE}", against=OTHER),
        Line("churn decision p99", "ms", "what of that the operator needs for itself in order to decide"),
        *_writes(),
        Line("churn machine", "% of it", "how busy operator, API server, etcd, kwok and agents kept the machine"),
        Line("churn memory", "MiB", "resident memory of the operator", Reach.worst(400)),
        Line("memory after motion", "MiB", "resident memory of the operator, all at rest again", Reach.worst(400)),
    ]  # fmt: skip


def _writes() -> list[Line]:
    """What is the machine's: another client does such writes at the same time, one after the other."""
    how = {
        "write": "one write to the API server, as the operator sees it",
        "record": "of these, the merge patch of a job's record",
        "status": "of these, the apply patch of a job's status",
        "event": "of these, a new Event",
    }
    beside = "the other client makes 4 such writes a second, one at a time: records, statuses and Events of the same size in turn"
    return [
        Line(f"churn {kind} {share}", "ms", f"{what}; {beside}", against=OTHER)
        for kind, what in how.items()
        for share in ("p50", "p99")
    ]


def _row(samples: Samples, line: Line, part: str) -> Row:
    """part: under its name stands why the rest of one of its runs was given up."""
    runs = f"n={len(samples.values.get((OURS, line.metric), ()))}"
    where = ((OURS, line.metric), (line.against, line.metric), (OURS, part))
    failed = [why for place in where for why in samples.failures.get(place, ())]
    return Row(
        metric=line.metric, unit=line.unit, ours=samples.spread(OURS, line.metric), peer=line.against or None,
        theirs=samples.spread(line.against, line.metric) if line.against else None, better=line.better, reach=line.reach,
        how=f"{line.how}. {runs}" + (f"; {failed[0][:300]}" if failed else ""),
        missing=samples.missing(OURS, line.metric),
    )  # fmt: skip
