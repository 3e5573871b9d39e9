"""The rows of the whole path: what an event costs a job through operator, kubelets and Kueue, beside a Job of Kubernetes."""

from __future__ import annotations

from bench.common.report import Reach, Row
from bench.common.samples import Samples
from bench.whole_path.sides import BATCH_JOB, CRASH, EARLY_CRASH, EARLY_S, GROW, MEMORY, NODE_LOSS, PROCESS, SHRINK

SEEN_WITHIN_S = 15.0
_GAP = "last step of the old world on any rank to the first step of the new world on its slowest rank"
_BACK = "to the first step of the new world on its slowest rank"
_PEER = "the peer restarts as JobSet does: its Job is deleted with its pods and created again, and resumes from a checkpoint"
_EVENTS = {
    GROW: (GROW, f"kubectl scale; {_GAP}; the new pods start before it, the peer's in it"),
    SHRINK: (SHRINK, f"kubectl scale; {_GAP}"),
    CRASH: (f"{CRASH} back", f"SIGKILL of one worker of 4 {_BACK}"),
    EARLY_CRASH: (
        f"{EARLY_CRASH} back", f"as before, less than {EARLY_S:g} s after the start: the agent has prepared no next one",
    ),
}  # fmt: skip


def rows(samples: Samples, sides: list[str]) -> list[Row]:
    """Draw the rows of the elastic sides among these; the peer's column is there if it was chosen."""
    peer = BATCH_JOB if BATCH_JOB in sides else None
    found: list[Row] = []
    for side in (side for side in (MEMORY, PROCESS) if side in sides):
        for event, (metric, how) in _EVENTS.items():
            found.append(_row(samples, side, metric, "s", how + (f"; {_PEER}" if peer else ""), event, peer))
        for event in (GROW, SHRINK):
            how = "steps that were made again; judged by the worst run"
            found.append(_row(samples, side, f"repeated, {event}", "steps", how, event, peer, Reach.worst(0)))
        how = "power of one of 4 nodes is cut, no connection closes; until the operator has seen it; judged by the worst run"
        found.append(_row(samples, side, "node loss seen", "s", how, NODE_LOSS, None, Reach.worst(SEEN_WITHIN_S)))
        how = f"the same, {_BACK}, 2 replicas; the job waits at most 5 s for another node"
        found.append(_row(samples, side, "node loss back", "s", how, NODE_LOSS, None))
    return found


def _row(
    samples: Samples,
    side: str,
    metric: str,
    unit: str,
    how: str,
    event: str,
    peer: str | None,
    reach: Reach | None = None,
) -> Row:
    sides = (side, peer) if peer else (side,)
    counts = ", ".join(f"{each}: n={len(samples.values.get((each, metric), ()))}" for each in sides)
    failed = [why for each in sides for why in samples.failures.get((each, event), [])]
    return Row(
        metric=f"{metric}, {side}", unit=unit, ours=samples.spread(side, metric), peer=peer,
        theirs=samples.spread(peer, metric) if peer else None, reach=reach,
        how=f"{how}. {counts}" + (f"; failed, e.g.: {failed[0][:200]}" if failed else ""),
        missing=samples.missing(side, metric),
    )  # fmt: skip
