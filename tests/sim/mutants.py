"""Mistakes to plant in what decides about generations, restarts and growth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elastipod_operator import in_flight, pod_creation, reconcile_pass
from elastipod_operator.agents.command_builder import CommandBuilder
from elastipod_operator.core import (
    avoided_nodes,
    context,
    ending,
    escalation,
    faults,
    growth,
    health,
    initial_record,
    partial_gangs,
    phase_accounting,
    plan,
    planned_change,
    ranks,
    recovery,
    replica,
    root_cause,
    running,
    silence,
    stopping,
    transition,
)
from elastipod_operator.core.actions import Plan, StartWorkers
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, RestartMode
from elastipod_operator.core.replica import Replica, Replicas
from elastipod_operator.core.snapshot import AgentState

Mutant = Callable[[pytest.MonkeyPatch], None]


def accept_a_stale_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "runs", lambda self, generation: True)


def choose_the_depth_before_agents_have_answered(patch: pytest.MonkeyPatch) -> None:
    for module in (running, transition):
        patch.setattr(module, "first_answers_due", lambda record, replicas, fault=None: None)


def forget_steps_before_a_change(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planned_change, "count_progress", lambda record, replicas, now: record)


def wait_for_a_start_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(faults, "_start_not_taken", lambda members, record, now: None)


def reuse_the_generation(patch: pytest.MonkeyPatch) -> None:
    real = transition._start

    def start(record: Record, *rest: Any) -> context.PlanDraft:
        step = real(record, *rest)
        return replace(step, record=replace(step.record, generation=max(1, record.generation)))

    patch.setattr(transition, "_start", start)


def count_a_restart_twice(patch: pytest.MonkeyPatch) -> None:
    real = recovery.begin_recovery

    def begin(*arguments: Any) -> Record:
        record = real(*arguments)
        return replace(record, restarts=record.restarts + 1)

    patch.setattr(transition, "begin_recovery", begin)


def take_drained_for_completed(patch: pytest.MonkeyPatch) -> None:
    def completed(members: list[Replica], record: Record) -> bool:
        ended = (AgentState.COMPLETED, AgentState.READY)
        return len(members) == len(record.members) > 0 and all(
            r.agent.state in ended and r.agent.generation == record.generation for r in members
        )

    real = transition._gather

    def gather(record: Record, seen: context.Context) -> context.PlanDraft:
        members = [r for m in record.members if (r := seen.replicas.get(m)) is not None]
        if completed(members, record):
            return ending.finish(record, seen, "Completed", Reason.COMPLETED, "all replicas finished")
        return real(record, seen)

    patch.setattr(transition, "_gather", gather)


def start_below_the_minimum(patch: pytest.MonkeyPatch) -> None:
    from elastipod_operator.core.sizes import Sizes

    patch.setattr(Sizes, "fit", lambda self, available: min(available, self.maximum))


def take_a_lost_pod_back(patch: pytest.MonkeyPatch) -> None:
    real = health.assess

    def assess(seen: Any) -> Replicas:
        record = seen.job.record
        forgetful = replace(seen, job=replace(seen.job, record=replace(record, lost=()))) if record else seen
        return real(forgetful)

    patch.setattr(plan, "assess", assess)


def stop_without_a_record(patch: pytest.MonkeyPatch) -> None:
    real = plan.plan

    def forgetful(seen: Any) -> Plan:
        todo = real(seen)
        before = seen.job.record
        began = before is not None and before.transition is None and todo.record.transition is not None
        return replace(todo, record=before) if began and before is not None else todo

    patch.setattr(reconcile_pass, "plan", forgetful)


def take_silence_for_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "diagnose", lambda *_, **__: silence.Diagnosis(Reason.NODE_LOST, "silent"))


def forget_who_drains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planned_change, "_has_work_to_save", lambda *_: False)


def give_up_who_was_never_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "_due", lambda replica, record, policy: record.transition.deadline)


def charge_the_workers_for_lost_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "attribute_to_outside", lambda record, *_: record)


def trust_a_cut_off_operator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(silence, "CUT_OFF_SPREAD", timedelta(0))
    patch.setattr(silence, "_steps_go_on", lambda *_: False)
    patch.setattr(silence, "_reached_by_peers", lambda *_: False)


def ignore_doomed_pods(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "_disruption", lambda *_: None)


def never_stop_strangers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "is_busy", property(lambda self: False))


def never_force_the_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "_cannot_run_again", lambda *_: False)


def forget_the_growth_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running, "growth_window", lambda record, *_: (record, None))


def start_everybody_as_rank_zero(patch: pytest.MonkeyPatch) -> None:
    for module in (transition, running):
        patch.setattr(module, "StartWorkers", lambda pod, rank: StartWorkers(pod, 0))


def count_a_restart_twice_in_its_window(patch: pytest.MonkeyPatch) -> None:
    real = recovery._counted
    patch.setattr(recovery, "_counted", lambda window, now: real(real(window, now), now))


def never_close_a_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running, "close_window", lambda record, *_: record)


def weigh_a_recovery_again_and_again(patch: pytest.MonkeyPatch) -> None:
    real = escalation.check_budgets

    def check_budgets(record: Record, *rest: Any) -> escalation.BudgetCheck:
        weighed = real(record, *rest)
        forgotten = replace(weighed.record, transition=replace(weighed.record.transition, is_budget_checked=False))  # type: ignore[type-var]
        return replace(weighed, record=forgotten)

    patch.setattr(transition, "check_budgets", check_budgets)


def keep_the_old_pods_in_a_full_restart(patch: pytest.MonkeyPatch) -> None:
    real = escalation._restart_everything

    def restart(record: Record, *rest: Any) -> escalation.BudgetCheck:
        weighed = real(record, *rest)
        return replace(weighed, record=replace(weighed.record, lost=record.lost), actions=())

    patch.setattr(escalation, "_restart_everything", restart)


def never_restart_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(escalation, "_is_full_restart_due", lambda *_: False)


def fail_at_the_first_full_restart(patch: pytest.MonkeyPatch) -> None:
    real = escalation._why_it_ends
    patch.setattr(escalation, "_why_it_ends", lambda r, p: real(r, replace(p, max_full_restarts=0)))


def avoid_more_nodes_than_allowed(patch: pytest.MonkeyPatch) -> None:
    real = avoided_nodes.avoided
    wide = lambda record, policy, now: real(record, replace(policy, max_offenders=9 * policy.max_offenders), now)  # noqa: E731
    patch.setattr(avoided_nodes, "avoided", wide)


def stay_on_a_node_that_fails_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(escalation, "avoided", lambda *_: ())


def place_pods_where_trouble_is_announced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(avoided_nodes, "MAX_CLOSED", 0)


def count_a_spare_as_a_member(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transition, "usable", ranks.rank_order)


def train_without_the_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ranks, "lacks_base", lambda *_: False)


def start_the_workers_of_spares(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running, "AssignSpare", StartWorkers)


def forget_the_labels_and_the_history(patch: pytest.MonkeyPatch) -> None:
    real = initial_record._first_record

    def first(seen: Any, view: Replicas) -> Record:
        return replace(
            real(seen, view), generation=max((r.agent.generation or 0 for r in view.by_id.values()), default=0)
        )

    patch.setattr(initial_record, "_first_record", first)


def start_before_everybody_has_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transition, "_may_report_generation", lambda *_: False)


def make_pods_from_an_edited_template(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pod_creation, "effective_spec", lambda body: body["spec"])


def let_pods_come_that_nobody_wants_any_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_flight.InFlight, "keep_only", lambda *_: True)


def forget_to_book_a_phase(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(phase_accounting, "_booked", lambda kept, until: kept)


def end_a_job_at_its_first_setback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(escalation, "does_not_progress", lambda record: record.stalled_recoveries >= 1)


def use_a_name_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "record_incarnations", lambda record, *_: record)


def charge_the_workers_for_a_port(patch: pytest.MonkeyPatch) -> None:
    for module in (faults, root_cause):
        patch.setattr(module, "is_port_taken", lambda *_: False)


def believe_every_number(patch: pytest.MonkeyPatch) -> None:
    for module in (replica, stopping):
        patch.setattr(module, "MAX_GENERATION", 2**60)


def keep_processes_whatever_workers_ask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "requested_restart", lambda *_: RestartMode.IN_PROCESS)


def tell_nobody_where_the_others_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CommandBuilder, "_rank_ips", lambda self: None)


def wait_for_a_clock_that_was_wrong(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(initial_record, "without_future_times", lambda record, *_: record)


def keep_processes_whatever_the_job_wishes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "MINIMUM_RESTART", dict.fromkeys((False, True), RestartMode.IN_PROCESS))


def _grow_without(patch: pytest.MonkeyPatch, **nothing: timedelta) -> None:
    real = growth.growth_due
    patch.setattr(growth, "growth_due", lambda record, policy, *rest: real(record, replace(policy, **nothing), *rest))


def grow_in_spite_of_the_snooze(patch: pytest.MonkeyPatch) -> None:
    _grow_without(patch, snooze=timedelta(0))


def grow_right_after_a_resize(patch: pytest.MonkeyPatch) -> None:
    _grow_without(patch, min_stable=timedelta(0))


def grow_again_right_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    _grow_without(patch, backoff_base=timedelta(0))


def grow_with_the_first_that_is_ready(patch: pytest.MonkeyPatch) -> None:
    _grow_without(patch, scaling_timeout=timedelta(0))


def ask_again_and_again_for_half_an_increment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partial_gangs, "LONGEST_REST", timedelta(0))
