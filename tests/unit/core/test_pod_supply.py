"""Which pods are asked for and which are removed, pod by pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    Seen,
    agent,
    pid,
    pod,
    policy,
    ready,
    replicas_of,
    running,
    seconds,
    silent,
    trains,
    transition,
)
from tests.unit.core.supply_builders import AWAY, PAIR, removed, supplied

from elastipod_operator.core.actions import Action, CreatePod
from elastipod_operator.core.grant import grant_all
from elastipod_operator.core.incarnations import newest_incarnations, record_incarnations
from elastipod_operator.core.names import PodId, Slot
from elastipod_operator.core.ranks import count_trainable, rank_order, usable
from elastipod_operator.core.record import Record
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.slots import wanted_slots
from elastipod_operator.core.snapshot import AgentState, SpecLimits

TWO = policy(2, 4, specs=(SpecLimits("base", 2), SpecLimits("extra", 2)))


def of(spec: str, ordinal: int, incarnation: int = 0) -> PodId:
    return PodId(spec, ordinal, incarnation)


def waits(ordinal: int, **changes: Any) -> Seen:
    return pod(ordinal, **{"phase": "Pending", "node": "", "ip": "", "started": False, **changes}), None


def made(actions: list[Action]) -> list[PodId]:
    return [a.pod for a in actions if isinstance(a, CreatePod)]


# ---- who trains


def test_a_spec_that_the_job_no_longer_has_comes_last_and_does_not_train() -> None:
    present = [of("old", 0), of("extra", 0), of("base", 0)]
    candidates = replicas_of(Record(), *((pod(p), ready()) for p in present)).candidates()
    assert [r.id.spec for r in rank_order(candidates, Record(), grant_all(TWO))] == ["base", "extra", "old"]
    wishes = replace(TWO, sizes=Sizes((1, 2), 1))
    assert [r.id.spec for r in usable(candidates, Record(), grant_all(wishes))] == ["base", "extra"]


def test_of_each_spec_no_more_train_than_it_may() -> None:
    present = [*(of("base", n) for n in range(4)), *(of("extra", n) for n in range(3))]
    candidates = replicas_of(Record(), *((pod(p), ready()) for p in present)).candidates()
    assert [r.id for r in usable(candidates, Record(), grant_all(TWO))] == [
        of("base", 0), of("base", 1), of("extra", 0), of("extra", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "room"),
    [
        pytest.param({"base": 2, "extra": 1}, 3, id="they add up"),
        pytest.param({"base": 1, "extra": 2}, 0, id="but not without the minimum of the base spec"),
        pytest.param({"base": 5}, 2, id="no more than the spec's limit"),
        pytest.param({"base": 2, "extra": 2, "old": 9}, 3, id="no more than the largest size, whatever else there is"),
        pytest.param({"old": 9}, 0, id="other specs do not count"),
    ],
)
def test_room(number: dict[str, int], room: int) -> None:
    pods = [of(spec, n) for spec, most in number.items() for n in range(most)]
    assert count_trainable(pods, grant_all(policy(sizes=Sizes((2, 3), 2), specs=TWO.specs))) == room


# ---- which slots


@pytest.mark.parametrize(
    ("pods", "slots"),
    [
        pytest.param([(pod(3), running()), waits(2), (pod(1, phase="Failed"), None)], [3, 2], id="who runs, then who comes"),
        pytest.param([(pod(3), None), waits(2)], [3, 2], id="a pod that started is nearer than one that did not"),
        pytest.param([(pod(3, disruption="x"), running()), waits(2)], [2, 0], id="who goes is no nearer than nobody"),
        pytest.param([(pod(1), ready()), (pod(0), ready())], [0, 1], id="the lowest ordinals first"),
    ],
)  # fmt: skip
def test_the_order_of_slots(pods: list[Seen], slots: list[int]) -> None:
    assert wanted_slots(grant_all(PAIR), Record(), replicas_of(Record(), *pods)) == [Slot("workers", n) for n in slots]


def test_the_next_spec_gets_what_the_first_one_leaves_and_spares_are_beside() -> None:
    wishes = policy(
        sizes=Sizes((2, 3), 2),
        specs=(SpecLimits("base", 2, spares=1), SpecLimits("extra", 2, spares=1), SpecLimits("none", 2, spares=1)),
    )
    assert wanted_slots(grant_all(wishes), Record(), replicas_of(Record())) == [
        *(Slot("base", n) for n in range(3)), *(Slot("extra", n) for n in range(2)),
    ], "a spec that is not used has no spares either"  # fmt: skip


# ---- creations


@pytest.mark.parametrize(
    ("record", "nnodes"),
    [pytest.param(Record(), 2, id="the first size"), pytest.param(trains(3), 3, id="the present one")],
)
def test_a_pod_is_made_with_size_generation_and_nodes_to_avoid(record: Record, nnodes: int) -> None:
    actions, wake = supplied(record, wishes=policy(2, 3), avoids=("bad",))
    assert actions == [
        CreatePod(pid(n, int(n < len(record.members))), nnodes, record.generation, ("bad",)) for n in range(3)
    ]
    assert wake is None


@pytest.mark.parametrize(
    ("mine", "incarnation"),
    [
        pytest.param((pod(0), running()), None, id="runs"),
        pytest.param(waits(0), None, id="waits"),
        pytest.param((pod(0), silent(20)), None, id="is silent"),
        pytest.param((pod(0, phase="Succeeded"), None), 1, id="has ended"),
        pytest.param((pod(0, disruption="x"), ready()), 1, id="goes"),
        pytest.param((pod(0, kill_at=NOW), ready()), 1, id="was deleted"),
    ],
)
def test_a_pod_is_made_anew_when_the_old_one(mine: Seen, incarnation: int | None) -> None:
    other = (pod(1), running(step=9, step_at=NOW))
    actions, _ = supplied(trains(), mine, other)
    assert made(actions) == ([] if incarnation is None else [pid(0, incarnation)])


@pytest.mark.parametrize(
    ("mine", "nodes", "incarnation"),
    [
        pytest.param((pod(0, kill_at=NOW), ready()), (), None, id="was deleted and still ends"),
        pytest.param((pod(0, disruption="x"), running()), (), None, id="trains and has to go"),
        pytest.param((pod(0, kill_at=NOW, phase="Succeeded"), None), (), 1, id="has ended, and its object is left"),
        pytest.param((pod(0), silent(20)), (AWAY,), 1, id="is lost with its node, or may be"),
    ],
)
def test_on_quota_a_pod_is_made_anew_when_the_old_one_takes_none_any_more(
    mine: Seen, nodes: Any, incarnation: int | None
) -> None:
    workloads = {Slot("workers", 0): "base", Slot("workers", 1): "base"}
    other = (pod(1, node="node-1"), running(step=9, step_at=NOW))
    actions, _ = supplied(trains(), mine, other, workloads=workloads, nodes=nodes)
    assert made(actions) == ([] if incarnation is None else [pid(0, incarnation)])


def test_on_quota_a_pod_that_waits_with_old_nodes_to_avoid_goes_first() -> None:
    workloads = {Slot("workers", 0): "base", Slot("workers", 1): "base"}
    actions, _ = supplied(Record(), waits(0), (pod(1), ready()), workloads=workloads, avoids=("bad",))
    assert made(actions) == []
    assert removed(actions) == [(pid(0).name("job"), "pending with an outdated list of nodes", False)]
    actions, _ = supplied(Record(), (pod(1), ready()), workloads=workloads, avoids=("bad",))
    assert made(actions) == [pid(0)], "nothing tells that it ever was"


@pytest.mark.parametrize(
    ("limits", "in_use_waits", "others_wait_s"),
    [
        pytest.param({}, False, None, id="nothing stands in the way"),
        pytest.param({"pod_creation_retry_at": NOW + seconds(9)}, True, 9, id="a refusal concerns all"),
        pytest.param({"pod_creation_retry_at": NOW}, False, None, id="until it is over"),
        pytest.param({"growth_until": NOW + seconds(7)}, False, 7, id="what does not pay concerns more replicas only"),
        pytest.param(
            {"growth_until": NOW + seconds(7), "pod_creation_retry_at": NOW + seconds(9)}, True, 9, id="the later one"
        ),
    ],
)
def test_what_a_creation_waits_for(limits: dict[str, Any], in_use_waits: bool, others_wait_s: float | None) -> None:
    actions, wake = supplied(trains(), (pod(0), running()), wishes=policy(2, 3), **limits)
    assert (pid(1, 1) in made(actions)) is not in_use_waits
    assert (pid(2) in made(actions)) is (others_wait_s is None)
    assert wake == (None if others_wait_s is None else NOW + seconds(others_wait_s))


def test_in_a_change_every_slot_is_in_use() -> None:
    record = trains(transition=transition())
    pods = [(pod(n), agent(AgentState.STOPPING)) for n in range(2)]
    actions, wake = supplied(record, *pods, wishes=policy(2, 3), growth_until=NOW + seconds(7))
    assert (made(actions), wake) == ([pid(2)], None)


def test_the_first_creation_that_falls_due_wakes() -> None:
    pods = [(pod(pid(n, 2), phase="Failed", created_at=NOW - seconds(n)), None) for n in (1, 0)]
    assert supplied(Record(), *pods)[1] == NOW + seconds(19)


@pytest.mark.parametrize(
    ("incarnation", "failures", "wait_s"),
    [
        pytest.param(0, 0, None, id="the first time at once"),
        pytest.param(1, 0, 10, id="the second pod"),
        pytest.param(0, 1, 10, id="or a job that failed before"),
        pytest.param(2, 5, 160, id="whichever is more"),
        pytest.param(5, 2, 160, id="of the two"),
        pytest.param(6, 0, 300, id="limited"),
        pytest.param(60, 0, 300, id="for ever"),
    ],
)
def test_a_pod_that_ended_by_itself_is_made_anew_later(incarnation: int, failures: int, wait_s: float | None) -> None:
    ended = (pod(pid(0, incarnation), phase="Failed", created_at=NOW), None)
    actions, wake = supplied(Record(consecutive_failures=failures), ended, (pod(1), ready()))
    assert wake == (None if wait_s is None else NOW + seconds(wait_s))
    assert bool(made(actions)) is (wait_s is None)


FAILED = {"phase": "Failed", "created_at": NOW}


@pytest.mark.parametrize(
    ("record", "changes", "wait_s", "failures"),
    [
        pytest.param(trains(members=(pid(0, 7), pid(1))), {}, None, 0, id="a member"),
        pytest.param(trains(members=(pid(0, 7), pid(1)), consecutive_failures=2), {}, 20, 0, id="of a job that fails"),
        pytest.param(Record(), {"failures_before": 0}, None, 1, id="after a suspension or a full restart"),
        pytest.param(Record(), {"failures_before": 2}, 20, 3, id="after two that failed without training"),
        pytest.param(Record(), {"failures_before": 2, "kill_at": NOW}, None, 2, id="one that was deleted"),
        pytest.param(Record(), {"kill_at": NOW}, None, 0, id="one of an earlier operator that was deleted"),
        pytest.param(Record(), {}, 300, 8, id="one of an earlier operator, which does not tell"),
    ],
)
def test_only_failures_without_training_delay_a_replacement(
    record: Record, changes: dict[str, Any], wait_s: float | None, failures: int
) -> None:
    """Suspensions, preemptions, drains, shrinks and full restarts have recreated the pod seven times."""
    ended, other = pod(pid(0, 7), **{**FAILED, **changes}), (pod(1), running())
    assert supplied(record, (ended, None), other)[1] == (None if wait_s is None else NOW + seconds(wait_s))
    long_ago = replace(ended, created_at=NOW - seconds(301))
    (order,) = [a for a in supplied(record, (long_ago, None), other)[0] if isinstance(a, CreatePod)]
    assert (order.pod, order.failures_before) == (pid(0, 8), failures)


def test_a_slot_whose_pods_never_train_waits_longer_and_longer() -> None:
    """The job was suspended before, so the first pod here is not the first of its slot."""
    latest, waits_s = pod(pid(0, 4), failures_before=0, **FAILED), []
    for _ in range(9):
        wake = supplied(Record(), (latest, None), (pod(1), ready()))[1]
        waits_s.append((wake - NOW).total_seconds() if wake is not None else 0)
        long_ago = replace(latest, created_at=NOW - seconds(301))
        (order,) = [a for a in supplied(Record(), (long_ago, None), (pod(1), ready()))[0] if isinstance(a, CreatePod)]
        latest = pod(order.pod, failures_before=order.failures_before, **FAILED)
    assert waits_s == [0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_slot_without_a_pod_has_no_failures() -> None:
    record = trains(members=(), incarnations={Slot("workers", 0): 6})
    (order, _) = [a for a in supplied(record)[0] if isinstance(a, CreatePod)]
    assert (order.pod, order.failures_before) == (pid(0, 7), 0)


@pytest.mark.parametrize(
    ("changes", "is_made_anew"),
    [
        pytest.param({}, True, id="it waits with another idea of them"),
        pytest.param({"avoids": ("bad",)}, False, id="with the same"),
        pytest.param({"node": "node-0"}, False, id="it has a place"),
        pytest.param({"kill_at": NOW}, True, id="it goes already"),
    ],
)
def test_a_pod_in_wait_is_made_anew_when_the_nodes_to_avoid_change(changes: dict[str, Any], is_made_anew: bool) -> None:
    mine = pod(pid(0, 3), **{"phase": "Pending", "node": "", "ip": "", "started": False, "created_at": NOW, **changes})
    actions, _ = supplied(Record(), (mine, None), (pod(1), ready()), avoids=("bad",))
    assert made(actions) == ([pid(0, 4)] if is_made_anew else []), "at once: it is not at fault"


# ---- spares

SPARED = policy(2, 2, specs=(SpecLimits("workers", 2, spares=2),))


@pytest.mark.parametrize(
    ("others", "spares"),
    [
        pytest.param([(pod(0), None), (pod(1), None)], [2, 3], id="when all who are to train have a place"),
        pytest.param([(pod(0), None), waits(1)], [], id="not while one has none"),
        pytest.param([(pod(0), None)], [], id="nor while one is not made"),
        pytest.param([(pod(0), None), (pod(1, disruption="x"), ready())], [], id="nor while one goes"),
        pytest.param([(pod(0), None), (pod(1, phase="Failed"), None)], [], id="nor while one has ended"),
        pytest.param([(pod(0), None), (pod(1), None), (pod(2), None)], [3], id="each"),
        pytest.param([(pod(0), None), (pod(1), None), waits(2)], [3], id="whether or not the other has one"),
    ],
)
def test_spares_are_made(others: list[Seen], spares: list[int]) -> None:
    actions, _ = supplied(Record(), *others, wishes=SPARED)
    assert [p.ordinal for p in made(actions) if p.ordinal > 1] == spares


def test_the_spares_of_each_spec_are_its_last() -> None:
    wishes = policy(sizes=Sizes((2, 3), 2), specs=(SpecLimits("base", 2, spares=1), SpecLimits("extra", 2, spares=1)))
    place = [(pod(of("base", n)), None) for n in range(2)]
    assert made(supplied(Record(), *place, wishes=wishes)[0]) == [of("extra", 0)]
    placed = [*place, (pod(of("extra", 0)), None)]
    assert made(supplied(Record(), *placed, wishes=wishes)[0]) == [of("base", 2), of("extra", 1)]


# ---- names


def test_names_that_were_used_are_on_record() -> None:
    record = trains(members=(pid(0, 2), pid(1)), incarnations={Slot("workers", 0): 5, Slot("workers", 7): 1})
    after = record_incarnations(record, (pid(1, 3), pid(2)))
    assert after.incarnations == {
        Slot("workers", 0): 5, Slot("workers", 1): 3, Slot("workers", 2): 0, Slot("workers", 7): 1,
    }  # fmt: skip
    assert record_incarnations(after, (pid(1), pid(2))) is after


def test_the_newest_name_of_a_slot_whatever_tells_of_it() -> None:
    record = trains(members=(pid(0, 1), pid(1, 4)), lost=(pid(0, 3), pid(2)), incarnations={Slot("workers", 3): 6})
    replicas = replicas_of(record, (pod(pid(0, 2)), ready()), (pod(pid(3, 1)), ready()), (pod(4), ready()))
    assert newest_incarnations(record, replicas) == {
        Slot("workers", n): i for n, i in ((0, 3), (1, 4), (2, 0), (3, 6), (4, 0))
    }
