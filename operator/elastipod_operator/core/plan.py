"""The operator's decision for one job: from what was observed and the time to what is to be done.

The workers of a job are either running one generation (`running`), or in transition to the next (`transit`): being
stopped, then gathered until enough replicas are ready. Which of the two is written in the record before the first call to
an agent, so an operator that dies anywhere continues where the facts are.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, Note, Plan, SetFinalizer, VerifyPods
from .avoided_nodes import avoided
from .backoff import longest_wait
from .base_first import base_first
from .clock_skew import without_future_times
from .conditions import describe
from .context import Scene, Step, finish
from .deadlines import accepted, next_deadline, overdue
from .ending import plan_deletion, plan_end
from .faults import STOP_TIME
from .health import Health, View, judge
from .membership import Limits, remember, soonest, supply, wanted_slots
from .names import Slot
from .partial_gangs import restrict
from .payback import growth_hold
from .phase_accounting import account_phases, next_phase_change
from .quota import Quota, must_ask_anew, under_quota, with_queue
from .quota_requests import resting_slots, with_asks, with_returns
from .record import RECORD_LOST, Record, Transition, TransitionKind
from .running import running
from .snapshot import Observed
from .transition import give_up_all, in_transition

LOOK_AGAIN = timedelta(seconds=1)
LIST_AGAIN = timedelta(minutes=5)
LIST_SILENT = timedelta(seconds=30)


def plan(seen: Observed) -> Plan:
    """Decide for one job. Pure: same observation, same plan; carrying out a plan twice does no harm."""
    is_new = seen.job.record is None
    if seen.job.record is not None and seen.job.record.is_empty:
        seen = _without_record(seen, seen.job.record)
    longest = longest_wait(seen.job.policy.backoff_max) if seen.job.policy is not None else None
    record = without_future_times(seen.job.record or _first_record(seen, judge(seen)), seen.now, longest)
    record = with_queue(record, seen)
    seen, quota = under_quota(seen, record)
    view = judge(seen)
    if seen.job.deleting_since is not None:
        step = with_returns(_as_step(plan_deletion(seen, record, view)), seen, view)
        return _whole(seen, view, _with_list(step, seen, view, record))
    if seen.job.hands_off:
        return _hands_off(seen, view)
    if record.outcome:
        return _whole(seen, view, with_asks(_as_step(plan_end(seen, record, view)), seen, view, quota), quota)
    if seen.job.policy is None:
        return _whole(seen, view, with_asks(Step(record), seen, view, quota))
    step = _decided(record, Scene(seen, seen.job.policy, view, quota), is_new)
    return _whole(seen, view, with_asks(step, seen, view, quota), quota)


def _decided(record: Record, scene: Scene, is_new: bool) -> Step:
    """Decide for a job that has not ended and whose spec can be used."""
    seen, view = scene.seen, scene.view
    record = replace(record, accepted_at=accepted(seen, record))
    record = _with_pods(_forget_the_gone(remember(record, view.by_id), view), scene)
    if seen.job.pending_edits and not record.generation and not scene.policy.suspend:
        return _take_edits(record, scene)
    late = overdue(seen, record)
    if late is not None:
        return finish(record, scene, "Failed", late.reason, late.message)
    step = running(record, scene) if record.transition is None else in_transition(record, scene)
    step = replace(step, wake_at=soonest(step.wake_at, next_deadline(seen, step.record)))
    asks_anew = scene.quota is not None and must_ask_anew(seen, record)
    step = replace(step, takes_spec=step.takes_spec or asks_anew or (is_new and not view.by_id))
    return _with_supply(_with_ceiling(step, scene), scene)


def _with_ceiling(step: Step, scene: Scene) -> Step:
    """Note the ceiling, and say what it means that it was set to 0: whoever scales a job to nothing expects it to stop."""
    before, now = step.record.ceiling, scene.policy.ceiling
    if before == now:
        return step
    step = replace(step, record=replace(step.record, ceiling=now))
    if now:
        return step
    text = (
        f"spec.replicas was set from {before} to 0, which means no ceiling: the job may grow to {scene.policy.wished_sizes.maximum} "
        "replicas; to stop it set spec.runPolicy.suspend to true"
    )
    return replace(step, notes=(*step.notes, Note("ScaledToZero", text, warning=True)))


def _hands_off(seen: Observed, view: View) -> Plan:
    """A newer operator wrote the record: nothing is done and nothing of it is written but the reason why."""
    report = describe(seen, Record(), view)
    return Plan(record=Record(), conditions=report.conditions, notes=report.notes, is_record_kept=True)


def _take_edits(record: Record, scene: Scene) -> Step:
    """The template was mended before anything trained: the pods made so far are given up, and made anew from it."""
    note = Note("EditsTaken", f"{', '.join(scene.seen.job.pending_edits)}: pods are made anew from the edited spec")
    step = Step(replace(record, gang=None), notes=(note,), wake_at=scene.now + LOOK_AGAIN, takes_spec=True)
    return give_up_all(step, scene, "the template was edited before the training began")


def _without_record(seen: Observed, empty: Record) -> Observed:
    """Take an empty record for a lost one: who holds nobody has not completed."""
    known = max(seen.job.history_generation, empty.generation)
    return replace(seen, job=replace(seen.job, record=None, history_generation=known))


def _first_record(seen: Observed, view: View) -> Record:
    """A new job, or one whose record was lost: then everything that runs is stopped and started in a higher generation.

    A job whose status tells that it has ended does not begin again.
    """
    goal = seen.job.policy.sizes.start if seen.job.policy else 1
    known = max(view.highest_generation(), seen.job.history_generation)
    end = next((c for c in seen.job.conditions if c.type in ("Completed", "Failed") and c.status), None)
    if end is not None:
        return Record(
            generation=known,
            outcome=end.type,
            outcome_reason=end.reason,
            outcome_message=end.message,
            ended_at=end.since,
            accepted_at=seen.job.created_at,
        )
    kind, cause, message = TransitionKind.START, "JobCreated", "the job was accepted"
    if known or view.by_id:  # no pod is made before there is a record
        kind = TransitionKind.RECOVERY if known else TransitionKind.START
        cause, message = RECORD_LOST, "the job's state record was lost"
    begun = Transition(
        kind=kind, cause=cause, message=message, from_size=0, goal=goal, began_at=seen.now, detected_at=seen.now,
        deadline=seen.now + STOP_TIME,
    )  # fmt: skip
    members = tuple(sorted(pod for pod, r in view.by_id.items() if (r.agent.generation or 0) > 0))
    # Workers ran: that training did not begin in time is nothing that a lost record can bring about.
    return Record(
        generation=known, members=members, transition=begun, started_at=seen.now if members else None,
        accepted_at=seen.job.created_at,
    )  # fmt: skip


def _with_pods(record: Record, scene: Scene) -> Record:
    """Note when a job that never trained came to have pods: from then on its start must not take too long (decision 16)."""
    if record.started_at is not None or scene.policy.suspend:
        return replace(record, first_pod_at=None)
    first = min((r.pod.created_at for r in scene.view.by_id.values()), default=None)
    return record if record.first_pod_at is not None else replace(record, first_pod_at=first)


def _forget_the_gone(record: Record, view: View) -> Record:
    lost = tuple(pod for pod in record.lost if pod in view.by_id)
    return record if lost == record.lost else replace(record, lost=lost)


def _with_supply(step: Step, scene: Scene) -> Step:
    """Add what keeps the right pods in being."""
    record = step.record
    idle = record.transition is not None and record.transition.kind is TransitionKind.SUSPEND
    if record.outcome:
        return step
    if idle or scene.policy.suspend:
        is_leaving = any(r.pod.kill_at is not None and not r.pod.ended for r in scene.view.by_id.values())
        return _with_list(step, scene.seen, scene.view, record) if is_leaving else step
    if step.takes_spec and scene.seen.job.pending_edits:
        return replace(step, wake_at=scene.now)  # pods are made from the spec on record: first it is written
    wanted = _wanted(record, scene)
    wanted, base_due = base_first(wanted, record, scene.view, scene.policy, scene.now)
    limits = Limits(
        avoids=avoided(record, scene.policy, scene.now),
        refused_until=scene.seen.refused_until,
        growth_until=growth_hold(record, scene.policy),
    )
    actions, wake = supply(scene.policy, record, scene.view, scene.now, wanted, limits)
    known = {action for action in step.actions}
    fresh = tuple(action for action in actions if action not in known)
    listing, due = _listing(record, scene)
    return replace(step.also(*fresh, *listing), wake_at=soonest(step.wake_at, wake, due, base_due))


def _wanted(record: Record, scene: Scene) -> list[Slot]:
    wanted = wanted_slots(scene.policy, record, scene.view)
    if scene.quota is None:
        return restrict(wanted, record, scene.view, scene.policy, scene.now)
    return [slot for slot in wanted if slot not in resting_slots(record, scene.quota, scene.now)]


def _listing(record: Record, scene: Scene) -> tuple[tuple[Action, ...], datetime | None]:
    """While pods are waited for, or do not answer, ask now and then whether they still exist.

    A broken watch may have missed their end: a pod that never gets an agent would hold its place for ever, and one that
    fell silent with all others would never be missed.
    """
    is_waiting = record.transition is not None or len(record.members) < scene.policy.sizes.maximum
    is_silent = any(replica.health is Health.SILENT for replica in scene.view.by_id.values())
    if scene.seen.listed_at is None or not (is_waiting or is_silent):
        return ((VerifyPods(),) if scene.view.all_silent else ()), None
    # What a watch missed before the waiting began was in nobody's way until now.
    since = scene.seen.listed_at if is_silent else max((scene.seen.listed_at, *_waits_since(record)))
    due = since + (LIST_SILENT if is_silent else LIST_AGAIN)
    return ((VerifyPods(),), scene.now + LOOK_AGAIN) if scene.now >= due else ((), due)


def _waits_since(record: Record) -> tuple[datetime, ...]:
    began_at = record.transition.began_at if record.transition is not None else record.generation_began_at
    return () if began_at is None else (began_at,)


def _with_list(step: Step, seen: Observed, view: View, record: Record) -> Step:
    """Have the pods listed from time to time: an end that the watch missed must hold up no deletion, nor keep quota."""
    if not view.by_id or seen.listed_at is None:
        return step
    # Before the deletion, or the suspension, the watch had no end to tell.
    began_at = seen.job.deleting_since or (record.transition.began_at if record.transition is not None else None)
    due = max(seen.listed_at, began_at or seen.listed_at) + LIST_SILENT
    if seen.now < due:
        return replace(step, wake_at=soonest(step.wake_at, due))
    return replace(step, actions=(*step.actions, VerifyPods()), wake_at=soonest(step.wake_at, seen.now + LOOK_AGAIN))


def _as_step(parts: tuple[Record, tuple[Action, ...], datetime | None]) -> Step:
    record, actions, wake = parts
    return Step(record, actions, wake_at=wake)


def _whole(seen: Observed, view: View, step: Step, quota: Quota | None = None) -> Plan:
    step = replace(step, record=account_phases(step.record, seen, view))
    if step.takes_spec:
        seen = replace(seen, job=replace(seen.job, pending_edits=()))
    report = describe(seen, step.record, view, quota)
    if not seen.job.has_finalizer and seen.job.deleting_since is None:
        step = replace(step, actions=(SetFinalizer(True), *step.actions))
    return Plan(
        record=step.record, actions=step.actions, conditions=report.conditions, size=report.size,
        notes=(*step.notes, *report.notes), history=step.history, running_since=step.running_since,
        wake_at=soonest(step.wake_at, report.wake_at, view.next_gone_at, next_phase_change(step.record, view, seen.now)),
        status=report.status, takes_spec=step.takes_spec, is_record_kept=bool(seen.job.hands_off),
    )  # fmt: skip
