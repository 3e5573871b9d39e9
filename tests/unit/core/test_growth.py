"""Growth that fails is put off, growth that does not pay is not asked for, spares stand by."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    acts,
    agent,
    faulted,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    silent,
    trains,
    transition,
)

from elastipod_operator.core.actions import AssignSpare, CreatePod, DeletePod, StartWorkers
from elastipod_operator.core.names import PodId
from elastipod_operator.core.payback import LONGEST, growth_hold
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, ResizeStatistics, TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, ObservedNode, SpecLimits

MORE = [(pod(0), running()), (pod(1), running()), (pod(2), ready())]
GROWS = transition(cause="CapacityAvailable", target_size=3, from_size=2)
DRAINED = ready(1, drained=True)


# ---- back-off


def test_a_growth_that_a_fault_breaks_has_failed() -> None:
    todo = plan(observed(job(trains(transition=GROWS)), [(pod(0), faulted()), (pod(1), running()), (pod(2), ready())]))
    assert (todo.record.resize_failures, todo.record.resize_failed_at) == (1, NOW)


def test_a_growth_that_finds_nobody_left_has_failed() -> None:
    todo = plan(observed(job(trains(transition=GROWS)), [(pod(0), DRAINED), (pod(1), DRAINED)]))
    assert (todo.record.generation, len(todo.record.members)) == (2, 2)
    assert todo.record.resize_failures == 1


def test_a_larger_size_that_does_not_come_to_run_has_failed() -> None:
    grown = plan(observed(job(trains(transition=GROWS)), [(pod(0), DRAINED), (pod(1), DRAINED), (pod(2), ready())]))
    assert (len(grown.record.members), grown.record.size_before_growth, grown.record.resize_failures) == (3, 2, 0)
    broken = plan(observed(job(grown.record), [(pod(0), running(2)), (pod(1), running(2)), (pod(2), faulted(2))]))
    assert (broken.record.resize_failures, broken.record.size_before_growth) == (1, 0)


def test_a_larger_size_that_runs_ends_the_count() -> None:
    record = trains(
        3, generation=2, running_since=None, size_before_growth=2, resize_failures=4, resize_failed_at=LONG_AGO
    )
    todo = plan(observed(job(record), [(pod(n), running(2)) for n in range(3)]))
    assert (todo.record.resize_failures, todo.record.resize_failed_at, todo.record.size_before_growth) == (0, None, 0)


def test_other_resizes_are_no_failed_growth() -> None:
    drains = trains(3, transition=transition(cause="PodDisrupted", target_size=2))
    todo = plan(observed(job(drains, policy(1, 4)), [(pod(0), faulted()), (pod(1), running()), (pod(2), running())]))
    assert todo.record.resize_failures == 0


@pytest.mark.parametrize(
    ("failures", "ago_s", "grows"),
    [
        pytest.param(1, 9, False, id="the next growth waits"),
        pytest.param(1, 13, True, id="ten seconds and a quarter at most"),
        pytest.param(4, 79, False, id="each further one twice as long"),
        pytest.param(4, 101, True, id="and then is tried"),
        pytest.param(40, 376, True, id="never longer than the limit"),
    ],
)
def test_growth_after_failures(failures: int, ago_s: float, grows: bool) -> None:
    record = trains(window_since=LONG_AGO, resize_failures=failures, resize_failed_at=NOW - seconds(ago_s))
    todo = plan(observed(job(record), MORE))
    assert (todo.record.transition is not None) is grows
    status = todo.status["elasticScalingStatus"]
    assert status["consecutiveScalingFailures"] == failures
    if not grows:
        scaling = next(c for c in todo.conditions if c.type == "Scaling")
        assert f"growths that failed in a row: {failures}" in scaling.message


# ---- refusals


REFUSED: dict[str, Any] = {
    "pod_creation_error": "2 pods were refused: exceeded quota: team",
    "pod_creation_retry_at": NOW + seconds(30),
}


def test_a_refused_pod_is_not_asked_for_again_too_soon() -> None:
    todo = plan(observed(job(trains()), MORE[:2], **REFUSED))
    assert not acts(todo, CreatePod)
    assert not {pid(2).slot, pid(3).slot} & set(todo.record.incarnations), "nor is a name used up for it"
    assert todo.wake_at == NOW + seconds(30)
    later = plan(observed(job(trains()), MORE[:2], pod_creation_error="exceeded", pod_creation_retry_at=NOW))
    assert [a.pod for a in acts(later, CreatePod)] == [pid(2)]


def test_a_refusal_is_told_in_plain_words_and_fails_nothing() -> None:
    todo = plan(observed(job(trains()), MORE[:2], **REFUSED))
    told = {c.type: c for c in todo.conditions}
    assert (told["Scaling"].status, told["Scaling"].reason) == (False, "LimitReached")
    assert "exceeded quota: team" in told["Scaling"].message
    assert told["PodsReady"].reason == "PodsRefused"
    assert todo.conditions[-1].type == "Running"
    assert todo.record.outcome == ""


# ---- payback


def measured(pause_s: float | None = 10.0, **paces: float) -> ResizeStatistics:
    rows = tuple((int(size[1:]), seconds(pace)) for size, pace in paces.items())
    return ResizeStatistics(None if pause_s is None else seconds(pause_s), rows)


@pytest.mark.parametrize(
    ("resize_statistics", "hold_s"),
    [
        pytest.param(measured(None, s2=2.0, s4=1.0), None, id="no pause was measured yet"),
        pytest.param(measured(10, s2=2.0), None, id="no larger size was"),
        pytest.param(measured(10, s4=1.0), None, id="nor the present one"),
        pytest.param(measured(10, s2=2.0, s4=1.0), 10, id="twice as fast: the pause comes back in as long"),
        pytest.param(measured(10, s2=2.0, s4=1.5), 30, id="a third faster: in three times as long"),
        pytest.param(measured(10, s2=2.0, s4=1.99), 100, id="hardly faster: ten pauses at most"),
        pytest.param(measured(10, s2=2.0, s4=3.0), 100, id="slower: ten pauses"),
        pytest.param(measured(600, s2=2.0, s4=3.0), LONGEST.total_seconds(), id="and never more than a quarter of an hour"),
    ],
)  # fmt: skip
def test_how_long_growth_is_put_off(resize_statistics: ResizeStatistics, hold_s: float | None) -> None:
    record = trains(2, running_since=NOW, resize_statistics=resize_statistics)
    assert growth_hold(record, policy()) == (None if hold_s is None else NOW + seconds(hold_s))
    assert growth_hold(record, policy(payback=False)) is None


HELD = trains(running_since=NOW - seconds(20), resize_statistics=measured(10, s2=2.0, s4=1.99))


def test_growth_that_does_not_pay_is_not_asked_for() -> None:
    todo = plan(observed(job(HELD), MORE[:2]))
    assert not acts(todo, CreatePod)
    assert todo.wake_at == NOW + seconds(80)
    scaling = next(c for c in todo.conditions if c.type == "Scaling")
    assert scaling.reason == "NotWorthwhile"
    off = plan(observed(job(HELD, policy(payback=False)), MORE[:2]))
    assert [a.pod for a in acts(off, CreatePod)] == [pid(2)]


def test_pods_that_are_there_are_never_held_idle() -> None:
    todo = plan(observed(job(replace(HELD, window_since=LONG_AGO)), MORE))
    assert todo.record.transition is not None
    assert not acts(todo, DeletePod)


def test_members_that_are_lost_are_replaced_whatever_it_costs() -> None:
    todo = plan(observed(job(HELD, policy(2, 2)), MORE[:1]))
    assert [a.pod for a in acts(todo, CreatePod)] == [pid(1, 1)]


def test_pause_and_pace_are_measured() -> None:
    paced = [(pod(n), running(step=9, step_at=NOW, step_pace=seconds(2))) for n in range(3)]
    first = plan(observed(job(trains(3), policy(2, 2)), paced))
    assert first.record.resize_statistics.step_times == ((3, seconds(2)),)
    stopped = plan(
        observed(job(first.record, policy(2, 2)), [(pod(n), DRAINED) for n in range(3)], now=NOW + seconds(4))
    )
    assert stopped.record.resize_began_at == NOW
    then = NOW + seconds(9)
    runs = [(pod(n), agent(AgentState.RUNNING, 2, last_answer=then)) for n in range(2)]
    settled = plan(observed(job(stopped.record, policy(2, 2)), runs, now=then))
    assert settled.record.resize_statistics.pause == timedelta(seconds=9)
    assert settled.record.resize_began_at is None


def test_the_pause_of_a_recovery_is_none_of_a_resize() -> None:
    record = trains(generation=2, running_since=None, resize_began_at=NOW - seconds(50))
    todo = plan(observed(job(record), [(pod(0), faulted(2)), (pod(1), running(2))]))
    assert todo.record.resize_began_at is None


# ---- spares


SPARED = policy(2, 2, specs=(SpecLimits("workers", 2, spares=1),))
TWO = (SpecLimits("base", 2, spares=1), SpecLimits("extra", 2))


@pytest.mark.parametrize(
    ("present", "made"),
    [
        pytest.param([], [0, 1], id="first those who train"),
        pytest.param(
            [(pod(0), None), (pod(1, node="", started=False), None)],
            [],
            id="a spare must not take the place of one of them",
        ),
        pytest.param([(pod(0), None), (pod(1), None)], [2], id="when they have their places"),
    ],
)
def test_spares_are_made_beside_the_others(present: list[Any], made: list[int]) -> None:
    todo = plan(observed(job(Record(transition=transition(TransitionKind.START)), SPARED), present))
    assert [a.pod for a in acts(todo, CreatePod)] == [pid(n) for n in made]


def test_spares_do_not_train() -> None:
    starts = Record(transition=transition(TransitionKind.START, target_size=2))
    todo = plan(observed(job(starts, SPARED), [(pod(n), ready(0)) for n in range(3)]))
    assert todo.record.members == (pid(0), pid(1))
    assert len(acts(todo, StartWorkers)) == 2
    assert todo.size[1:] == (2, 2)


def test_spares_are_not_removed_nor_grown_into() -> None:
    todo = plan(observed(job(trains(window_since=LONG_AGO), SPARED), MORE))
    assert todo.record.transition is None
    assert not acts(todo, DeletePod)


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        pytest.param(ready(0), True, id="who does not know it yet"),
        pytest.param(ready(0, is_spare=True), True, id="who knows it of an older generation"),
        pytest.param(ready(1, is_spare=True), False, id="who knows it"),
        pytest.param(agent(AgentState.READY, None), False, id="an agent of another make would start its workers"),
        pytest.param(ready(0, terminating=True), False, id="one that goes"),
    ],
)
def test_a_spare_is_told_that_it_is_one(mine: Any, told: bool) -> None:
    todo = plan(observed(job(trains(), SPARED), [*MORE[:2], (pod(2), mine)]))
    assert acts(todo, AssignSpare) == ([AssignSpare(pod(2).name, 2)] if told else [])


def test_nobody_is_told_where_no_spares_are_wanted() -> None:
    assert not acts(plan(observed(job(trains(), policy(2, 3)), MORE)), AssignSpare)


def test_a_spare_takes_a_lost_rank_without_waiting() -> None:
    dead = ObservedNode(name="node-0", ready=False, not_ready_since=NOW)
    pods = [(pod(0), silent(20)), (pod(1), running()), (pod(2), ready(1, is_spare=True))]
    lost = plan(observed(job(trains(), SPARED), pods, [dead]))
    pods[1] = (pod(1), ready(1))
    then = plan(observed(job(lost.record, SPARED), pods, [dead]))
    assert then.record.members == (pid(1), pid(2))
    after = plan(observed(job(then.record, SPARED), [(pod(1), running(2)), (pod(2), running(2))]))
    assert [a.pod.ordinal for a in acts(after, CreatePod)] == [0], "and a new spare is made"


def test_the_spare_of_one_spec_takes_no_place_of_another() -> None:
    wishes = policy(sizes=Sizes((2, 4), 4), specs=TWO)
    present = [
        PodId("base", 0, 0),
        PodId("base", 1, 0),
        PodId("base", 2, 0),
        PodId("extra", 0, 0),
        PodId("extra", 1, 0),
    ]
    starts = Record(transition=transition(TransitionKind.START, target_size=4))
    todo = plan(observed(job(starts, wishes), [(pod(p, node=f"n-{p.name('')}"), ready(0)) for p in present]))
    assert [m for m in todo.record.members if m.spec == "extra"] == [PodId("extra", 0, 0), PodId("extra", 1, 0)]
    assert len(todo.record.members) == 4


def test_a_spare_makes_up_for_no_missing_pod_of_another_spec() -> None:
    wishes = policy(sizes=Sizes((4,), 4), specs=TWO)
    present = [PodId("base", 0, 0), PodId("base", 1, 0), PodId("base", 2, 0), PodId("extra", 0, 0)]
    starts = Record(transition=transition(TransitionKind.START, target_size=4))
    todo = plan(observed(job(starts, wishes), [(pod(p, node=f"n-{p.name('')}"), ready(0)) for p in present]))
    assert not todo.record.members


def test_a_doomed_member_hands_over_to_a_spare() -> None:
    pods = [(pod(0, disruption="Eviction"), running()), (pod(1), running()), (pod(2), ready(1))]
    todo = plan(observed(job(trains(), SPARED), pods))
    assert todo.record.transition is not None
    assert todo.record.transition.target_size == 2


# ---- newcomers that still load what their workers need

WARMING = ready(warming=True, answering_since=NOW - seconds(20))
DUE = trains(window_since=LONG_AGO)


def test_training_is_not_interrupted_for_a_newcomer_that_is_still_warming_up() -> None:
    todo = plan(observed(job(DUE), [*MORE[:2], (pod(2), WARMING)]))
    assert todo.record.transition is None
    assert todo.wake_at is not None
    assert todo.wake_at <= NOW + seconds(130), "150 s after its first answer it is taken all the same"
    assert [(c.reason, c.message) for c in todo.conditions if c.type == "Scaling"] == [
        ("WarmingUp", "1 more replica imports the modules that workers need; training continues")
    ]


def test_one_that_warms_up_for_too_long_is_taken_all_the_same() -> None:
    slow = replace(WARMING, answering_since=NOW - seconds(150))
    todo = plan(observed(job(DUE), [*MORE[:2], (pod(2), slow)]))
    assert todo.record.transition is not None


def test_who_is_warm_is_taken_and_who_is_not_follows_later() -> None:
    members = [(pod(0), DRAINED), (pod(1), DRAINED), (pod(2), ready()), (pod(3), WARMING)]
    todo = plan(observed(job(trains(transition=replace(GROWS, target_size=4))), members))
    assert [one.ordinal for one in todo.record.members] == [0, 1, 2]


def test_a_recovery_takes_whom_it_can_get() -> None:
    rescue = transition(TransitionKind.RECOVERY, cause="WorkerCrash", target_size=2, graceful=False)
    todo = plan(observed(job(trains(transition=rescue)), [(pod(0), ready(1)), (pod(2), WARMING)]))
    assert [one.ordinal for one in todo.record.members] == [0, 2]
