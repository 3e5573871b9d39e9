"""Mistakes to plant in what is concluded of pods, agents, nodes, clocks and specs, and in who leaves."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from elastipod_operator.core import (
    context,
    ending,
    faults,
    health,
    leavers,
    planned_change,
    pod_removal,
    preparation,
    silence,
    stopping,
    transition,
)
from elastipod_operator.core.actions import DeletePod
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.replica import Replica, Replicas
from elastipod_operator.kube import first_seen, job_annotations, observed_job, store


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


def leave_out_after_a_fault_who_was_to_leave(patch: pytest.MonkeyPatch) -> None:
    real = leavers.members_with_shards

    def members_with_shards(record: Record, replicas: Replicas) -> list[Replica]:
        is_recovery = record.transition is not None and record.transition.kind is TransitionKind.RECOVERY
        return [] if is_recovery else real(record, replicas)

    for module in (leavers, transition):
        patch.setattr(module, "members_with_shards", members_with_shards)


def stop_workers_that_begin_with_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planned_change, "_starts_from_memory", lambda *_: False)


def keep_the_shards_of_those_who_leave(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "told_to_leave", lambda *_: False)


def forget_when_nodes_leave(patch: pytest.MonkeyPatch) -> None:
    for module in (planned_change, transition):
        patch.setattr(module, "drain_limit", lambda *_: None)


def wait_for_prepared_workers_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preparation, "PREPARATION_LIMIT", timedelta(days=999))
