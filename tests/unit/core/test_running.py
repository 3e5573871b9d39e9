"""While a generation runs: how each change begins, when all run, and what is looked at again."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    acts,
    agent,
    context,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
)

from elastipod_operator.core.actions import AssignSpare, DeletePod, JobEvent, StopWorkers
from elastipod_operator.core.backoff import jitter
from elastipod_operator.core.context import PlanDraft
from elastipod_operator.core.faults import START_LIMIT
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import NodeFaults, PartialGang, Record, RestartWindow, TransitionKind
from elastipod_operator.core.running import running as decide
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import SHARDED, AgentState, ObservedAgent, Snapshot, SpecLimits

DRAINED = ready(1, drained=True)


def all_run(number: int, generation: int = 1) -> list[Seen]:
    return [(pod(n), running(generation)) for n in range(number)]


def step_of(snapshot: Snapshot) -> PlanDraft:
    """Give what `running` decides by itself, without what is told of it and when that changes."""
    assert snapshot.job.record is not None
    return decide(snapshot.job.record, context(snapshot))


def waits(ordinal: int) -> Seen:
    return pod(ordinal, phase="Pending", node="", ip="", started=False), None


# ---- what ends or changes a generation


def test_a_job_is_completed_when_every_replica_says_so() -> None:
    done = [(pod(n), agent(AgentState.COMPLETED)) for n in range(2)]
    todo = plan(observed(job(trains()), done))
    ended = todo.record
    assert (ended.outcome, ended.outcome_reason, ended.outcome_message) == (
        "Completed",
        "Completed",
        "2 replicas finished",
    )
    assert [n.reason for n in todo.events] == ["Completed"]


def test_a_suspension_asks_for_a_checkpoint_and_aims_at_nobody() -> None:
    began = plan(observed(job(trains(3), policy(suspend=True)), all_run(3))).record.transition
    assert began is not None
    assert (began.kind, began.cause, began.from_size, began.target_size) == (TransitionKind.SUSPEND, "Suspended", 3, 0)


@pytest.mark.parametrize(
    ("size", "disrupted", "idle", "target_size"),
    [
        pytest.param(4, [3], [], 3, id="those who stay"),
        pytest.param(3, [2], [3], 3, id="and those who wait to join them"),
        pytest.param(4, [0, 1, 2], [], 2, id="but never less than the minimum, which is waited for"),
        pytest.param(2, [0], [], 2, id="also when one alone is left"),
    ],
)
def test_the_size_that_a_drain_of_doomed_members_is_for(
    size: int, disrupted: list[int], idle: list[int], target_size: int
) -> None:
    members = [(pod(n, disruption="Eviction" if n in disrupted else ""), running()) for n in range(size)]
    began = plan(observed(job(trains(size)), [*members, *((pod(n), ready()) for n in idle)])).record.transition
    assert began is not None
    assert (began.kind, began.cause, began.target_size) == (TransitionKind.RESIZE, "PodDisrupted", target_size)


@pytest.mark.parametrize(
    ("number", "more"),
    [
        pytest.param(1, "", id="one"),
        pytest.param(2, " (and 1 more)", id="two"),
        pytest.param(3, " (and 2 more)", id="three"),
    ],
)
def test_a_drain_names_the_first_doomed_pod_and_counts_the_others(number: int, more: str) -> None:
    members = [(pod(n, disruption="Eviction" if n < number else ""), running()) for n in range(4)]
    began = plan(observed(job(trains(4)), members)).record.transition
    assert began is not None
    assert began.message == f"pod {pod(0).name} is being disrupted (Eviction){more}"


def test_the_drain_ends_before_the_first_of_several_doomed_pods_is_killed() -> None:
    members = [(pod(0, kill_at=NOW + seconds(90)), running()), (pod(1, kill_at=NOW + seconds(60)), running())]
    began = plan(observed(job(trains(3)), [*members, (pod(2), running())])).record.transition
    assert began is not None
    assert began.deadline == NOW + seconds(55)


def test_a_lower_ceiling_says_which_size_comes() -> None:
    began = plan(observed(job(trains(3), policy(2, 2)), all_run(3))).record.transition
    assert began is not None
    assert began.message == "3 replicas: no longer an allowed size; the next smaller one is 2"


def test_a_drain_by_somebody_else_is_told_as_such_and_keeps_the_size() -> None:
    todo = plan(observed(job(trains(), policy(2, 2)), [(pod(0), DRAINED), (pod(1), DRAINED)]))
    assert [(e.cause, e.kind, e.from_size, e.to_size) for e in todo.history] == [
        ("DrainedFromOutside", TransitionKind.RESIZE, 2, 2)
    ]
    assert [n.message for n in todo.events if n.reason == "Resized"] == [
        f"2 -> 2 replicas, generation 2: the workers of pod {pod(0).name} were stopped by another client"
    ]


def test_a_drain_by_somebody_else_waits_for_the_same_size() -> None:
    todo = plan(observed(job(trains(3)), [(pod(0), DRAINED), (pod(1), running()), (pod(2), running())]))
    began = todo.record.transition
    assert began is not None
    assert (began.cause, began.target_size) == ("DrainedFromOutside", 3)


# ---- strangers


def test_a_stranger_that_does_not_say_its_generation_is_stopped_in_the_present_one() -> None:
    todo = plan(observed(job(trains(generation=4)), [*all_run(2, 4), (pod(2), running(None))]))  # type: ignore[arg-type]
    assert [(a.pod, a.generation, a.graceful) for a in acts(todo, StopWorkers)] == [(pod(2).name, 4, False)]


# ---- the moment at which all run


@pytest.mark.parametrize(
    ("generation", "changes", "expected"),
    [
        pytest.param(1, {}, (None, None), id="the first start is neither"),
        pytest.param(2, {}, (NOW, None), id="a later generation was a resize"),
        pytest.param(2, {"recovered_at": LONG_AGO}, (NOW, LONG_AGO), id="which leaves the last recovery alone"),
        pytest.param(2, {"fault_at": LONG_AGO, "resized_at": LONG_AGO}, (LONG_AGO, NOW),
                     id="or a recovery, which leaves the last resize alone"),
    ],
)  # fmt: skip
def test_what_is_noted_when_all_run(
    generation: int, changes: dict[str, Any], expected: tuple[datetime | None, datetime | None]
) -> None:
    record = trains(generation=generation, running_since=None, **changes)
    todo = plan(observed(job(record), all_run(2, generation)))
    after = todo.record
    assert (after.resized_at, after.recovered_at) == expected
    assert (after.running_since, after.started_at, after.fault_at, todo.running_since) == (NOW, LONG_AGO, None, NOW)
    assert JobEvent(Reason.RUNNING, f"2 replicas train in generation {generation}") in todo.events


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(running(1), id="one still runs the generation before"),
        pytest.param(agent(AgentState.STOPPING, 2), id="one is just ending"),
        pytest.param(agent(AgentState.INIT, 2), id="one is coming up"),
    ],
)
def test_not_all_run_while(other: ObservedAgent) -> None:
    todo = plan(observed(job(trains(generation=2, running_since=None)), [(pod(0), running(2)), (pod(1), other)]))
    assert (todo.record.running_since, todo.running_since) == (None, None)
    assert not [n for n in todo.events if n.reason == "Running"]


@pytest.mark.parametrize(
    ("generation", "began_s", "others", "is_marked"),
    [
        pytest.param(2, 0.5, running(2), False, id="the first step is awaited"),
        pytest.param(2, 0.5, running(2, step=7, step_at=NOW), True, id="it was made"),
        pytest.param(2, 0.5, agent(AgentState.COMPLETED, 2), True, id="somebody has finished"),
        pytest.param(2, 1.0, running(2), True, id="for a second: some scripts report no steps"),
        pytest.param(1, 0.5, running(1), True, id="a first start interrupts nobody"),
    ],
)
def test_a_generation_is_marked_as_running_after_its_pause(
    generation: int, began_s: float, others: ObservedAgent, is_marked: bool
) -> None:
    """The writes that go with it would take processors from the ranks that connect."""
    record = trains(generation=generation, running_since=None, generation_began_at=NOW - seconds(began_s))
    draft = step_of(observed(job(record), [(pod(0), running(generation)), (pod(1), others)]))
    assert (draft.record.running_since is not None) is is_marked
    if not is_marked:
        assert draft.wake_at == NOW + seconds(0.5)


def test_who_has_finished_already_has_run() -> None:
    members = [(pod(0), running()), (pod(1), agent(AgentState.COMPLETED))]
    assert plan(observed(job(trains(running_since=None)), members)).record.running_since == NOW


# ---- spares

SPARED = policy(sizes=Sizes((4,), 4), specs=(SpecLimits("base", 2, spares=2), SpecLimits("extra", 2, spares=1)))


def of(spec: str, ordinal: int) -> PodId:
    return PodId(spec, ordinal, 0)


def test_spares_are_told_spec_by_spec_in_the_order_of_their_ordinals() -> None:
    members = (of("base", 0), of("base", 1), of("extra", 0), of("extra", 1))
    idle = (of("extra", 3), of("extra", 2), of("base", 4), of("base", 3), of("base", 2))
    pods = [*((pod(p), running()) for p in members), *((pod(p), ready()) for p in idle)]
    told = step_of(observed(job(trains(members=members), SPARED), pods)).actions
    assert [a for a in told if isinstance(a, AssignSpare)] == [
        AssignSpare("job-base-2", 4),
        AssignSpare("job-base-3", 5),
        AssignSpare("job-extra-2", 4),
    ]


def test_spares_are_not_told_before_all_run() -> None:
    wishes = policy(2, 2, specs=(SpecLimits("workers", 2, spares=1),))
    pods = [(pod(0), running()), (pod(1), agent(AgentState.INIT, 1)), (pod(2), ready())]
    assert not acts(plan(observed(job(trains(running_since=None), wishes), pods)), AssignSpare)


# ---- looking again

PAIRS = policy(sizes=Sizes((2, 4), 2))


@pytest.mark.parametrize(
    ("changes", "wishes", "pods", "wait_s"),
    [
        pytest.param({"window_since": NOW - seconds(20)}, policy(), [(pod(2), ready())], 40, id="when the growth window closes"),
        pytest.param({"window": RestartWindow(0, NOW - seconds(90), 1)}, policy(eval_period=seconds(100)), [], 10,
                     id="when the evaluation window closes"),
        pytest.param({"node_faults": (NodeFaults("bad", 1, NOW - seconds(70)),)}, policy(max_offenders=1, eval_period=seconds(100)), [], 30,
                     id="when an offence is forgotten"),
        pytest.param({}, policy(2, 2), [], None, id="else not at all"),
    ],
)  # fmt: skip
def test_a_running_job_is_looked_at_again(
    changes: dict[str, Any], wishes: Any, pods: list[Seen], wait_s: float | None
) -> None:
    step = step_of(observed(job(trains(**changes), wishes), [*all_run(2), *pods]))
    assert step.wake_at == (None if wait_s is None else NOW + seconds(wait_s))


def test_a_start_of_a_doomed_member_is_looked_at_again_when_it_is_waited_for_no_longer() -> None:
    """The workers that are being started hold the only copy of the state, so their drain begins once all of them run."""
    record = trains(running_since=None, generation_began_at=NOW - seconds(30))
    members = [
        (pod(0, disruption="Eviction"), ready(0, memory_state=SHARDED)),
        (pod(1), running(memory_state=SHARDED)),
    ]
    assert step_of(observed(job(record), members)).wake_at == NOW - seconds(30) + START_LIMIT


@pytest.mark.parametrize("uid", ["job-uid", "another"])
def test_half_an_increment_is_given_back_when_the_patience_of_this_job_is_over(uid: str) -> None:
    patience = seconds(120) * (1 + 0.5 * jitter(uid, 0))
    pods = [*all_run(2), (pod(2), ready()), waits(3)]

    def after(waited: Any) -> PlanDraft:
        record = trains(gang=PartialGang(NOW - waited, 1))
        return step_of(observed(replace(job(record, PAIRS), uid=uid), pods))

    early, due = after(patience - seconds(1)), after(patience)
    assert (early.record.gang, early.events) == (PartialGang(NOW - patience + seconds(1), 1), ())
    assert early.wake_at == NOW + seconds(1)
    assert [n.reason for n in due.events] == ["PlacesGivenBack"]
    assert due.record.gang is not None
    assert due.record.gang.tries == 1


def test_that_places_are_given_back_is_told() -> None:
    record = trains(gang=PartialGang(NOW - seconds(181), 1))
    todo = plan(observed(job(record, PAIRS), [*all_run(2), (pod(2), ready()), waits(3)]))
    assert [n.reason for n in todo.events if not n.is_warning] == ["PlacesGivenBack"]
    assert len(acts(todo, DeletePod)) == 2


def test_a_refused_pod_makes_half_an_increment_too() -> None:
    pods = [*all_run(2), (pod(2), ready())]
    alone = step_of(observed(job(trains(), PAIRS), pods))
    refused = step_of(observed(job(trains(), PAIRS), pods, pod_creation_error="exceeded quota"))
    assert (alone.record.gang, refused.record.gang) == (None, PartialGang(NOW, 1))


def test_ranks_of_starts_that_did_not_arrive_are_those_of_the_record() -> None:
    record: Record = trains(3, running_since=None)
    step = step_of(observed(job(record), [(pod(2), ready(0)), (pod(1), running()), (pod(0), ready(0))]))
    assert [(a.pod, a.group_rank) for a in step.actions] == [(pod(0).name, 0), (pod(2).name, 2)]  # type: ignore[union-attr]
    assert [pid(n) for n in range(3)] == list(step.record.members)


@pytest.mark.parametrize(("depth", "keeps"), [("memory", True), ("process", False), ("", False)])
def test_a_member_that_took_an_older_start_late_keeps_what_the_generation_is_to_begin_with(
    depth: str, keeps: bool
) -> None:
    """It may be the only one that holds the state."""
    record = trains(2, generation=3, running_since=None, generation_began_at=NOW - seconds(1))
    record = replace(record, phase_times=replace(record.phase_times, depth=depth))
    whole = {"memory_state": "replicated"}
    seen = [(pod(0), running(3, **whole)), (pod(1), running(2, **whole)), (pod(2), running(2, **whole))]
    told = {one.pod: one.keeps for one in acts(plan(observed(job(record), seen)), StopWorkers)}
    assert told == {pod(1).name: keeps, pod(2).name: False}
