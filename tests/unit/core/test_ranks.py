"""Who trains with which group rank, and which pods there should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
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
    transition,
)

from elastipod_operator.core.actions import Action, CreatePod, DeletePod, ShutDownAgent
from elastipod_operator.core.grant import grant_all
from elastipod_operator.core.health import assess
from elastipod_operator.core.incarnations import newest_incarnations
from elastipod_operator.core.names import PodId, Slot
from elastipod_operator.core.next_generation import new_generation
from elastipod_operator.core.pod_supply import CreationLimits, supply_pods
from elastipod_operator.core.ranks import in_vacated_ranks, rank_order
from elastipod_operator.core.record import Record, RestartMode
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.slots import wanted_slots
from elastipod_operator.core.snapshot import ObservedAgent, ObservedPod, Policy, Snapshot, SpecLimits

TWO_SPECS = policy(specs=(SpecLimits("base", 2), SpecLimits("extra", 2)))


def base(ordinal: int, incarnation: int = 0) -> PodId:
    return PodId("base", ordinal, incarnation)


def extra(ordinal: int, incarnation: int = 0) -> PodId:
    return PodId("extra", ordinal, incarnation)


@pytest.mark.parametrize(
    ("before", "present", "ranks"),
    [
        pytest.param((), [base(1), base(0)], [base(0), base(1)], id="at first by ordinal"),
        pytest.param((), [extra(0), base(1)], [base(1), extra(0)], id="the base spec comes before the elastic one"),
        pytest.param((base(1), base(0)), [base(0), base(1)], [base(1), base(0)], id="survivors keep their order"),
        pytest.param((base(0), base(1)), [base(0, 1), base(1)], [base(1), base(0, 1)], id="a replacement comes last"),
        pytest.param((base(0), extra(0)), [extra(0), base(0, 1), base(1)], [base(0, 1), base(1), extra(0)],
                     id="rank 0 stays in the base spec"),
    ],
)  # fmt: skip
def test_group_ranks(before: tuple[PodId, ...], present: list[PodId], ranks: list[PodId]) -> None:
    replicas = assess(observed(job(), [(pod(identity), ready()) for identity in present]))
    assert [r.id for r in rank_order(replicas.candidates(), Record(members=before), grant_all(TWO_SPECS))] == ranks


IN_PROCESS = {"restart_mode": RestartMode.IN_PROCESS}


@pytest.mark.parametrize(
    ("before", "chosen", "agent", "ranks"),
    [
        pytest.param((base(0), base(1), base(2)), [base(1), base(2), base(0, 1)], IN_PROCESS, [base(0, 1), base(1), base(2)],
                     id="a replacement takes the rank of the pod that it replaces"),
        pytest.param((base(0), base(1), base(2)), [base(2), base(0, 1), base(1, 1)], IN_PROCESS, [base(0, 1), base(1, 1), base(2)],
                     id="each its own"),
        pytest.param((base(0), base(1)), [base(1), base(3)], IN_PROCESS, [base(3), base(1)], id="a spare takes it too"),
        pytest.param((base(0), extra(0)), [base(1), extra(0)], IN_PROCESS, [base(1), extra(0)], id="within its spec"),
        pytest.param((extra(0), base(1)), [base(1), base(2)], IN_PROCESS, [base(1), base(2)], id="not that of another spec"),
        pytest.param((base(0), base(1), base(2)), [base(1), base(2)], IN_PROCESS, [base(1), base(2)], id="another size"),
        pytest.param((base(0), base(1)), [base(1), base(0, 1)], {}, [base(1), base(0, 1)], id="new processes"),
        pytest.param((base(0), base(1)), [base(1), base(0, 1)], {**IN_PROCESS, "memory_state": "sharded"}, [base(1), base(0, 1)],
                     id="State sends each rank what it needs"),
        pytest.param((base(0), base(1)), [base(0, 1), base(1, 1)], IN_PROCESS, [base(0, 1), base(1, 1)], id="nobody lives on"),
    ],
)  # fmt: skip
def test_group_ranks_of_processes_that_live_on(
    before: tuple[PodId, ...], chosen: list[PodId], agent: dict[str, Any], ranks: list[PodId]
) -> None:
    replicas = assess(observed(job(), [(pod(identity), replace(ready(), **agent)) for identity in chosen]))
    by_id = {one.id: one for one in replicas.candidates()}
    record = Record(members=before)
    assert [one.id for one in in_vacated_ranks([by_id[each] for each in chosen], record)] == ranks
    assert list(new_generation(record, replicas, [by_id[each] for each in chosen]).members) == ranks


@given(
    st.permutations([base(0), base(1), extra(0), extra(1)]),
    st.lists(st.sampled_from([base(0), base(1), extra(0)]), unique=True),
)
def test_group_ranks_do_not_depend_on_the_order_of_observation(present: list[PodId], before: list[PodId]) -> None:
    record = Record(members=tuple(before))
    replicas = assess(observed(job(), [(pod(identity), ready()) for identity in present]))
    ranks = [r.id for r in rank_order(replicas.candidates(), record, grant_all(TWO_SPECS))]
    assert sorted(ranks) == sorted(present)
    assert [spec for spec, *_ in ((r.spec,) for r in ranks)] == sorted(r.spec for r in ranks)
    kept = [m for m in before if m.spec == "base"]
    assert [r for r in ranks if r in kept] == kept


def wanted(snapshot: Snapshot, record: Record, wishes: object = None) -> list[Slot]:
    return wanted_slots(context(snapshot).grant if wishes is None else grant_all(wishes), record, assess(snapshot))  # type: ignore[arg-type]


def test_as_many_slots_are_wanted_as_the_largest_size() -> None:
    assert wanted(observed(job()), Record()) == [Slot("workers", n) for n in range(4)]


def test_the_base_spec_is_filled_first() -> None:
    three = replace(TWO_SPECS, sizes=Sizes((2, 3), 2))
    assert wanted(observed(job()), Record(), three) == [Slot("base", 0), Slot("base", 1), Slot("extra", 0)]


def test_members_and_living_pods_keep_their_slots() -> None:
    wishes = policy(2, 3)
    snapshot = observed(
        job(wishes=wishes), [(pod(5), running()), (pod(7), ready()), (pod(1, started=False, ip=""), None)]
    )
    record = trains(members=(pid(5),))
    assert wanted(snapshot, record) == [Slot("workers", 5), Slot("workers", 7), Slot("workers", 1)]


def test_an_operator_that_just_began_wants_the_pods_that_run() -> None:
    wishes = policy(1, 2)
    snapshot = observed(job(wishes=wishes), [(pod(0), None), (pod(3), None)])
    assert wanted(snapshot, trains(1)) == [Slot("workers", 0), Slot("workers", 3)]


@pytest.mark.parametrize(
    ("record", "present", "expected"),
    [
        pytest.param(Record(), [], 0, id="never had a pod"),
        pytest.param(Record(), [pid(0)], 1, id="after the one that is there"),
        pytest.param(trains(members=(pid(0, 4),)), [], 5, id="after the member"),
        pytest.param(Record(lost=(pid(0, 6),)), [], 7, id="after the lost one"),
        pytest.param(Record(incarnations={Slot("workers", 0): 8}), [pid(0, 2)], 9, id="after the newest on record"),
    ],
)
def test_an_incarnation_is_never_used_twice(record: Record, present: list[PodId], expected: int) -> None:
    replicas = assess(observed(job(), [(pod(identity), ready()) for identity in present]))
    assert newest_incarnations(record, replicas).get(Slot("workers", 0), -1) + 1 == expected


def supplied(
    record: Record, *pods: tuple[ObservedPod, ObservedAgent | None], wishes: Policy | None = None, **limits: object
) -> list[Action]:
    wishes = wishes or policy(2, 2)
    snapshot = observed(job(record, wishes), pods)
    replicas = assess(snapshot)
    given = context(snapshot, replicas)
    return supply_pods(record, given, wanted_slots(given.grant, record, replicas), CreationLimits(**limits))[0]  # type: ignore[arg-type]


def test_missing_pods_are_created_and_ask_for_the_size_of_the_job() -> None:
    assert supplied(Record()) == [CreatePod(pid(0), 2), CreatePod(pid(1), 2)]


def test_nothing_is_done_when_all_are_there() -> None:
    assert supplied(trains(), (pod(0), running()), (pod(1), running())) == []


@pytest.mark.parametrize(
    ("first", "mine"),
    [
        pytest.param(pod(0, phase="Failed"), None, id="ended"),
        pytest.param(pod(0, disruption="Eviction"), ready(), id="disrupted"),
    ],
)
def test_who_cannot_train_any_more_gets_a_replacement(first: ObservedPod, mine: ObservedAgent | None) -> None:
    assert CreatePod(pid(0, 1), 2, generation=1) in supplied(trains(), (first, mine), (pod(1), running()))


def test_a_doomed_member_is_kept_until_all_are_parked() -> None:
    disrupted = pod(0, disruption="Eviction")
    drains = trains(transition=transition())
    assert not [a for a in supplied(drains, (disrupted, running()), (pod(1), ready(1))) if isinstance(a, DeletePod)]
    removed = supplied(drains, (disrupted, ready(1)), (pod(1), ready(1)))
    assert ShutDownAgent(disrupted.name) in removed
    assert [a.name for a in removed if isinstance(a, DeletePod)] == [disrupted.name]


@pytest.mark.parametrize(
    ("incarnation", "age_s", "is_made"),
    [
        pytest.param(0, 1, True, id="the first replacement comes at once"),
        pytest.param(1, 9, False, id="the second one waits"),
        pytest.param(1, 11, True, id="ten seconds"),
        pytest.param(3, 39, False, id="the fourth one waits longer"),
        pytest.param(3, 41, True, id="forty seconds"),
        pytest.param(40, 301, True, id="but never longer than the limit"),
    ],
)
def test_pods_that_end_again_and_again_are_made_with_patience(incarnation: int, age_s: float, is_made: bool) -> None:
    ended = pod(pid(0, incarnation), phase="Failed", created_at=NOW - seconds(age_s))
    made = [a for a in supplied(Record(), (ended, None), (pod(1), ready())) if isinstance(a, CreatePod)]
    assert bool(made) is is_made


def test_a_pod_that_somebody_deleted_is_replaced_at_once() -> None:
    deleted = pod(pid(0, 9), kill_at=NOW + seconds(60), created_at=NOW - seconds(5))
    assert CreatePod(pid(0, 10), 2) in supplied(Record(), (deleted, ready()), (pod(1), ready()))


def test_the_last_ended_pod_is_kept_for_its_log_until_its_replacement_works() -> None:
    ended = [(pod(pid(0, n), phase="Failed", created_at=LONG_AGO), None) for n in range(3)]
    starting = (pod(pid(0, 3), started=False), None)
    gone = [a.name for a in supplied(Record(), *ended, starting, (pod(1), ready())) if isinstance(a, DeletePod)]
    assert gone == ["job-workers-0", "job-workers-0-1"]
    works = (pod(pid(0, 3)), ready())
    gone = [a.name for a in supplied(Record(), *ended, works, (pod(1), ready())) if isinstance(a, DeletePod)]
    assert gone == ["job-workers-0", "job-workers-0-1", "job-workers-0-2"]


def test_pods_beyond_the_largest_size_are_removed() -> None:
    removed = supplied(trains(), (pod(0), running()), (pod(1), running()), (pod(2), ready()))
    assert removed == [
        ShutDownAgent("job-workers-2"),
        DeletePod("job-workers-2", pod(2).uid, "no longer wanted at this size"),
    ]
