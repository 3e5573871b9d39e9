"""Mistakes planted in the core, each of which the schedules must find: a simulator that finds nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.sim.random_schedules import draw
from tests.sim.scripted_schedules import SCHEDULES
from tests.sim.simulation import failure_of

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
    pod_removal,
    pod_supply,
    preparation,
    ranks,
    recovery,
    replica,
    root_cause,
    running,
    silence,
    stopping,
    transition,
)
from elastipod_operator.core.actions import DeletePod, Plan, StartWorkers
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, RestartMode
from elastipod_operator.core.replica import Replica, Replicas
from elastipod_operator.core.snapshot import AgentState
from elastipod_operator.kube import first_seen, job_annotations, observed_job, store

TRIES = 150

Mutant = Callable[[pytest.MonkeyPatch], None]


def accept_a_stale_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "runs", lambda self, generation: True)


def choose_the_depth_before_agents_have_answered(patch: pytest.MonkeyPatch) -> None:
    for module in (running, transition):
        patch.setattr(module, "first_answers_due", lambda record, replicas, fault=None: None)


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
    patch.setattr(pod_supply, "avoided", wide)


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
    patch.setattr(growth, "growth_due", lambda record, policy, key: real(record, replace(policy, **nothing), key))


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


def take_an_ended_container_for_one_that_never_ran(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ending, "_has_run", lambda replica: replica.pod.started or replica.pod.ended)


def overlook_an_agent_that_ended(patch: pytest.MonkeyPatch) -> None:
    real = silence.diagnose
    patch.setattr(health, "_container_ended", lambda _: False)
    patch.setattr(
        health,
        "diagnose",
        lambda pod, agent, *rest, **k: real(pod, replace(agent, connection_refused=False), *rest, **k),
    )


def doubt_itself_over_a_lost_rack(patch: pytest.MonkeyPatch) -> None:
    real = silence.diagnose

    def diagnose(pod: Any, agent: Any, node: Any, witnesses: Any, *rest: Any, **is_member: Any) -> silence.Diagnosis:
        is_alone = witnesses.heard_at is None or witnesses.heard_at == agent.last_answer
        return real(pod, agent, None if is_alone else node, witnesses, *rest, **is_member)

    patch.setattr(health, "diagnose", diagnose)


def take_a_pause_for_a_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(silence, "_reached_by_peers", lambda *_: False)


def leave_the_place_to_a_sidecar(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pod_removal, "holds_resources", lambda _: False)


def charge_nobody_for_an_agent_that_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "ended_by_itself", property(lambda self: False))


def overlook_an_agent_that_began_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(faults, "agent_restarted", lambda *_: False)


def remove_what_is_alive_by_force(patch: pytest.MonkeyPatch) -> None:
    def end(replica: Replica, now: datetime) -> list[DeletePod]:
        return [DeletePod(replica.pod.name, replica.pod.uid, "the job is deleted", force=True)]

    patch.setattr(ending, "_kill", end)


def end_every_drain_at_once(patch: pytest.MonkeyPatch) -> None:
    real = transition._without_drain_handler

    def unanswered(record: Record, seen: context.Context) -> Any:
        by_id = {i: replace(r, agent=replace(r.agent, no_drain_handler=True)) for i, r in seen.replicas.by_id.items()}
        return real(record, replace(seen, replicas=replace(seen.replicas, by_id=by_id)))

    patch.setattr(transition, "_without_drain_handler", unanswered)


def grow_on_cordoned_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "_would_grow", lambda *_: False)


def date_jobs_by_the_clock_of_the_api_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "job_as_seen", lambda fact, *_: fact)


def date_pods_by_the_clock_of_the_api_server(patch: pytest.MonkeyPatch) -> None:
    real = first_seen.pod_as_seen
    patch.setattr(store, "pod_as_seen", lambda fact, *rest: replace(real(fact, *rest), created_at=fact.created_at))


def forget_the_last_good_spec(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "effective_job", lambda body: (body, observed_job.observe_job(body)))


def take_the_record_of_another_job(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(job_annotations, "is_own", lambda *_: True)


def choose_who_leaves_when_all_have_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planned_change, "choose_leavers", lambda *_: None)


def forget_who_was_told_to_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transition, "next_members", lambda record, context, ready, size: ready[:size])


def stop_workers_that_begin_with_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planned_change, "_starts_from_memory", lambda *_: False)


def keep_the_shards_of_those_who_leave(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "told_to_leave", lambda *_: False)


def forget_when_nodes_leave(patch: pytest.MonkeyPatch) -> None:
    for module in (planned_change, transition):
        patch.setattr(module, "drain_limit", lambda *_: None)


def wait_for_prepared_workers_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preparation, "PREPARATION_LIMIT", timedelta(days=999))


MUTANTS: dict[Mutant, str | None] = {
    accept_a_stale_generation: "workers keep their state in memory: a growth and a shrink",
    reuse_the_generation: "nothing happens",
    count_a_restart_twice: "a node loses power",
    take_drained_for_completed: "nothing happens",
    start_below_the_minimum: "a node of the base is lost for good: another pod makes room",
    take_a_lost_pod_back: "nothing happens",
    stop_without_a_record: "nothing happens",
    take_silence_for_death: "no agent can be reached for minutes",
    forget_who_drains: "nothing happens",
    give_up_who_was_never_asked: "the user scales down while no agent can be reached",
    charge_the_workers_for_lost_nodes: "workers fail over a dead node before it is known, and no retry is left",
    trust_a_cut_off_operator: "an evaluation while one agent cannot be reached: the others reach it",
    ignore_doomed_pods: "a second node is drained during the first drain",
    never_stop_strangers: "nothing happens",
    never_force_the_gone: "a node loses power",
    forget_the_growth_window: "nothing happens",
    start_everybody_as_rank_zero: "nothing happens",
    count_a_restart_twice_in_its_window: "a worker crashes in a drain",
    never_close_a_window: "restarts of one window do not count in the next",
    weigh_a_recovery_again_and_again: "a node that faults again and again is avoided",
    keep_the_old_pods_in_a_full_restart: "crashes in a row bring a full job restart",
    never_restart_everything: "crashes in a row bring a full job restart",
    fail_at_the_first_full_restart: "crashes in a row bring a full job restart",
    avoid_more_nodes_than_allowed: "two nodes fault again and again and one may be avoided",
    count_a_spare_as_a_member: "a spare beside two groups of pods",
    train_without_the_base: "a spare beside two groups of pods",
    start_the_workers_of_spares: "a spare takes the place of a lost one",
    forget_the_labels_and_the_history: "only the state is lost, and no agent lives",
    start_before_everybody_has_told: "the record is lost while the operator is away, and one of many trains: 1",
    make_pods_from_an_edited_template: "the template is edited while the job runs",
    let_pods_come_that_nobody_wants_any_more: "a job is deleted while its pods wait for admission: 1",
    forget_to_book_a_phase: "nothing happens",
    end_a_job_at_its_first_setback: "crashes in a row bring a full job restart",
    use_a_name_again: "two operators act at once all the time",
    charge_the_workers_for_a_port: "somebody else has the master port, and no retry is left",
    believe_every_number: "an agent claims an enormous generation",
    keep_processes_whatever_workers_ask: "a worker asks for new processes of all",
    tell_nobody_where_the_others_are: "a tenant lets an agent tell data without end: ours, with workers that outlive faults",
    wait_for_a_clock_that_was_wrong: "the clock is set back and the operator begins anew",
    keep_processes_whatever_the_job_wishes: "workers that could outlive a fault are to be new ones",
    grow_in_spite_of_the_snooze: "growth after a recovery waits",
    grow_right_after_a_resize: "growth after a resize waits",
    grow_again_right_after_a_failure: "growth after one that failed at 9.5 waits",
    grow_with_the_first_that_is_ready: "a growth that does not pay is put off",
    ask_again_and_again_for_half_an_increment: "room for a part of an increment",
    take_an_ended_container_for_one_that_never_ran: None,
    overlook_an_agent_that_ended: "the agent's container ends beside a sidecar: 1 replicas",
    doubt_itself_over_a_lost_rack: "all members are lost with their rack",
    take_a_pause_for_a_loss: "an evaluation while one agent cannot be reached: the others reach it",
    leave_the_place_to_a_sidecar: "the agent's container ends beside a sidecar: 1 replicas",
    charge_nobody_for_an_agent_that_ended: "the agent's container ends beside a sidecar: 3 replicas",
    overlook_an_agent_that_began_anew: "the agent's container is started again and no watch tells of it",
    remove_what_is_alive_by_force: "an agent stands still while its job is deleted, the API server's clock +0 s",
    grow_on_cordoned_nodes: "a node is cordoned before its pod joins the training",
    end_every_drain_at_once: "a node is drained, the API server's clock +240 s",
    date_jobs_by_the_clock_of_the_api_server: "a deadline of a job, the API server's clock -3600 s",
    date_pods_by_the_clock_of_the_api_server: "a deadline of a job, the API server's clock -3600 s",
    forget_the_last_good_spec: "a tenant edits a template and log rules without end, and a node goes meanwhile",
    take_the_record_of_another_job: "a manifest brings the annotations of a job that was training",
    choose_who_leaves_when_all_have_stopped: "workers keep shards of the state in memory: the user scales down and up",
    forget_when_nodes_leave: "Spot: a notice of 30 s while two nodes do not reach each other",
    keep_the_shards_of_those_who_leave: "workers keep shards of the state in memory: a node is tainted",
    forget_who_was_told_to_stay: "workers keep shards of the state in memory: a node is tainted 2 s after a shrink began",
    stop_workers_that_begin_with_shards: "workers keep shards of the state in memory: a node is tainted 2 s after a shrink began",
    wait_for_prepared_workers_for_ever: "workers start ahead of a growth: they never come to it",
    wait_for_a_start_for_ever: "a member stops for a start that it never hears",
    choose_the_depth_before_agents_have_answered: "a worker that keeps its state crashes while the operator is away",
}
"""By mistake, the scripted schedule that finds it; None where a random one does."""

# The schedule that is about a mistake is played first; without an entry it is found all the same, after those before it.


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_mistake_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    name = MUTANTS[mutant]
    schedules = (draw(seed, queued=False) for seed in range(TRIES)) if name is None else [SCHEDULES[name]]
    assert any(failure_of(schedule) is not None for schedule in schedules), f"not found by {name or 'random schedules'}"
