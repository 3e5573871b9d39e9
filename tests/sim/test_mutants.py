"""Mistakes planted in the core, each of which the schedules must find: a simulator that finds nothing proves nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.sim.scripted import STORIES
from tests.sim.story import draw, failure_of

from elastipod_operator.core import health, incidents, plan, stopping
from elastipod_operator.core.facts import AgentState
from elastipod_operator.core.health import Replica
from elastipod_operator.core.record import Record

TRIES = 150

Mutant = Callable[[pytest.MonkeyPatch], None]


def accept_a_stale_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "runs", lambda self, generation: True)


def reuse_the_generation(patch: pytest.MonkeyPatch) -> None:
    real = plan._start

    def start(record: Record, *rest: Any) -> plan.Step:
        step = real(record, *rest)
        return replace(step, record=replace(step.record, generation=max(1, record.generation)))

    patch.setattr(plan, "_start", start)


def count_a_restart_twice(patch: pytest.MonkeyPatch) -> None:
    real = incidents.begin_recovery

    def begin(*arguments: Any) -> Record:
        record = real(*arguments)
        return replace(record, restarts=record.restarts + 1)

    patch.setattr(plan, "begin_recovery", begin)


def take_drained_for_completed(patch: pytest.MonkeyPatch) -> None:
    def completed(members: list[Replica], record: Record) -> bool:
        ended = (AgentState.COMPLETED, AgentState.READY)
        return len(members) == len(record.members) > 0 and all(
            r.agent.state in ended and r.agent.generation == record.generation for r in members
        )

    real = plan._gather

    def gather(record: Record, scene: plan.Scene) -> plan.Step:
        members = [r for m in record.members if (r := scene.view.get(m)) is not None]
        if completed(members, record):
            return plan._finish(record, scene, "Completed", "Completed", "all replicas finished")
        return real(record, scene)

    patch.setattr(plan, "_gather", gather)


def start_below_the_minimum(patch: pytest.MonkeyPatch) -> None:
    from elastipod_operator.core.sizes import Sizes

    patch.setattr(Sizes, "fit", lambda self, available: min(available, self.maximum))


def take_a_lost_pod_back(patch: pytest.MonkeyPatch) -> None:
    real = health.judge

    def judge(seen: Any) -> health.View:
        record = seen.job.record
        forgetful = replace(seen, job=replace(seen.job, record=replace(record, lost=()))) if record else seen
        return real(forgetful)

    patch.setattr(plan, "judge", judge)


def stop_without_a_record(patch: pytest.MonkeyPatch) -> None:
    real = plan.plan

    def forgetful(seen: Any) -> plan.Plan:
        todo = real(seen)
        before = seen.job.record
        began = before is not None and before.transition is None and todo.record.transition is not None
        return replace(todo, record=before) if began and before is not None else todo

    patch.setattr(plan, "plan", forgetful)


def take_silence_for_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "_evidence", lambda *_, **__: "silent")


def forget_who_drains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "_has_work_to_save", lambda *_: False)


def give_up_who_was_never_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "_due", lambda replica, record, policy: record.transition.deadline)


def charge_the_workers_for_lost_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stopping, "blame_outside", lambda record, *_: record)


def trust_a_cut_off_operator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "CUT_OFF_SPREAD", timedelta(0))
    patch.setattr(health, "_stalled", lambda *_: True)


def ignore_doomed_pods(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "_doom", lambda *_: None)


def never_stop_strangers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "busy", property(lambda self: False))


def never_force_the_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(health, "_gone", lambda *_: False)


def forget_the_growth_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "_growth_window", lambda record, *_: (record, None))


def start_everybody_as_rank_zero(patch: pytest.MonkeyPatch) -> None:
    real = plan.StartWorkers
    patch.setattr(plan, "StartWorkers", lambda pod, rank: real(pod, 0))


MUTANTS: tuple[Mutant, ...] = (
    accept_a_stale_generation,
    reuse_the_generation,
    count_a_restart_twice,
    take_drained_for_completed,
    start_below_the_minimum,
    take_a_lost_pod_back,
    stop_without_a_record,
    take_silence_for_death,
    forget_who_drains,
    give_up_who_was_never_asked,
    charge_the_workers_for_lost_nodes,
    trust_a_cut_off_operator,
    ignore_doomed_pods,
    never_stop_strangers,
    never_force_the_gone,
    forget_the_growth_window,
    start_everybody_as_rank_zero,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_mistake_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    stories = itertools.chain(STORIES.values(), map(draw, range(TRIES)))
    assert any(failure_of(story) is not None for story in stories), "no schedule found it"
