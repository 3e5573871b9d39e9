"""Decide between two generations: stop the workers, gather enough replicas, start the next generation."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, JobEvent, StartWorkers
from .avoided_nodes import use_again
from .context import Context, PlanDraft
from .depth import IN_MEMORY, DepthChoice, describe_depth, settled_depth, survives_at_any_size
from .depth_reasons import DepthReason
from .ending import finish
from .escalation import check_budgets
from .faults import STOP_TIME, Fault, find_fault, first_answers_due
from .growth import CAUSE, growth_failed, mark_interrupted_growth, warm
from .health import AGENT_EXPECTED
from .history import HistoryEntry
from .incarnations import record_incarnations
from .leavers import members_with_shards, next_members, undoes_resize
from .next_generation import (
    early_starts,
    is_under_way,
    new_generation,
    next_of,
    takes_over_at,
    without_next,
    without_void_next,
)
from .partial_gangs import follow_partial_gang, next_gang_check
from .payback import record_step_time
from .planned_change import drain_limit, suspension
from .pod_removal import remove
from .ranks import usable
from .reasons import Reason
from .record import RECORD_LOST, SUSPENDED_BY_USER, Depth, NextGeneration, Record, Transition, TransitionKind
from .recovery import begin_recovery
from .replica import Health, Replica
from .spec_edits import recreate_all_pods
from .stopping import RECHECK_AFTER, is_hard_stop_due, stop_members
from .time_order import earliest
from .wording import counted


def recover(record: Record, context: Context, fault: Fault) -> PlanDraft:
    """Count a fault and begin the recovery from it, once the agents that know how deep it must go have had time to answer."""
    due = first_answers_due(record, context.replicas, fault)
    if due is not None:
        return PlanDraft(record, wake_at=due)
    record = replace(
        mark_interrupted_growth(record_step_time(record, context.replicas), context.now),
        gang=None,
        resize_began_at=None,
    )
    begun = begin_recovery(record, context.replicas, context.policy, context.now, fault, context.key)
    event = JobEvent(fault.cause, fault.message)
    draft = in_transition(begun, context)
    return replace(draft, events=(event, *draft.events))


def in_transition(record: Record, context: Context) -> PlanDraft:
    """Decide for a job whose workers are being stopped or gathered."""
    transition = record.transition
    assert transition is not None
    if is_under_way(record, context.replicas):
        return _take_over(record, context)
    shortening: tuple[JobEvent, ...] = ()
    if transition.graceful and not is_hard_stop_due(record, context.now):
        fault = find_fault(record, context.replicas)
        if fault is not None:
            return recover(record, context, fault)
        record, shortening = _shortened(*_without_drain_handler(record, context), context)
    record = without_void_next(record, context)
    record, stops, wake = stop_members(record, context)
    if wake is not None:
        announce = _announcement(transition) if context.now == transition.began_at else ()
        actions = (*stops, *early_starts(record, context.replicas))
        return PlanDraft(record, actions, wake_at=wake, events=(*announce, *shortening))
    if next_of(record) is not None:  # some have not begun it although they have stopped, and others wait for them
        return PlanDraft(without_next(record), wake_at=context.now, events=shortening)
    if record.transition is not None and record.transition.graceful:
        record = replace(record, transition=replace(record.transition, graceful=False))  # the drain is over
    if transition.kind is TransitionKind.SUSPEND:
        return _suspended(record, context)
    budget_check = check_budgets(record, context.replicas, context.policy, context.now)
    if budget_check.reason:
        draft = finish(budget_check.record, context, "Failed", budget_check.reason, budget_check.message)
        return replace(draft, events=(*budget_check.events, *draft.events))
    if budget_check.actions:  # the losses are recorded before the pods are deleted
        return PlanDraft(budget_check.record, budget_check.actions, budget_check.events, wake_at=context.now)
    draft = _gather(budget_check.record, context)
    return replace(draft, events=(*budget_check.events, *draft.events))


def _without_drain_handler(record: Record, context: Context) -> tuple[Record, tuple[JobEvent, ...]]:
    """End a drain that no worker can notice: waiting would be useless, so the workers are stopped without a checkpoint now.

    All members must report this. A script may poll for events on one rank only and inform the others itself.
    """
    transition = record.transition
    assert transition is not None
    members = [r for m in record.members if (r := context.replicas.get(m)) is not None and r.health is not Health.ENDED]
    busy = [r for r in members if not r.is_idle]
    if not busy or not all(r.agent.no_drain_handler and r.health is not Health.SILENT for r in busy):
        return record, ()
    if any(r.agent.drained for r in members):
        return record, ()
    text = (
        f"the workers of {counted(len(busy), 'replica')} neither call elastic_event_detected() nor handle SIGUSR1: they are stopped "
        "now and will resume from their last checkpoint"
    )
    deadline = min(transition.deadline, context.now + STOP_TIME)
    ended = replace(record, transition=replace(transition, graceful=False, deadline=deadline))
    return ended, (JobEvent(Reason.EVENT_UNANSWERED, text),)


def _shortened(record: Record, events: tuple[JobEvent, ...], context: Context) -> tuple[Record, tuple[JobEvent, ...]]:
    """Shorten a drain if a member will be killed before its deadline; a drain is never prolonged."""
    transition = record.transition
    assert transition is not None
    members = (r for m in record.members if (r := context.replicas.get(m)) is not None and not r.is_idle)
    disrupted = [r for r in members if r.health is Health.DISRUPTED]
    end = drain_limit(disrupted, context)
    if not transition.graceful or end is None or max(end, context.now) >= transition.deadline:
        return record, events
    deadline = max(end, context.now)
    left_s = (deadline - context.now).total_seconds()
    event = JobEvent(Reason.DRAIN_SHORTENED, f"the workers have {left_s:.0f} s left to save: {disrupted[0].detail}")
    return replace(record, transition=replace(transition, deadline=deadline, is_shortened=True)), (*events, event)


def _announcement(transition: Transition) -> tuple[JobEvent, ...]:
    if transition.kind is TransitionKind.RECOVERY:
        return ()
    aim = f"{transition.from_size} -> {transition.target_size}" if transition.target_size else "all workers stop"
    return (JobEvent(Reason.DRAINING, f"{aim}: {transition.message}"),)


def _suspended(record: Record, context: Context) -> PlanDraft:
    if context.grant.is_suspended:
        removals: list[Action] = []
        for replica in context.replicas.by_id.values():
            removals += remove(
                replica,
                "the job is suspended" if context.grant.suspended_by is None else context.grant.suspended_by.message,
            )
        return PlanDraft(replace(record_incarnations(record, context.replicas.by_id), members=()), tuple(removals))
    transition = record.transition
    assert transition is not None
    sizes = context.policy.sizes  # a queue grants the rest later
    target_size = sizes.fit(transition.from_size) or sizes.start
    cause, message = Reason.RESUMED, "the user resumed the job"
    if transition.cause != SUSPENDED_BY_USER:
        cause, message = Reason.ADMITTED, f"queue {record.queue} granted the job its quota"
    resumed = replace(
        transition, kind=TransitionKind.START, cause=cause, message=message, target_size=target_size, from_size=0,
        began_at=context.now, detected_at=context.now, deadline=context.now + STOP_TIME, graceful=False,
    )  # fmt: skip
    record = replace(
        record_incarnations(record, context.replicas.by_id), transition=resumed, members=(), window_since=None, fault_at=None,
        suspended_time=record.suspended_time + (context.now - transition.began_at),  # no deadline runs meanwhile
    )  # fmt: skip
    draft = PlanDraft(record, events=(JobEvent(cause, message),), wake_at=context.now, adopts_spec=True)
    # If the job is resumed before its pods have ended, they are still those of the old template.
    return (
        recreate_all_pods(draft, context, "made from a template that was edited")
        if context.snapshot.job.pending_edits
        else draft
    )


def _gather(record: Record, context: Context) -> PlanDraft:
    """Wait for enough ready replicas after all old workers have stopped, then allocate the next generation."""
    transition, sizes, now = record.transition, context.grant.sizes, context.now
    assert transition is not None
    if context.grant.is_suspended and not _is_only_in_memory(record, context):
        return _suspended(suspension(record, context), context)
    if transition.cause == RECORD_LOST and any(_may_report_generation(r, now) for r in context.replicas.by_id.values()):
        return PlanDraft(record, wake_at=now + RECHECK_AFTER)
    ready = _may_begin(record, transition, context)
    # The first start takes `replicas`, and the job grows later; every other start takes all ready replicas.
    is_first = transition.kind is TransitionKind.START and not record.generation
    target_size = sizes.fit(transition.target_size) or sizes.minimum
    size = sizes.fit(min(len(ready), target_size if is_first else sizes.maximum))
    chosen = next_members(record, context, ready, size)
    if not chosen:
        record, told, due = use_again(replace(record, window_since=None), context)
        record, events = follow_partial_gang(record, context)
        return PlanDraft(
            record, events=(*told, *events), wake_at=earliest(due, next_gang_check(record, context.key, now))
        )
    if transition.not_before is not None and now < transition.not_before:
        return PlanDraft(record, wake_at=transition.not_before)
    record = replace(record, window_since=record.window_since or now)
    patience = _patience(record, transition, context)
    is_lacking = len(chosen) < target_size or not _has_all_shards(record, context, chosen)
    if is_lacking and now < patience:
        return PlanDraft(record, wake_at=patience)
    undone = record.resizes_undone + 1 if undoes_resize(transition, chosen, ready[:size]) else 0
    record = replace(record, resizes_undone=undone)
    return _start(record, context, chosen)


def _may_begin(record: Record, transition: Transition, context: Context) -> list[Replica]:
    """Give the replicas that may begin the next generation now."""
    given_up = frozenset(record.lost)  # just now, perhaps: they are to be removed
    candidates = [replica for replica in context.replicas.candidates() if replica.id not in given_up]
    if transition.kind is TransitionKind.RESIZE and transition.cause == CAUSE:
        candidates = warm(candidates, context.now)
    return usable(candidates, record, context.grant)


def _has_all_shards(record: Record, context: Context, chosen: list[Replica]) -> bool:
    """Whether nobody with shards is left out; with a replacement there may be a size for all of them."""
    there = {replica.id for replica in chosen}
    return all(holder.id in there for holder in members_with_shards(record, context.replicas))


def _is_only_in_memory(record: Record, context: Context) -> bool:
    """Whether the stopped workers have left no checkpoint, and could train at once: then they do, and are drained with one.

    A recovery does not count, because what it starts may fail again: the user would wait for a job that never stops.
    """
    transition, grant = record.transition, context.grant
    assert transition is not None
    if (
        transition.kind is not TransitionKind.RESIZE
        or transition.depth is not Depth.MEMORY
        or grant.suspended_by is not None
    ):
        return False
    ready = _may_begin(record, transition, context)
    return any(r.agent.num_kept for r in ready) and grant.sizes.fit(len(ready)) > 0


def _may_report_generation(replica: Replica, now: datetime) -> bool:
    """Whether an agent that has not answered yet may report a generation that is known from nowhere else."""
    agent, pod = replica.agent, replica.pod
    is_expected = agent.trying_since is None or now - agent.trying_since < AGENT_EXPECTED
    return pod.started and not pod.ended and replica.health is not Health.LOST and agent.state is None and is_expected


def _patience(record: Record, transition: Transition, context: Context) -> datetime:
    """Give until when a start waits for its target size instead of a smaller one (faultyScaleDownTimeoutInSeconds).

    Where every worker holds the whole state, those who are left go on at once: replacements join them while they train (growth).
    """
    policy = context.policy
    if transition.kind is TransitionKind.START or transition.recreates_pods:
        assert record.window_since is not None
        return record.window_since + policy.scaling_timeout
    if transition.kind is TransitionKind.RECOVERY:
        goes_on = transition.depth is Depth.MEMORY and survives_at_any_size(record, context.replicas, policy)
        return transition.detected_at + (timedelta(0) if goes_on else policy.faulty_timeout)
    return transition.began_at


def _is_faulty_shrink(record: Record, transition: Transition, size: int) -> bool:
    """Whether the last change of size was a shrink because of a fault, not on request."""
    if size == transition.from_size:
        return record.shrank_after_fault
    return size < transition.from_size and transition.kind is TransitionKind.RECOVERY


def _take_over(record: Record, context: Context) -> PlanDraft:
    """Take over the generation that agents have begun by themselves, once the pause is over."""
    following = next_of(record)
    assert following is not None
    waits_until = takes_over_at(record, context.replicas, context.now)
    if waits_until is not None:
        return PlanDraft(record, tuple(early_starts(record, context.replicas)), wake_at=waits_until)
    return _begin(replace(record, resizes_undone=0), context, following, IN_MEMORY)


def _start(record: Record, context: Context, chosen: list[Replica]) -> PlanDraft:
    assert record.transition is not None
    following = new_generation(record, context.replicas, chosen)
    return _begin(record, context, following, settled_depth(record.transition, chosen))


def _begin(record: Record, context: Context, following: NextGeneration, choice: DepthChoice | None) -> PlanDraft:
    """Begin a generation: its record, and a /start for each member that has not begun it yet."""
    transition = record.transition
    assert transition is not None
    generation, size = following.generation, len(following.members)
    started = replace(
        record, generation=generation, members=following.members, master_addr=following.master_addr,
        agents_serve_store=following.agents_serve_store,
        transition=None, window_since=None, generation_began_at=context.now, running_since=None, gang=None, size_before_growth=0,
        resize_began_at=transition.began_at if transition.kind is TransitionKind.RESIZE else None,
        shrank_after_fault=_is_faulty_shrink(record, transition, size),
    )  # fmt: skip
    if transition.kind is TransitionKind.RESIZE and transition.cause == CAUSE:
        grew = size > transition.from_size
        started = (
            replace(started, size_before_growth=transition.from_size) if grew else growth_failed(started, context.now)
        )
    if choice is not None:  # the phase that ends now belongs to a change of this depth
        started = replace(started, phase_times=replace(record.phase_times, depth=choice.depth))
    entry = HistoryEntry(
        generation=generation, from_size=transition.from_size, to_size=size, kind=transition.kind,
        cause=transition.cause, at=context.now, detected_at=transition.detected_at,
        depth=choice.depth if choice is not None else None, depth_reason=choice.reason if choice is not None else "",
        depth_code=choice.code if choice is not None else DepthReason.UNKNOWN,
    )  # fmt: skip
    members = ((rank, context.replicas.get(member)) for rank, member in enumerate(following.members))
    starts = tuple(
        StartWorkers(r.pod.name, rank) for rank, r in members if r is not None and r.agent.generation != generation
    )
    reason = {
        TransitionKind.START: Reason.STARTED,
        TransitionKind.RESIZE: Reason.RESIZED,
        TransitionKind.RECOVERY: Reason.RECOVERED,
    }[transition.kind]
    # The Event of the drain gave the full message.
    was_reported = transition.kind is TransitionKind.RESIZE and context.now > transition.began_at
    why = f" ({transition.cause})" if was_reported else f": {transition.message}"
    sizes = f"{transition.from_size} -> {counted(size, 'replica')}"
    event = JobEvent(reason, f"{sizes}, generation {generation}{describe_depth(choice)}{why}")
    return PlanDraft(started, starts, events=(event,), history=(entry,))
