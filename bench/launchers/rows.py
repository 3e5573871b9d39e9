"""The rows of the agent's report: which metric is held against whom, and what is to be reached."""

from __future__ import annotations

from dataclasses import dataclass

from bench.common.report import Reach, Row
from bench.common.samples import Samples

WARM, COLD, MEMORY = "warm", "cold", "memory"
ORIGINAL, TUNED, TORCHRUN = "original", "torchrun-tuned", "torchrun"
PEER_NAMES = {WARM: "ours-process-restart", COLD: "ours-cold", ORIGINAL: "original-agent"}


@dataclass(frozen=True, slots=True)
class Line:
    """One metric and those that it is compared with. peers: side -> what is to be reached against it."""

    metric: str
    unit: str
    how: str
    peers: tuple[tuple[str, Reach | None], ...] = ()
    reach: Reach | None = None  # for a limit that holds for any peer
    ours: str = WARM
    event: str = ""  # the event of the session that it belongs to, where that is named otherwise


_GAP = "last step of the old world on any rank to the first step of the new world on its slowest rank"
_BACK = "SIGKILL to the first step of the new world on its slowest rank"
_BETTER_20 = ((ORIGINAL, Reach.ratio(20)), (TUNED, Reach.ratio(20)))
_IN_MEMORY = "survivors keep their processes and state"
_OURS = {COLD: ", cold workers", MEMORY: ", in memory"}
_BESIDE = "one node, its worker training; the operator's heartbeats included"

LINES = (
    Line("grow 2->4", "s", f"{_GAP}; agents are up, torchrun's start then", (*_BETTER_20, (COLD, None))),
    Line("shrink 4->2", "s", _GAP, ((ORIGINAL, Reach.ratio(20)), (COLD, None))),
    Line("restart of 4", "s", _GAP, ((ORIGINAL, None), (COLD, None))),
    *(
        Line(f"repeated, {name}", "steps", "judged by the worst run", ((ORIGINAL, None),), Reach.worst(0), event=name)
        for name in ("grow 2->4", "shrink 4->2", "restart of 4")
    ),
    Line(
        "repeated, grow 2->4", "steps", "torchrun goes back to the last checkpoint", ((TUNED, None),), event="grow 2->4"
    ),
    Line(
        "crash seen after the exit",
        "ms",
        "the kernel reports the worker's end to FAULTED at a long-polling client; the original is asked every 10 ms",
        ((ORIGINAL, None),),
        Reach.median(10),
        event="crash",
    ),
    Line("crash seen after SIGKILL", "ms", "as before, from the signal on", ((ORIGINAL, None),), event="crash"),
    Line("crash back", "s", f"one worker of 4; {_BACK}", (*_BETTER_20, (COLD, None)), event="crash"),
    Line(
        "node loss seen",
        "ms",
        "agent and worker of one of 4 nodes get SIGKILL, and their connections break; judged by the worst run",
        ((ORIGINAL, None),),
        Reach.worst(1000),
        event="node loss",
    ),
    Line(
        "node loss back",
        "s",
        f"agent and worker of one of 4 nodes, on with 3; {_BACK}",
        ((TUNED, Reach.ratio(10)), (ORIGINAL, None), (COLD, None)),
        event="node loss",
    ),
    *(
        Line(f"start {n}", "s", "/start to the first step of the slowest rank", ((ORIGINAL, None), (COLD, None)))
        for n in (1, 2, 4)
    ),
    Line(
        "grow 2->4",
        "s",
        f"{_IN_MEMORY}; {_GAP}",
        ((TUNED, Reach.ratio(80)), (ORIGINAL, Reach.ratio(80)), (WARM, None)),
        ours=MEMORY,
    ),
    Line("shrink 4->2", "s", f"{_IN_MEMORY}; {_GAP}", ((ORIGINAL, Reach.ratio(80)), (WARM, None)), ours=MEMORY),
    Line("restart of 4", "s", f"{_IN_MEMORY}; {_GAP}", ((ORIGINAL, None), (WARM, None)), ours=MEMORY),
    *(
        Line(f"repeated, {name}", "steps", "judged by the worst run", reach=Reach.worst(0), ours=MEMORY, event=name)
        for name in ("grow 2->4", "shrink 4->2", "restart of 4")
    ),
    Line(
        "crash back",
        "s",
        f"one worker of 4, its process is replaced; {_IN_MEMORY}; {_BACK}",
        ((ORIGINAL, None), (TUNED, None), (WARM, None)),
        ours=MEMORY,
        event="crash",
    ),
    Line(
        "node loss back",
        "s",
        f"agent and worker of one of 4 nodes, on with 3; {_IN_MEMORY}; {_BACK}",
        ((TUNED, None), (ORIGINAL, None), (WARM, None)),
        ours=MEMORY,
        event="node loss",
    ),
    Line("agent up", "s", "four agents at once, from their start until all are READY", ((ORIGINAL, None),)),
    *(
        line
        for side in (WARM, COLD)
        for line in (
            Line(
                "agent private",
                "MiB",
                f"private memory (USS) of the agent's process; {_BESIDE}",
                ((TORCHRUN, None), (ORIGINAL, None)),
                Reach.median(60),
                side,
                "idle",
            ),
            Line(
                "agent total",
                "MiB",
                f"proportional memory (PSS) of the agent and of what it keeps beside the worker; {_BESIDE}",
                ((TORCHRUN, Reach.ratio(1)), (ORIGINAL, None)),
                ours=side,
                event="idle",
            ),
            Line(
                "node total",
                "MiB",
                f"proportional memory (PSS) of agent, worker and all; {_BESIDE}",
                ((TORCHRUN, None), (ORIGINAL, None)),
                ours=side,
                event="idle",
            ),
            Line(
                "agent cpu",
                "% of a core",
                f"the same processes; {_BESIDE}",
                ((TORCHRUN, None), (ORIGINAL, None)),
                Reach.median(0.2),
                side,
                "idle",
            ),
        )
    ),
    *(
        line
        for name in ("output", "output with log rules")
        for line in (
            Line(
                f"{name}, cpu",
                "% of a core",
                "one worker prints 10 MB/s in lines of 100 bytes; the agent and its matcher of log rules",
                reach=Reach.median(2),
                event=name,
            ),
            Line(
                f"{name}, wrong lines",
                "lines",
                "lines lost, torn, repeated or out of order; judged by the worst run",
                reach=Reach.worst(0),
                event=name,
            ),
        )
    ),
)


def rows(samples: Samples, lines: tuple[Line, ...] = LINES, *, is_part: bool = False) -> list[Row]:
    """Draw the rows from what was measured; a row stands there too when a side never managed, and says so.

    is_part: leave out what nobody tried, because only some sides or parts were chosen; what was tried and failed stays.
    """
    drawn = [
        (_row(samples, line, peer, reach), _has_failed(samples, line, peer))
        for line in lines
        for peer, reach in line.peers or ((None, None),)
    ]
    return [row for row, has_failed in drawn if not is_part or row.is_measured or has_failed]


def _has_failed(samples: Samples, line: Line, peer: str | None) -> bool:
    return any((side, line.event or line.metric) in samples.failures for side in (line.ours, peer) if side)


def _row(samples: Samples, line: Line, peer: str | None, reach: Reach | None) -> Row:
    event = line.event or line.metric
    runs = f"ours ({line.ours}): {_runs(samples, line.ours, line.metric, event)}"
    if peer is not None:
        runs += f"; theirs: {_runs(samples, peer, line.metric, event)}"
    return Row(
        metric=line.metric + _OURS.get(line.ours, ""),
        unit=line.unit,
        ours=samples.spread(line.ours, line.metric),
        peer=None if peer is None else PEER_NAMES.get(peer, peer),
        theirs=None if peer is None else samples.spread(peer, line.metric),
        reach=reach or line.reach,
        how=f"{line.how}. {runs}",
        missing=samples.missing(line.ours, line.metric),
    )


def _runs(samples: Samples, side: str, metric: str, event: str) -> str:
    failed = [why for name in dict.fromkeys((event, metric)) for why in samples.failures.get((side, name), [])]
    said = f"n={len(samples.values.get((side, metric), ()))}"
    return said + (f", {len(failed)} more failed, e.g.: {failed[0][:200]}" if failed else "")
