"""A fault in a change of sharded state: who was to leave is a member again, because it may hold the only copy of a shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    agent,
    context,
    faulted,
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

from elastipod_operator.core.actions import CreatePod, DeletePod, Plan, StartWorkers, StopWorkers
from elastipod_operator.core.leavers import MAX_RESIZES_UNDONE
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, RestartMode, Transition, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.replica import Health
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedPod, Policy, SpecLimits
from elastipod_operator.core.transition import in_transition

Seen = tuple[ObservedPod, ObservedAgent]
SHARDS: dict[str, Any] = {"memory_state": "sharded"}
WHOLE: dict[str, Any] = {"memory_state": "replicated"}
GOES: dict[str, Any] = {"disruption": "taint spot:NoExecute"}
LAST_TWO = (pid(2), pid(3))
PARKED = ready(1, **SHARDS, num_kept=1)
NEW = ready(1, **SHARDS, num_kept=0)  # its process has crashed, and another one waits at the barrier
SPARE = (pod(4), ready(0))
BY_TWO = Sizes((2, 4), 2)


def recovery(**changes: Any) -> Transition:
    """Give the recovery from a fault that has ended a shrink from 4 to 2."""
    usual: dict[str, Any] = {
        "depth": Depth.MEMORY,
        "reach": RestartMode.IN_PROCESS,
        "from_size": 4,
        "is_budget_checked": True,
    }
    return transition(TransitionKind.RECOVERY, **{**usual, **changes})


def stopped(*changed: Seen, size: int = 4) -> list[Seen]:
    """Give members whose workers wait with their shards; some of them changed."""
    by_id = {seen[0].id: seen for seen in [*((pod(n), PARKED) for n in range(size)), *changed]}
    return [by_id[each] for each in sorted(by_id)]


def decide(seen: list[Seen], wishes: Policy, begun: Transition | None = None, **changes: Any) -> Plan:
    record = decode(encode(trains(4, transition=begun or recovery(), **changes)))
    return plan(observed(job(record, wishes), seen))


def begin(todo: Plan) -> list[int]:
    """Give the ordinals of those who are started; none while the job waits."""
    assert len(acts(todo, StartWorkers)) in (0, len(todo.record.members))
    return [member.ordinal for member in todo.record.members] if acts(todo, StartWorkers) else []


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(faulted(**SHARDS), id="one that is to stay has crashed"),
        pytest.param(ready(1, **SHARDS, num_kept=0, failure=faulted().failure), id="and is ready already"),
        pytest.param(ready(1, failure=faulted().failure), id="and its new process has announced nothing yet"),
    ],
)
def test_a_fault_in_a_shrink_brings_back_who_was_to_leave(late: ObservedAgent) -> None:
    """From the fault to the shrink that follows: with a list of its own."""
    stopping = agent(AgentState.STOPPING, **SHARDS)
    begun = transition(depth=Depth.MEMORY, leavers=LAST_TWO, from_size=4)
    seen = [(pod(0), stopping), (pod(1), late), (pod(2), stopping), (pod(3), stopping)]
    todo = decide(seen, policy(2, 2), begun)
    assert todo.record.transition is not None
    assert (todo.record.transition.kind, todo.record.transition.depth) == (TransitionKind.RECOVERY, Depth.MEMORY)
    assert {(one.graceful, one.keeps) for one in acts(todo, StopWorkers)} == {(False, True)}
    assert not acts(todo, DeletePod)

    parked = plan(observed(job(decode(encode(todo.record)), policy(2, 2)), stopped((pod(1), NEW))))
    assert begin(parked) == [0, 1, 2, 3]
    assert (parked.record.resizes_undone, parked.history[-1].to_size) == (1, 4)
    assert not acts(parked, DeletePod)

    trained = [(pod(n), running(2, step=6, **SHARDS)) for n in range(4)]
    again = plan(observed(job(parked.record, policy(2, 2)), trained))
    again = plan(observed(job(again.record, policy(2, 2)), trained))
    assert again.record.transition is not None
    assert (again.record.transition.kind, again.record.transition.leavers) == (TransitionKind.RESIZE, LAST_TWO)


@pytest.mark.parametrize(
    ("seen", "wishes", "members"),
    [
        pytest.param(stopped(), policy(2, 2), [0, 1, 2, 3], id="above the size that the user wants"),
        pytest.param(stopped(), policy(1, 1), [0, 1, 2, 3], id="whatever that is by now"),
        pytest.param(stopped((pod(0), NEW)), policy(2, 2), [0, 1, 2, 3], id="beside a new process"),
        pytest.param(stopped((pod(3), NEW)), policy(2, 2), [0, 1, 2, 3], id="also where that is of one that was to leave"),
        pytest.param(stopped((pod(3, **GOES), PARKED)), policy(2, 4), [0, 1, 2, 3], id="one must go"),
        pytest.param(
            stopped(*((pod(n, **GOES), PARKED) for n in (1, 2, 3))), policy(2, 4, sizes=BY_TWO), [0, 1, 2, 3],
            id="all but one must go, and that one alone cannot train",
        ),
        pytest.param(stopped((pod(3, **GOES), NEW)), policy(2, 4), [0, 1, 2], id="one must go that holds nothing"),
        pytest.param(
            stopped((pod(3, **GOES), replace(PARKED, terminating=True))), policy(2, 3), [0, 1, 2], id="one is being terminated"
        ),
        pytest.param(stopped((pod(3, **GOES), PARKED), SPARE), policy(2, 4), [0, 1, 2, 3], id="one must go, and has a successor"),
        pytest.param(stopped((pod(1), NEW), (pod(3, **GOES), PARKED), SPARE), policy(2, 4), [0, 1, 2, 3], id="and so has another"),
    ],
)  # fmt: skip
def test_all_who_wait_with_shards_begin_the_generation_after_a_fault(
    seen: list[Seen], wishes: Policy, members: list[int]
) -> None:
    assert begin(decide(seen, wishes)) == members


def test_quota_that_is_taken_back_goes_with_the_shrink_that_follows() -> None:
    wishes = policy(2, 4)
    record = trains(4, transition=recovery())
    lost = {pid(3).slot: ("Preempted", "a higher class")}
    granted = Sizes((2, 3), 2)
    now = context(observed(job(record, wishes), stopped()), quota_lost=lost, sizes=granted)
    assert now.replicas.by_id[pid(3)].health is Health.DISRUPTED
    draft = in_transition(record, now)
    assert [member.ordinal for member in draft.record.members] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        pytest.param([(pod(n), ready(1, **WHOLE, num_kept=1)) for n in range(4)], {}, id="each has the whole state"),
        pytest.param(stopped(), {"begun": recovery(depth=Depth.PROCESS)}, id="all get new processes"),
        pytest.param(stopped(), {"resizes_undone": MAX_RESIZES_UNDONE}, id="faults have undone it again and again"),
    ],
)
def test_the_others_leave_where_they_hold_nothing_that_is_needed(seen: list[Seen], changes: dict[str, Any]) -> None:
    todo = decide(seen, policy(2, 2), **changes)
    if todo.record.transition is not None:  # its processes end first
        assert {one.graceful for one in acts(todo, StopWorkers)} == {False}
        ended = [(one, ready(1)) for one, _ in seen]
        todo = plan(observed(job(todo.record, policy(2, 2)), ended))
    assert begin(todo) == [0, 1]
    assert todo.record.resizes_undone == 0


WITHOUT_ONE = [seen for seen in stopped() if seen[0].id != pid(1)]
REPLACEMENT = pid(1, 1)


def test_where_no_size_has_room_for_all_of_them_a_replacement_is_waited_for_as_after_any_fault() -> None:
    wishes = policy(2, 2, sizes=Sizes((2,), 2))
    began = recovery(began_s=5)
    todo = decide(WITHOUT_ONE, wishes, began)
    assert not begin(todo)
    assert todo.wake_at == NOW + seconds(25)
    assert REPLACEMENT in {one.pod for one in acts(todo, CreatePod)}
    assert not acts(todo, DeletePod), "who was to leave stays"
    assert begin(decide([*WITHOUT_ONE, (pod(REPLACEMENT), ready(0))], wishes, began)) == [0, 2, 3, 1]
    late = decide(WITHOUT_ONE, wishes, recovery(began_s=31))
    assert begin(late) == [0, 2], "they go on with what they hold"


def test_those_who_must_go_stay_for_no_more_than_the_time_of_a_stop() -> None:
    wishes = policy(2, 2, sizes=Sizes((2,), 2), faulty_timeout=seconds(300))
    doomed = [(pod(3, **GOES), PARKED)]
    seen = [*(one for one in WITHOUT_ONE if one[0].id != pid(3)), *doomed]
    todo = decide(seen, wishes, recovery(began_s=5))
    assert not acts(todo, DeletePod)
    assert todo.wake_at == NOW + seconds(25)
    todo = decide(seen, wishes, recovery(began_s=31))
    assert [one.name for one in acts(todo, DeletePod)] == [pod(3).name]


def test_nobody_leaves_while_a_recovery_backs_off() -> None:
    wishes = policy(2, 2)
    todo = decide(stopped((pod(1), NEW)), wishes, recovery(began_s=40, not_before=NOW + seconds(20)))
    assert not begin(todo)
    assert not acts(todo, DeletePod)


@pytest.mark.parametrize(
    ("stays", "members"),
    [
        pytest.param((pod(1), PARKED), [0, 1], id="as it was decided"),
        pytest.param((pod(1), NEW), [0, 1, 2, 3], id="its processes have ended"),
        pytest.param(
            (pod(1, kill_at=NOW + seconds(5)), ready(1, **SHARDS, terminating=True)), [0, 2], id="no size fits"
        ),
    ],
)
def test_a_shrink_is_undone_too_if_one_that_stays_loses_its_shard_before_the_next_generation(
    stays: Seen, members: list[int]
) -> None:
    begun = transition(depth=Depth.MEMORY, leavers=LAST_TWO, from_size=4, graceful=False)
    assert begin(decide(stopped(stays), policy(2, 2), begun)) == members


def test_a_shrink_is_not_undone_again_and_again() -> None:
    begun = transition(depth=Depth.MEMORY, leavers=LAST_TWO, from_size=4, graceful=False)
    todo = decide(stopped((pod(1), NEW)), policy(2, 2), begun, resizes_undone=1)
    assert (begin(todo), todo.record.resizes_undone) == ([0, 1, 2, 3], 2)
    todo = decide(stopped((pod(1), NEW)), policy(2, 2), begun, resizes_undone=MAX_RESIZES_UNDONE)
    assert (begin(todo), todo.record.resizes_undone) == ([0, 1], 0)


def test_they_are_no_more_of_a_spec_than_trained_together() -> None:
    """One of the base is gone. The successor of a pod of the other spec that must go cannot stand for it: that spec has two places."""
    base, extra = ([PodId(spec, n, 0) for n in range(3)] for spec in ("base", "extra"))
    wishes = policy(specs=(SpecLimits("base", 2), SpecLimits("extra", 2)), sizes=Sizes((1, 4), 4))
    record = trains(members=(*base[:2], *extra[:2]), transition=recovery(target_size=4))
    seen: list[Seen] = [(pod(base[0]), PARKED), (pod(extra[0], **GOES), PARKED), (pod(extra[1]), PARKED)]
    seen.append((pod(extra[2]), ready(0)))
    assert not acts(plan(observed(job(record, wishes), seen)), StartWorkers)
    seen.append((pod(PodId("base", 1, 1)), ready(0)))
    todo = plan(observed(job(record, wishes), seen))
    assert set(todo.record.members) == {base[0], PodId("base", 1, 1), *extra[:2]}
