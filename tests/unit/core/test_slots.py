"""With two replica specs the base one holds the minimum: nobody trains without it, and the others make room for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    acts,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.actions import CreatePod, DeletePod, Plan, StartWorkers
from elastipod_operator.core.grant import grant_all
from elastipod_operator.core.growth_mode import GrowthMode
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.ranks import base_minimum
from elastipod_operator.core.record import PartialGang, Record, TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.slots import BASE_PATIENCE
from elastipod_operator.core.snapshot import Policy, SpecLimits

TWO = policy(2, 4, specs=(SpecLimits("base", 2), SpecLimits("extra", 2)))
ALL_AT_ONCE = replace(TWO, growth=GrowthMode.MAXIMUM)
STARTS = Record(transition=transition(TransitionKind.START, began_s=90, target_size=2))
FAULT = transition(TransitionKind.RECOVERY, began_s=90, target_size=3, is_budget_checked=True)


def base(ordinal: int, incarnation: int = 0) -> PodId:
    return pid(ordinal, incarnation, spec="base")


def extra(ordinal: int) -> PodId:
    return pid(ordinal, spec="extra")


def placed(identity: PodId, generation: int = 0) -> Seen:
    return pod(identity, node=f"node-{identity.spec}-{identity.ordinal}"), ready(generation)


def waits(identity: PodId, for_s: float = 60.0) -> Seen:
    made = NOW - seconds(for_s)
    return pod(identity, phase="Pending", node="", ip="", started=False, created_at=made), None


def look(record: Record, *pods: Seen, wishes: Policy = TWO) -> Plan:
    return plan(observed(job(record, wishes), pods))


def started(todo: Plan) -> tuple[PodId, ...]:
    return todo.record.members if acts(todo, StartWorkers) else ()


def leaving(todo: Plan) -> set[str]:
    return {a.name for a in acts(todo, DeletePod)}


@pytest.mark.parametrize(
    ("sizes", "limit", "least"),
    [
        pytest.param((2, 3, 4), 2, 2, id="the smallest size"),
        pytest.param((2, 3, 4), 3, 2, id="also where the spec holds more"),
        pytest.param((4, 6), 2, 2, id="as far as the spec may hold it: the others make it up"),
    ],
)
def test_how_many_pods_of_the_base_spec_nobody_trains_without(sizes: tuple[int, ...], limit: int, least: int) -> None:
    wishes = policy(sizes=Sizes(sizes, sizes[0]), specs=(SpecLimits("base", limit), SpecLimits("extra", 4)))
    assert base_minimum(grant_all(wishes)) == least


@pytest.mark.parametrize(
    ("there", "members"),
    [
        pytest.param([extra(0), extra(1)], (), id="not on elastic pods alone"),
        pytest.param([base(0), extra(0), extra(1)], (), id="nor with a part of the base"),
        pytest.param([base(0), base(1)], (base(0), base(1)), id="but with all of it"),
        pytest.param([base(0), base(1), extra(1)], (base(0), base(1)), id="at the size that was asked for first"),
    ],
)
def test_a_start(there: list[PodId], members: tuple[PodId, ...]) -> None:
    record = replace(STARTS, window_since=LONG_AGO)
    assert started(look(record, *(placed(p) for p in there))) == members


@pytest.mark.parametrize(
    ("left", "members"),
    [
        pytest.param([extra(0), extra(1)], (), id="elastic pods do not go on alone"),
        pytest.param([base(1), extra(0), extra(1)], (), id="nor with a part of the base"),
        pytest.param([base(0), base(1), extra(1)], (base(0), base(1), extra(1)), id="they go on with the base"),
        pytest.param([base(0), base(1)], (base(0), base(1)), id="which goes on without them"),
    ],
)
def test_who_goes_on_after_a_fault(left: list[PodId], members: tuple[PodId, ...]) -> None:
    all_four = (base(0), base(1), extra(0), extra(1))
    lost = tuple(p for p in all_four if p not in left)
    record = trains(members=all_four, transition=replace(FAULT, target_size=4), lost=lost)
    assert started(look(record, *(placed(p, 1) for p in left))) == members


def test_a_fault_that_leaves_no_base_waits_and_says_why() -> None:
    record = trains(members=(base(0), base(1), extra(0)), transition=FAULT, lost=(base(1),), fault_at=LONG_AGO)
    todo = look(record, placed(base(0), 1), placed(extra(0), 1), waits(base(1, 1), for_s=10))
    assert not started(todo)
    assert not leaving(todo)
    assert "of base, 1 of 2 replicas is ready, and training needs all of them" in todo.conditions[-1].message


def test_a_drain_that_takes_the_base_aims_at_the_smallest_size() -> None:
    """Survivors of the other spec are no size at which the job could go on."""
    wishes = policy(1, 3, specs=(SpecLimits("base", 1), SpecLimits("extra", 2)))
    going = (pod(base(0), disruption="Eviction"), running())
    record = trains(members=(base(0), extra(0), extra(1)))
    todo = look(record, going, *((pod(extra(n), node=f"node-e{n}"), running()) for n in range(2)), wishes=wishes)
    assert todo.record.transition is not None
    assert todo.record.transition.target_size == 1


@pytest.mark.parametrize(
    ("pods", "gone"),
    [
        pytest.param([placed(base(0)), waits(base(1)), placed(extra(0))], [extra(0)], id="its place makes the base whole"),
        pytest.param([placed(base(0)), waits(base(1), 59), placed(extra(0))], [], id="the scheduler may be slow"),
        pytest.param([placed(base(0)), waits(base(1)), placed(extra(0)), placed(extra(1))], [extra(1)],
                     id="no more of them than are needed"),
        pytest.param([waits(base(0)), waits(base(1)), placed(extra(0))], [extra(0)], id="as many as there are"),
        pytest.param([placed(base(0)), waits(base(1)), placed(extra(0)), waits(extra(1))], [extra(0), extra(1)],
                     id="who waits too, or it would be given the place"),
        pytest.param([placed(base(0)), placed(base(1)), placed(extra(0)), waits(extra(1))], [], id="the base has its places"),
    ],
)  # fmt: skip
def test_who_makes_room_for_the_base(pods: list[Seen], gone: list[PodId]) -> None:
    assert leaving(look(STARTS, *pods)) == {p.name("job") for p in gone}


@pytest.mark.parametrize(
    ("faulty_s", "waited_s", "full", "goes"),
    [
        pytest.param(30, 29, False, False, id="replacements get their time"),
        pytest.param(30, 30, False, True, id="and no more"),
        pytest.param(90, 89, False, False, id="also when that is long"),
        pytest.param(0, 4, False, False, id="a scheduler takes its seconds"),
        pytest.param(0, 5, False, True, id="and no more of them"),
        pytest.param(30, 59, True, False, id="a full restart waits as a start does"),
        pytest.param(30, 60, True, True, id="and as long"),
    ],
)
def test_after_a_fault_they_make_room_as_well(faulty_s: int, waited_s: int, full: bool, goes: bool) -> None:
    wishes = replace(TWO, faulty_timeout=seconds(faulty_s))
    record = trains(
        members=(base(0), base(1), extra(0)), transition=replace(FAULT, recreates_pods=full), lost=(base(1),)
    )
    pods = [placed(base(0), 1), waits(base(1, 1), waited_s), placed(extra(0), 1)]
    assert leaving(look(record, *pods, wishes=wishes)) == ({extra(0).name("job")} if goes else set())


def test_those_who_train_make_no_room() -> None:
    """Also when the user raised the minimum meanwhile: what trains is not stopped for it."""
    members = [(p, (pod(p, node=f"node-{p.spec}"), running())) for p in (base(0), extra(0))]
    record = trains(members=tuple(p for p, _ in members))
    assert not leaving(look(record, *(snapshot for _, snapshot in members), waits(base(1))))


def test_nobody_of_them_is_asked_for_until_the_base_has_its_places() -> None:
    todo = look(STARTS, placed(base(0)), waits(base(1)))
    assert not acts(todo, CreatePod)
    todo = look(STARTS, placed(base(0)), placed(base(1)), wishes=ALL_AT_ONCE)
    assert {a.pod for a in acts(todo, CreatePod)} == {extra(0), extra(1)}


def test_at_first_all_that_growth_may_request_are_requested_together() -> None:
    """What waits is what autoscalers see."""
    todo = look(STARTS, wishes=ALL_AT_ONCE)
    assert len(acts(todo, CreatePod)) == 4
    todo = look(STARTS, waits(base(0), 1), waits(base(1), 1), wishes=ALL_AT_ONCE)
    assert {a.pod for a in acts(todo, CreatePod)} == {extra(0), extra(1)}
    assert {a.pod for a in acts(look(STARTS), CreatePod)} == {base(0), base(1)}


def test_the_end_of_the_patience_is_waited_for() -> None:
    todo = look(STARTS, placed(base(0)), waits(base(1), for_s=20), placed(extra(0)))
    assert todo.wake_at is not None
    assert todo.wake_at <= NOW + BASE_PATIENCE - seconds(20)


def test_places_of_elastic_pods_alone_are_a_half_gang() -> None:
    """They are given back like those of any gang that cannot train, and the base is the demand then."""
    pods = [placed(extra(0)), placed(extra(1)), waits(base(0), 10), waits(base(1), 10)]
    assert look(STARTS, *pods).record.gang == PartialGang(NOW, 2)
    late = look(replace(STARTS, gang=PartialGang(NOW - seconds(181), 2)), *pods)
    assert leaving(late) == {snapshot.name for snapshot, _ in pods}
    rests = replace(STARTS, gang=PartialGang(NOW - seconds(20), 0, 1, NOW + seconds(60)))
    assert [a.pod for a in acts(look(rests), CreatePod)] == [base(0)]


def test_the_elastic_ones_are_shed_first() -> None:
    smaller = replace(TWO, sizes=Sizes((2,), 2))
    everybody = (base(0), base(1), extra(0), extra(1))
    stopped = trains(members=everybody, transition=transition(TransitionKind.RESIZE, target_size=2))
    assert started(look(stopped, *(placed(p, 1) for p in everybody), wishes=smaller)) == (base(0), base(1))
