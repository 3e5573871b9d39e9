"""What a pod is good for, from what is known of pod, node and agents."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    agent,
    faulted,
    job,
    missed,
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

from elastipod_operator.core.health import assess
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.replica import Health
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod, Snapshot

NOT_READY = ObservedNode(name="node-0", ready=False, not_ready_since=NOW - seconds(10))
STEPS = running(step=50, step_at=NOW - seconds(1), step_pace=seconds(2))
STANDS = running(step=50, step_at=NOW - seconds(60), step_pace=seconds(2))
SLOW = running(step=50, step_at=NOW - seconds(60), step_pace=seconds(50))


def health_of_the_first(snapshot: Snapshot) -> tuple[Health, str]:
    replica = assess(snapshot).by_id[pid(0)]
    return replica.health, replica.cause


@pytest.mark.parametrize(
    ("mine", "other", "node", "health", "why"),
    [
        pytest.param(running(), running(), None, Health.GOOD, "", id="an agent that answers is good"),
        pytest.param(silent(10), running(), None, Health.GOOD, "", id="one missed answer is nothing"),
        pytest.param(silent(20), STEPS, None, Health.SILENT, "AgentSilent", id="silence while the others make steps is not death"),
        pytest.param(silent(20), SLOW, None, Health.SILENT, "AgentSilent", id="steps that take long prove nothing yet"),
        pytest.param(silent(20), running(), None, Health.SILENT, "AgentSilent", id="others that report no steps prove nothing"),
        pytest.param(silent(20), STANDS, None, Health.SILENT, "AgentSilent", id="nor while the others stand still: they may pause"),
        pytest.param(missed(20), STANDS, None, Health.LOST, "NodeLost", id="nor can others reach it, who stand still: death"),
        pytest.param(silent(20), faulted(), None, Health.LOST, "NodeLost", id="silence and a broken collective is death"),
        pytest.param(silent(20), STEPS, NOT_READY, Health.LOST, "NodeLost", id="silence on a node that is not ready is death"),
        pytest.param(silent(20), silent(20), None, Health.SILENT, "AgentSilent",
                     id="when all are silent the operator suspects itself"),
        pytest.param(silent(20), silent(20), NOT_READY, Health.LOST, "NodeLost", id="unless its node says otherwise"),
        pytest.param(running(), running(), NOT_READY, Health.GOOD, "", id="who answers is alive, whatever its node says"),
        pytest.param(running(terminating=True), running(), None, Health.DISRUPTED, "PodTerminating", id="SIGTERM dooms"),
        pytest.param(running(), running(), ObservedNode(name="node-0", disruption="taint x:NoExecute"), Health.DISRUPTED, "NodeDrained",
                     id="a taint or label that drives pods off dooms"),
        pytest.param(running(), running(), ObservedNode(name="node-0", cordoned=True), Health.GOOD, "", id="cordon alone does nothing"),
        pytest.param(running(), running(), ObservedNode(name="node-0", out_of_service=True), Health.LOST, "NodeOutOfService",
                     id="out of service is final"),
    ],
)  # fmt: skip
def test_a_member_in_training(
    mine: ObservedAgent, other: ObservedAgent, node: ObservedNode | None, health: Health, why: str
) -> None:
    snapshot = observed(job(trains()), [(pod(0), mine), (pod(1), other)], [node] if node else [])
    assert health_of_the_first(snapshot) == (health, why)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        pytest.param(silent(14), silent(12, step=5, step_at=NOW - seconds(12), step_pace=seconds(1)), id="in training"),
        pytest.param(silent(14, state=AgentState.READY), silent(12), id="a spare"),
        pytest.param(
            silent(20), silent(2, step=5, step_at=NOW - seconds(2), step_pace=seconds(1)), id="one after the other"
        ),
    ],
)
def test_agents_that_fall_silent_together_are_not_taken_for_dead(mine: ObservedAgent, other: ObservedAgent) -> None:
    record = trains() if mine.state is AgentState.RUNNING else trains(members=(pid(1), pid(2)))
    assert health_of_the_first(observed(job(record), [(pod(0), mine), (pod(1), other)]))[0] is Health.SILENT


@pytest.mark.parametrize(
    ("changes", "health", "why"),
    [
        pytest.param({"phase": "Failed", "problem": "x"}, Health.ENDED, "PodFailed", id="failed"),
        pytest.param({"phase": "Succeeded"}, Health.ENDED, "PodFailed", id="ended well is ended too"),
        pytest.param({"kill_at": NOW + seconds(60)}, Health.DISRUPTED, "PodDeleted", id="deleted"),
        pytest.param(
            {"disruption": "EvictionByEvictionAPI"}, Health.DISRUPTED, "PodDisrupted", id="about to be evicted"
        ),
    ],
)
def test_a_member_whose_pod_goes(changes: dict[str, object], health: Health, why: str) -> None:
    snapshot = observed(job(trains()), [(pod(0, **changes), running()), (pod(1), running())])
    assert health_of_the_first(snapshot) == (health, why)


def test_a_cordon_leaves_the_pods_of_a_job_that_has_not_started_or_has_no_record() -> None:
    cordoned = ObservedNode(name="node-0", cordoned=True)
    for record in (None, Record()):
        snapshot = observed(job(record), [(pod(0), ready()), (pod(1), ready())], [cordoned])
        assert health_of_the_first(snapshot) == (Health.GOOD, "")


def test_a_deletion_on_a_cordoned_node_is_called_a_drain() -> None:
    cordoned = ObservedNode(name="node-0", cordoned=True)
    snapshot = observed(job(trains()), [(pod(0, kill_at=NOW), running()), (pod(1), running())], [cordoned])
    assert health_of_the_first(snapshot) == (Health.DISRUPTED, "NodeDrained")


@pytest.mark.parametrize(
    ("mine", "others", "health"),
    [
        pytest.param(silent(20, state=AgentState.READY), ready(), Health.LOST, id="a spare that is silent is replaced"),
        pytest.param(silent(20, state=AgentState.READY), None, Health.SILENT, id="unless nobody answers at all"),
        pytest.param(None, ready(), Health.PENDING, id="one that never answered is awaited"),
    ],
)
def test_a_pod_that_does_not_train(mine: ObservedAgent | None, others: ObservedAgent | None, health: Health) -> None:
    assert health_of_the_first(observed(job(), [(pod(0), mine), (pod(1), others)]))[0] is health


@pytest.mark.parametrize(
    ("trying_s", "other", "health"),
    [
        pytest.param(3, None, Health.PENDING, id="right after a restart nobody is judged"),
        pytest.param(20, STEPS, Health.SILENT, id="a member that stays silent while others step is not lost"),
        pytest.param(20, STANDS, Health.SILENT, id="nor one that stays silent while others stand still"),
        pytest.param(
            20, faulted(), Health.LOST, id="a member that stays silent while the workers of others fail is lost"
        ),
        pytest.param(20, None, Health.SILENT, id="nobody answers: the operator suspects itself"),
    ],
)
def test_an_operator_that_just_began(trying_s: float, other: ObservedAgent | None, health: Health) -> None:
    unheard = ObservedAgent(trying_since=NOW - seconds(trying_s))
    snapshot = observed(job(trains()), [(pod(0), unheard), (pod(1), other or unheard)])
    assert health_of_the_first(snapshot)[0] is health
    assert assess(snapshot).all_silent is (trying_s > 15 and other is None)


@pytest.mark.parametrize(
    ("other", "health"),
    [
        pytest.param(running(), Health.SILENT, id="while others still run, silence proves nothing"),
        pytest.param(ready(1), Health.LOST, id="when the others are stopped, a silent one cannot train either"),
    ],
)
def test_a_silent_member_in_a_recovery(other: ObservedAgent, health: Health) -> None:
    record = trains(transition=transition(TransitionKind.RECOVERY))
    assert health_of_the_first(observed(job(record), [(pod(0), silent(20)), (pod(1), other)]))[0] is health


@pytest.mark.parametrize(
    ("away_s", "mine", "health", "gone"),
    [
        pytest.param(599, silent(300), Health.LOST, False, id="not ready within the grace: lost, but its place is not given away"),
        pytest.param(601, silent(700), Health.LOST, True, id="not ready beyond the grace: gone"),
        pytest.param(601, running(), Health.GOOD, True, id="an agent that answers is never lost for its node"),
        pytest.param(601, None, Health.LOST, True, id="a pod that never started there is gone as well"),
    ],
)  # fmt: skip
def test_a_node_that_is_not_ready(away_s: float, mine: ObservedAgent | None, health: Health, gone: bool) -> None:
    node = ObservedNode(name="node-0", ready=False, not_ready_since=NOW - seconds(away_s))
    replica = assess(observed(job(trains()), [(pod(0), mine), (pod(1), running())], [node])).by_id[pid(0)]
    assert (replica.health, replica.cannot_run_again) == (health, gone)


def test_the_operator_looks_again_when_a_node_has_been_away_too_long() -> None:
    node = ObservedNode(name="node-0", ready=False, not_ready_since=NOW - seconds(100))
    replicas = assess(observed(job(wishes=policy(graceful_timeout=seconds(300))), [(pod(0), None)], [node]))
    assert replicas.next_loss_at is not None
    assert seconds(200) < replicas.next_loss_at - NOW < seconds(201)


@pytest.mark.parametrize(
    ("mine", "health", "gone"),
    [
        pytest.param(silent(20), Health.LOST, True, id="silent: the node was deleted"),
        pytest.param(running(), Health.GOOD, False, id="answering: the node is too new for the cache"),
        pytest.param(None, Health.PENDING, False, id="not started: the node is too new for the cache"),
    ],
)
def test_a_node_that_is_not_known(mine: ObservedAgent | None, health: Health, gone: bool) -> None:
    snapshot = replace(
        observed(job(trains()), [(pod(0), mine), (pod(1), STEPS)]), nodes={"node-1": ObservedNode(name="node-1")}
    )
    replica = assess(snapshot).by_id[pid(0)]
    assert (replica.health, replica.cannot_run_again) == (health, gone)


def test_a_pod_that_was_given_up_is_never_taken_back() -> None:
    snapshot = observed(job(trains(lost=(pid(0),))), [(pod(0), ready()), (pod(1), ready())])
    assert health_of_the_first(snapshot)[0] is Health.LOST
    assert [r.id for r in assess(snapshot).candidates()] == [pid(1)]


def test_only_the_newest_pod_of_a_slot_is_a_candidate() -> None:
    snapshot = observed(job(), [(pod(pid(0)), ready()), (pod(pid(0, 1)), ready()), (pod(1), agent(AgentState.INIT, 0))])
    assert [r.id for r in assess(snapshot).candidates()] == [pid(0, 1)]


def test_an_agent_that_never_answers_is_told_of() -> None:
    never = ObservedAgent(trying_since=LONG_AGO)
    assert health_of_the_first(observed(job(), [(pod(0), never)])) == (Health.PENDING, "AgentNotAnswering")


def test_the_pods_of_a_job_that_is_refused_are_judged_too() -> None:
    lone: ObservedPod = pod(0)
    snapshot = observed(replace(job(), policy=None, spec_error="no"), [(lone, ready())])
    assert health_of_the_first(snapshot)[0] is Health.GOOD
