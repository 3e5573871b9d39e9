"""The picture of one run: replicas of both jobs that train, phases and loss over time, with the cause of every change."""

from __future__ import annotations

from collections.abc import Sequence

from elastipod_client.picture import Note, Timeline, UrgentTrack, depth_label, depth_tip
from elastipod_local.demo.report import Change, JobPhase, Run, Span, changes, losses, spans
from elastipod_local.demo.urgent_job import UrgentRun, urgent_losses, urgent_spans


def timeline_of(run: Run, title: str, urgent: UrgentRun | None = None) -> Timeline:
    """Give the picture's content for a run: its phases, its loss, a note for each change of generation, and the urgent job."""
    curves = tuple(tuple((at_s, loss) for at_s, _, loss in curve) for curve in losses(run))
    notes = tuple(
        Note(run.since_creation(change.entry.began_at), _cause(change), change.entry.depth, _tip(change))
        for change in changes(run)
    )
    phases = spans(run)
    return Timeline(
        title, phases, curves, notes, _urgent_track(run, urgent, phases) if urgent and urgent.steps else None
    )


def _cause(change: Change) -> str:
    gap = "" if change.pause_s is None else f", {change.pause_s:.2f} s pause"
    entry = change.entry
    return f"{entry.size_before} → {entry.size}{gap}\n{entry.cause}{depth_label(entry.depth)}"


def _tip(change: Change) -> str:
    entry = change.entry
    told = f"generation {entry.generation}: {entry.kind.value} {entry.size_before} → {entry.size}, {entry.cause}"
    return depth_tip(told, entry.depth, entry.depth_code.told(entry.depth_reason))


def _urgent_track(run: Run, urgent: UrgentRun, phases: Sequence[Span]) -> UrgentTrack:
    """Stack the urgent job on the replicas that train beside it. It waits from the moment when their number has shrunk."""
    shown = urgent_spans(run, urgent)
    begin, end = shown[0].start_s, shown[-1].end_s
    floor = max((p.size for p in phases if p.start_s < end and p.end_s > begin), default=0)
    freed_s = max((p.end_s for p in phases if p.end_s <= begin and p.size > floor), default=0.0)
    waiting = Span(JobPhase.STARTING, max(freed_s, run.since_creation(urgent.run.created_at)), begin, shown[0].size)
    return UrgentTrack(urgent.job, (waiting, *shown), floor, urgent_losses(run, urgent))
