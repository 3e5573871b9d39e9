"""Mistakes planted in the core, each of which the schedules must find: a simulator that finds nothing proves nothing."""

from __future__ import annotations

import pytest
from tests.sim import mutants
from tests.sim import mutants_of_endings as endings
from tests.sim import mutants_of_evidence as evidence
from tests.sim import mutants_of_keys as keys
from tests.sim import mutants_of_neighbours as neighbours
from tests.sim import mutants_of_next_generation as following
from tests.sim import mutants_of_workers as workers
from tests.sim.failures import failure_of
from tests.sim.mutants import Mutant
from tests.sim.random_schedules import draw
from tests.sim.scripted_schedules import SCHEDULES

TRIES = 150


MUTANTS: dict[Mutant, str | None] = {
    mutants.accept_a_stale_generation: "workers keep their state in memory: the user wants new processes",
    mutants.reuse_the_generation: "nothing happens",
    mutants.count_a_restart_twice: "a node loses power",
    mutants.take_drained_for_completed: "nothing happens",
    mutants.start_below_the_minimum: "a node of the base is lost for good: another pod makes room",
    mutants.take_a_lost_pod_back: "nothing happens",
    mutants.stop_without_a_record: "nothing happens",
    mutants.take_silence_for_death: "no agent can be reached for minutes",
    mutants.forget_who_drains: "nothing happens",
    mutants.give_up_who_was_never_asked: "the user scales down while no agent can be reached",
    mutants.charge_the_workers_for_lost_nodes: "workers fail over a dead node before it is known, and no retry is left",
    mutants.trust_a_cut_off_operator: "an evaluation while one agent cannot be reached: the others reach it",
    mutants.ignore_doomed_pods: "a second node is drained during the first drain",
    mutants.never_stop_strangers: "nothing happens",
    mutants.never_force_the_gone: "a node loses power",
    mutants.forget_the_growth_window: "nothing happens",
    mutants.start_everybody_as_rank_zero: "nothing happens",
    mutants.count_a_restart_twice_in_its_window: "a worker crashes in a drain",
    mutants.never_close_a_window: "restarts of one window do not count in the next",
    mutants.weigh_a_recovery_again_and_again: "a node that faults again and again is avoided",
    mutants.keep_the_old_pods_in_a_full_restart: "crashes in a row bring a full job restart",
    mutants.never_restart_everything: "crashes in a row bring a full job restart",
    mutants.fail_at_the_first_full_restart: "crashes in a row bring a full job restart",
    mutants.avoid_more_nodes_than_allowed: "two nodes fault again and again and one may be avoided",
    mutants.stay_on_a_node_that_fails_again: "a node fails now and then, and the job makes progress between",
    mutants.place_pods_where_trouble_is_announced: (
        "a node says by a label alone that its machine is to be replaced, and later that it is well"
    ),
    mutants.count_a_spare_as_a_member: "a spare beside two groups of pods",
    mutants.train_without_the_base: "a spare beside two groups of pods",
    mutants.start_the_workers_of_spares: "a spare takes the place of a lost one",
    mutants.forget_the_labels_and_the_history: "only the state is lost, and no agent lives",
    mutants.start_before_everybody_has_told: "the record is lost while the operator is away, and one of many trains: 1",
    mutants.make_pods_from_an_edited_template: "the template is edited while the job runs",
    mutants.let_pods_come_that_nobody_wants_any_more: "a job is deleted while its pods wait for admission: 1",
    mutants.forget_to_book_a_phase: "nothing happens",
    mutants.end_a_job_at_its_first_setback: "crashes in a row bring a full job restart",
    mutants.use_a_name_again: "two operators act at once all the time",
    mutants.charge_the_workers_for_a_port: "somebody else has the master port, and no retry is left",
    mutants.believe_every_number: "an agent claims an enormous generation",
    mutants.keep_processes_whatever_workers_ask: "a worker asks for new processes of all",
    mutants.tell_nobody_where_the_others_are: "a tenant lets an agent tell data without end: ours, with workers that outlive faults",
    mutants.wait_for_a_clock_that_was_wrong: "the clock is set back and the operator begins anew",
    mutants.keep_processes_whatever_the_job_wishes: "workers that could outlive a fault are to be new ones",
    mutants.grow_in_spite_of_the_snooze: "growth after a recovery waits",
    mutants.grow_right_after_a_resize: "growth after a resize waits",
    mutants.grow_again_right_after_a_failure: "growth after one that failed at 9.5 waits",
    mutants.grow_with_the_first_that_is_ready: "a growth that does not pay is put off",
    mutants.ask_again_and_again_for_half_an_increment: "room for a part of an increment",
    evidence.take_an_ended_container_for_one_that_never_ran: None,
    evidence.overlook_an_agent_that_ended: "the agent's container ends beside a sidecar: 1 replicas",
    evidence.doubt_itself_over_a_lost_rack: "all members are lost with their rack",
    evidence.take_a_pause_for_a_loss: "an evaluation while one agent cannot be reached: the others reach it",
    evidence.leave_the_place_to_a_sidecar: "the agent's container ends beside a sidecar: 1 replicas",
    evidence.charge_nobody_for_an_agent_that_ended: "the agent's container ends beside a sidecar: 3 replicas",
    evidence.overlook_an_agent_that_began_anew: "the agent's container is started again and no watch tells of it",
    evidence.remove_what_is_alive_by_force: "an agent stands still while its job is deleted, the API server's clock +0 s",
    evidence.grow_on_cordoned_nodes: "a node is cordoned before its pod joins the training",
    evidence.end_every_drain_at_once: "a node is drained, the API server's clock +240 s",
    evidence.date_jobs_by_the_clock_of_the_api_server: "a deadline of a job, the API server's clock -3600 s",
    evidence.date_pods_by_the_clock_of_the_api_server: "a deadline of a job, the API server's clock -3600 s",
    evidence.forget_the_last_good_spec: "a tenant edits a template and log rules without end, and a node goes meanwhile",
    evidence.take_the_record_of_another_job: "a manifest brings the annotations of a job that was training",
    evidence.choose_who_leaves_when_all_have_stopped: "workers keep shards of the state in memory: the user scales down and up",
    evidence.forget_when_nodes_leave: "Spot: a notice of 30 s while two nodes do not reach each other",
    evidence.keep_the_shards_of_those_who_leave: "workers keep shards of the state in memory: a node is tainted",
    evidence.forget_who_was_told_to_stay: "workers keep shards of the state in memory: a worker crashes in a drain",
    evidence.leave_out_after_a_fault_who_was_to_leave: "workers keep shards of the state in memory: a worker crashes in a drain",
    evidence.stop_workers_that_begin_with_shards: "workers keep shards of the state in memory: a worker crashes in a drain",
    evidence.wait_for_prepared_workers_for_ever: "workers start ahead of a growth: they never come to it",
    mutants.wait_for_a_start_for_ever: "a member stops for a start that it never hears",
    mutants.forget_steps_before_a_change: "workers keep their state in memory: a worker crashes, and again ",
    mutants.choose_the_depth_before_agents_have_answered: "a worker that keeps its state crashes while the operator is away",
    endings.drain_workers_that_have_finished: "the training ends: a node is tainted, and the operator is away",
    endings.complete_with_the_first_member: "the training ends: nothing happens",
    endings.charge_nobody_for_a_save_that_failed: "the storage is full in a drain",
    endings.prune_the_newest: "the storage is away in a drain",
    neighbours.forget_all_jobs_with_one: "a worker crashes beside a job that is deleted",
    neighbours.tell_pods_by_the_name_of_their_job: "a worker crashes beside a job to which nothing happens",
    neighbours.stop_with_the_first_job_that_fails: "a worker crashes beside a job whose calls fail",
    keys.forget_the_install_key_before: "with keys: the install key is replaced, and a node is lost",
    keys.believe_answers_without_a_mac: "with keys: somebody answers in the place of an agent",
    keys.take_a_call_twice: "with keys: calls are replayed in a drain",
    keys.send_the_token_to_everybody: "with keys: nothing happens",
    keys.make_the_secret_for_new_pods_alone: "with keys: the Secret is deleted while pods begin",
    following.use_the_number_again_that_agents_were_told: "workers keep their state in memory: a decided growth, ",
    following.forget_the_newest_generation_that_was_told: "workers keep their state in memory: a decided growth, ",
    following.end_newcomers_that_train_already: "workers keep their state in memory: a decided growth, ",
    workers.tell_one_address_for_each_pod: "several workers in each pod: one of them crashes, and all outlive it",
    workers.make_pods_with_an_edited_worker_count: "several workers in each pod: their number is edited",
}
"""By mistake, how the name of the scripted schedule begins that finds it; None where a random one does."""

# The schedule that is about a mistake is played first; without an entry it is found all the same, after those before it.


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_mistake_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    name = MUTANTS[mutant]
    named = [schedule for each, schedule in SCHEDULES.items() if name is not None and each.startswith(name)]
    schedules = (draw(seed, queued=False) for seed in range(TRIES)) if name is None else named
    assert any(failure_of(schedule) is not None for schedule in schedules), f"not found by {name or 'random schedules'}"
