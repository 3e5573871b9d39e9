"""Which pods are removed, and how."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    agent,
    pid,
    pod,
    ready,
    replicas_of,
    running,
    seconds,
    silent,
    trains,
    transition,
)
from tests.unit.core.supply_builders import AWAY, removed, supplied

from elastipod_operator.core.actions import Action, DeletePod, ShutDownAgent
from elastipod_operator.core.pod_removal import LEAVERS_STAY, remove
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode


@pytest.mark.parametrize(
    ("record", "pods", "expected"),
    [
        pytest.param(Record(), [(pod(0), ready()), (pod(pid(0, 1)), ready()), (pod(1), ready())],
                     [(pod(0).name, "replaced by a newer pod", False)], id="an older pod of a slot"),
        pytest.param(Record(), [(pod(n), ready()) for n in range(3)], [(pod(2).name, "no longer wanted at this size", False)],
                     id="one too many"),
        pytest.param(Record(), [(pod(0, disruption="x"), ready()), (pod(1), ready())],
                     [(pod(0).name, f"pod {pod(0).name} is being disrupted (x)", False)], id="one that goes"),
        pytest.param(Record(lost=(pid(0),)), [(pod(0), ready()), (pod(1), ready())], [(pod(0).name, "lost", False)], id="a lost one"),
        pytest.param(trains(), [(pod(0), running(step=9, step_at=NOW)), (pod(1), silent(20))], [], id="who may come back"),
        pytest.param(trains(), [(pod(n), running()) for n in range(2)], [], id="those who train"),
        pytest.param(trains(members=(pid(0), pid(5))), [(pod(n), running()) for n in (0, 1, 5)],
                     [(pod(1).name, "no longer wanted at this size", False)], id="members stay, whatever their ordinals"),
        pytest.param(trains(members=(pid(0), pid(1))), [(pod(0), running()), (pod(pid(0, 1)), ready()), (pod(1), running())], [],
                     id="also when a replacement is there already"),
    ],
)  # fmt: skip
def test_who_is_removed(record: Record, pods: list[Seen], expected: list[tuple[str, str, bool]]) -> None:
    assert removed(supplied(record, *pods)[0]) == expected


@pytest.mark.parametrize(
    ("others", "goes"),
    [
        pytest.param((pod(1), agent(AgentState.STOPPING)), False, id="while one still stops"),
        pytest.param((pod(1), ready(1)), True, id="once all are parked"),
        pytest.param((pod(1, phase="Failed"), None), True, id="or have ended"),
    ],
)
def test_a_member_that_is_about_to_go_is_kept(others: Seen, goes: bool) -> None:
    record = trains(transition=transition())
    actions, _ = supplied(record, (pod(0, disruption="x"), ready(1)), others)
    assert bool([n for n, _, _ in removed(actions) if n == pod(0).name]) is goes


CONNECTS = trains(generation=2, generation_began_at=NOW - seconds(1), running_since=None)
STEPS = running(2, step=9, step_at=NOW)


@pytest.mark.parametrize(
    ("record", "member", "leaver", "goes"),
    [
        pytest.param(CONNECTS, running(2), (pod(2), ready()), False, id="nor does one go while the world connects"),
        pytest.param(CONNECTS, running(2), (pod(2, disruption="x"), ready()), False, id="nor one on a node that goes"),
        pytest.param(CONNECTS, running(2), (pod(pid(0, 0)), ready()), False, id="nor one that was replaced"),
        pytest.param(CONNECTS, STEPS, (pod(2), ready()), True, id="after the first step"),
        pytest.param(replace(CONNECTS, generation_began_at=NOW - LEAVERS_STAY), running(2), (pod(2), ready()), True, id="nor for long"),
        pytest.param(replace(CONNECTS, running_since=NOW), running(2), (pod(2), ready()), True, id="nor once the job counts as running"),
        pytest.param(CONNECTS, running(2), (pod(2), silent(600)), True, id="a silent one"),
        pytest.param(replace(CONNECTS, generation=1), running(1), (pod(2), ready()), True, id="at the first start"),
    ],
)  # fmt: skip
def test_pods_that_left_stay_for_the_first_step(
    record: Record, member: ObservedAgent, leaver: Seen, goes: bool
) -> None:
    """Their removal would take processors and disks from those who connect."""
    newest = pod(pid(0, 1)) if leaver[0].id == pid(0, 0) else pod(0)
    record = replace(record, members=(newest.id, pid(1)))
    actions, wake = supplied(record, (newest, member), (pod(1), member), leaver)
    assert (leaver[0].name in {name for name, _, _ in removed(actions)}) is goes
    if not goes:
        assert wake == NOW + seconds(1)


def test_a_lost_member_keeps_nobody() -> None:
    record = trains(transition=transition(), lost=(pid(0),))
    actions, _ = supplied(record, (pod(0), silent(60)), (pod(1, disruption="x"), ready(1)))
    assert [(n, w) for n, w, _ in removed(actions)] == [
        (pod(0).name, "lost"), (pod(1).name, f"pod {pod(1).name} is being disrupted (x)"),
    ]  # fmt: skip


def test_the_newest_ended_pod_is_kept_until_its_replacement_works() -> None:
    ended = [(pod(pid(0, n), phase="Failed", created_at=LONG_AGO), None) for n in (1, 0)]
    actions, _ = supplied(Record(), *ended, (pod(pid(0, 2)), agent(AgentState.INIT)), (pod(1), ready()))
    assert removed(actions) == [(pod(pid(0, n)).name, "replaced by a newer pod", False) for n in (1, 0)]
    actions, _ = supplied(Record(), *ended, (pod(pid(0, 2)), None), (pod(1), ready()))
    assert removed(actions) == [(pod(0).name, "replaced by a newer pod", False)]


# ---- how a pod is removed


@pytest.mark.parametrize(
    ("mine", "node", "shuts", "deletes", "force"),
    [
        pytest.param((pod(0), ready()), None, True, True, False, id="its agent first"),
        pytest.param((pod(0, disruption="x"), ready()), None, True, True, False, id="also when it is about to go"),
        pytest.param((pod(0), agent(AgentState.SHUTDOWN)), None, False, True, False, id="who leaves is not asked"),
        pytest.param((pod(0), agent(None)), None, False, True, False, id="nor who was never heard"),
        pytest.param((pod(0), silent(60)), None, False, True, False, id="nor who is silent"),
        pytest.param((pod(0, kill_at=NOW), ready()), None, True, False, False, id="it is being deleted"),
        pytest.param((pod(0, kill_at=NOW), silent(60)), ObservedNode(name="node-0", out_of_service=True), False, True, True,
                     id="where nobody will ever do it: by force"),
        pytest.param((pod(0, phase="Failed", kill_at=NOW), None), None, False, False, False,
                     id="also when its containers have ended: the API server takes no second one"),
        pytest.param((pod(0, phase="Failed", kill_at=NOW), None), ObservedNode(name="node-0", out_of_service=True), False, True, True,
                     id="ended, but its kubelet died before its object went"),
        pytest.param((pod(0, phase="Failed", kill_at=NOW), None), AWAY, False, True, True, id="ended on a node that is away for long"),
        pytest.param((pod(0, phase="Failed", kill_at=NOW), None), replace(AWAY, not_ready_since=NOW), False, False, False,
                     id="ended on a node that may come back"),
        pytest.param((pod(0, phase="Failed"), None), None, False, True, False, id="ended"),
    ],
)  # fmt: skip
def test_how_a_pod_is_removed(mine: Seen, node: ObservedNode | None, shuts: bool, deletes: bool, force: bool) -> None:
    replica = replicas_of(Record(), mine, (pod(1), ready()), nodes=[node] if node else []).by_id[pid(0)]
    expected: list[Action] = [ShutDownAgent(pod(0).name)] if shuts else []
    expected += [DeletePod(pod(0).name, pod(0).uid, "because", force)] if deletes else []
    assert remove(replica, "because") == expected
