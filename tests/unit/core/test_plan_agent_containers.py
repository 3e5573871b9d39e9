"""The agent's container ends while its pod lives: a sidecar, a shell that stays, a kubelet that starts it again (issue: wedges)."""

from __future__ import annotations

from dataclasses import replace
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

from elastipod_operator.core.actions import CreatePod, DeletePod, Plan, StartWorkers
from elastipod_operator.core.health import assess
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.replica import Health
from elastipod_operator.core.snapshot import (
    AgentState,
    ContainerState,
    ObservedAgent,
    ObservedContainer,
    ObservedNode,
    ObservedPod,
    ObservedWorkload,
)

CRASHED = ObservedContainer(ContainerState.TERMINATED, 1, "Error")
FINISHED = ObservedContainer(ContainerState.TERMINATED, 0, "Completed")
HELD_BACK = ObservedContainer(ContainerState.WAITING, 1, "CrashLoopBackOff", 3, is_restarting=True)
RESTARTED = ObservedContainer(ContainerState.RUNNING, 1, "", 1)
NOT_READY = ObservedNode(name="node-0", ready=False, not_ready_since=NOW - seconds(5))
COMPLETED = agent(AgentState.COMPLETED)
TROUBLE = "container train of pod job-workers-0 ended with exit code 1"
Pairs = list[tuple[ObservedPod, ObservedAgent | None]]


def with_sidecar(container: ObservedContainer = CRASHED, **changes: Any) -> ObservedPod:
    """Give a member whose agent's container is in this state while a sidecar runs."""
    return pod(0, container=container, started=container.state is ContainerState.RUNNING, problem=TROUBLE, **changes)


def decided(pairs: Pairs, record: Record | None = None, *nodes: ObservedNode, **wishes: Any) -> Plan:
    return plan(observed(job(record or trains(len(pairs)), policy(1, 4, **wishes)), pairs, nodes))


@pytest.mark.parametrize("others", [0, 1, 3], ids=["one replica", "two", "four"])
@pytest.mark.parametrize(
    "mine", [running(), silent(20), None], ids=["just now", "a while ago", "unknown to a new operator"]
)
def test_a_container_that_ended_beside_a_sidecar_is_a_failure_of_its_workers(
    mine: ObservedAgent | None, others: int
) -> None:
    todo = decided([(with_sidecar(), mine), *((pod(n), running()) for n in range(1, others + 1))])
    begun = todo.record.transition
    assert begun is not None
    assert (begun.kind, begun.cause, begun.uses_budget) == (TransitionKind.RECOVERY, "PodFailed", True)
    assert "exit code 1" in begun.message
    assert (todo.record.retries, [c.pod for c in todo.record.faulty_replicas]) == (1, [pid(0)])


@pytest.mark.parametrize(
    ("mine", "nodes", "cause"),
    [
        pytest.param(with_sidecar(kill_at=NOW + seconds(60)), [], "PodFailed", id="its pod is being deleted"),
        pytest.param(with_sidecar(disruption="EvictionByEvictionAPI"), [], "PodFailed", id="its pod is evicted"),
        pytest.param(with_sidecar(), [NOT_READY], "NodeLost", id="its node is not ready"),
        pytest.param(pod(0, phase="Failed", problem=TROUBLE), [NOT_READY], "NodeLost", id="its pod failed on a node that is not ready"),
    ],
)  # fmt: skip
def test_it_costs_no_retry_when_somebody_else_ended_it(
    mine: ObservedPod, nodes: list[ObservedNode], cause: str
) -> None:
    todo = decided([(mine, running()), (pod(1), running())], None, *nodes)
    begun = todo.record.transition
    assert begun is not None
    assert (begun.cause, begun.uses_budget, todo.record.retries) == (cause, False, 0)


def test_its_place_is_freed_though_a_sidecar_runs_on() -> None:
    stopped = trains(2, transition=transition(TransitionKind.RECOVERY, uses_budget=True))
    todo = decided([(with_sidecar(), None), (pod(1), ready(1))], stopped)
    assert [(a.name, a.force) for a in acts(todo, DeletePod)] == [("job-workers-0", False)]
    assert pid(0, 1) in [a.pod for a in acts(todo, CreatePod)]


def test_what_ignores_its_end_does_not_hold_the_place_for_the_length_of_a_drain() -> None:
    stopped = trains(2, transition=transition(TransitionKind.RECOVERY, uses_budget=True))
    beside = decided([(with_sidecar(), None), (pod(1), ready(1))], stopped)
    shell = decided([(pod(0), REFUSES), (pod(1), ready(1))], stopped)
    for todo in (beside, shell):
        assert [(a.name, a.force, a.grace_s) for a in acts(todo, DeletePod)] == [(pod(0).name, False, 30)]
    lost = decided([(pod(0), silent(20)), (pod(1), ready(1))], stopped, NOT_READY)
    assert [a.grace_s for a in acts(lost, DeletePod)] == [None], "its agent may yet save something"


def test_its_log_is_kept_where_nothing_of_the_pod_runs_any_more() -> None:
    stopped = trains(2, transition=transition(TransitionKind.RECOVERY, uses_budget=True))
    todo = decided([(with_sidecar(containers_ended=True), None), (pod(1), ready(1))], stopped)
    assert not acts(todo, DeletePod)


def test_its_quota_is_used_until_its_pod_is_gone() -> None:
    found = assess(observed(job(trains()), [(with_sidecar(), running()), (pod(1), running())])).by_id[pid(0)]
    assert (found.health, found.cannot_run_again, found.may_still_run) == (Health.ENDED, False, True)
    stopped = trains(2, transition=transition(TransitionKind.RECOVERY, uses_budget=True), queue="gpus")
    workloads = tuple(
        ObservedWorkload(
            name=f"workload-{number}", uid=f"uid-{number}", number=number, counts=(("workers", 1),), created_at=LONG_AGO,
            queue="gpus", reserved=True, admitted=True,
        )
        for number in (0, 1)
    )  # fmt: skip
    pairs = [(with_sidecar(), None), (pod(1), ready(1))]
    todo = plan(observed(job(stopped, policy(1, 4), queue="gpus"), pairs, workloads=workloads))
    assert acts(todo, DeletePod)
    assert not acts(todo, CreatePod), "both pods together would be more than was granted"


@pytest.mark.parametrize(
    ("container", "mine", "ends"),
    [
        pytest.param(FINISHED, COMPLETED, "", id="exit code 0 after it completed: the others are waited for"),
        pytest.param(CRASHED, COMPLETED, "PodFailed", id="a failure after it completed is one"),
        pytest.param(FINISHED, running(), "PodFailed", id="exit code 0 before it completed is a failure: a script hid it"),
        pytest.param(FINISHED, agent(AgentState.COMPLETED, 0), "PodFailed", id="what completed was an older generation"),
        pytest.param(FINISHED, None, "PodFailed", id="nobody heard that it completed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("phase", ["Running", "terminal"])
def test_a_container_that_ends_after_its_workers_completed(
    phase: str, container: ObservedContainer, mine: ObservedAgent | None, ends: str
) -> None:
    first = with_sidecar(container)
    if phase == "terminal":
        first = replace(first, phase="Succeeded" if container is FINISHED else "Failed", containers_ended=True)
    begun = decided([(first, mine), (pod(1), running())]).record.transition
    assert (begun.cause if begun is not None else "") == ends


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_a_job_whose_containers_end_after_they_completed_is_completed(phase: str) -> None:
    first = replace(with_sidecar(FINISHED), phase=phase)
    assert decided([(first, COMPLETED), (pod(1), COMPLETED)]).record.outcome == "Completed"


# -- a shell that stays: the container runs, and nobody listens in it any more


REFUSES = silent(20, connection_refused=True)


@pytest.mark.parametrize("others", [0, 1], ids=["one replica", "two"])
def test_an_agent_whose_port_is_refused_has_ended(others: int) -> None:
    todo = decided([(pod(0), REFUSES), *((pod(n), running()) for n in range(1, others + 1))])
    begun = todo.record.transition
    assert begun is not None
    assert (begun.cause, begun.uses_budget, todo.record.retries) == ("AgentEnded", True, 1)
    assert todo.record.lost == (pid(0),)


def test_an_agent_whose_port_is_refused_on_a_lost_node_is_the_fault_of_that() -> None:
    todo = decided([(pod(0), REFUSES), (pod(1), running())], None, NOT_READY)
    assert todo.record.transition is not None
    assert (todo.record.transition.cause, todo.record.retries) == ("NodeLost", 0)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        pytest.param(silent(5, connection_refused=True), running(), id="just now: it may be coming back"),
        pytest.param(
            ObservedAgent(trying_since=NOW - seconds(20), connection_refused=True),
            ObservedAgent(trying_since=NOW - seconds(20), connection_refused=True),
            id="a new operator that nobody ever answered, whom a firewall may refuse",
        ),
    ],
)  # fmt: skip
def test_a_refused_connection_alone_proves_nothing(mine: ObservedAgent, other: ObservedAgent) -> None:
    assert decided([(pod(0), mine), (pod(1), other)]).record.transition is None


def test_the_workers_of_others_that_failed_first_do_not_hide_whose_agent_ended() -> None:
    begun = trains(2, transition=transition(TransitionKind.RECOVERY, uses_budget=True), retries=1)
    todo = decided([(pod(0), REFUSES), (pod(1), faulted())], begun)
    assert todo.record.retries == 1, "its own failure is no reason to give the retry back"


@pytest.mark.parametrize(
    ("first", "mine", "cause"),
    [
        pytest.param(with_sidecar(), running(), "PodFailed", id="its container ended"),
        pytest.param(pod(0, phase="Failed", problem=TROUBLE), None, "PodFailed", id="its pod ended"),
        pytest.param(pod(0), REFUSES, "AgentEnded", id="its agent ended"),
        pytest.param(with_sidecar(HELD_BACK), running(), "ContainerRestarted", id="its container is started again"),
        pytest.param(pod(0), ready(0), "AgentRestarted", id="its agent has begun anew"),
    ],
)
def test_the_agent_that_ended_is_the_root_cause_though_the_workers_of_others_failed_first(
    first: ObservedPod, mine: ObservedAgent | None, cause: str
) -> None:
    """They fail within a second, because their connections broke; what their kubelet says comes later."""
    begun = decided([(pod(0), running()), (pod(1), faulted())])
    assert [c.pod for c in begun.record.faulty_replicas] == [pid(1)]
    todo = decided([(first, mine), (pod(1), faulted())], begun.record)
    assert todo.record.transition is not None
    assert (todo.record.transition.cause, todo.record.transition.uses_budget) == (cause, True)
    assert ([c.pod for c in todo.record.faulty_replicas], todo.record.retries) == ([pid(0)], 1)
    again = decided([(first, mine), (pod(1), faulted())], todo.record)
    assert again.record == todo.record


@pytest.mark.parametrize("mine", [(pod(0), REFUSES), (with_sidecar(), running())], ids=["a shell", "a sidecar"])
def test_the_retry_stays_booked_while_the_others_are_stopped(mine: tuple[ObservedPod, ObservedAgent]) -> None:
    begun = decided([mine, (pod(1), running())])
    later = decided([mine, (pod(1), agent(AgentState.STOPPING))], begun.record)
    assert (later.record.retries, later.record.transition) == (1, begun.record.transition)
    gone = decided([(pod(1), ready(1))], later.record)
    assert gone.record.retries == 1, "its pod was deleted for that, and by nobody else"


def test_what_already_ended_by_itself_is_not_blamed_on_another_one() -> None:
    begun = decided([(with_sidecar(), running()), (pod(1), running())])
    todo = decided([(with_sidecar(), running()), (pod(1, container=CRASHED, problem="x"), running())], begun.record)
    assert [c.pod for c in todo.record.faulty_replicas] == [pid(0)]


# -- a container that its kubelet starts again


def test_a_container_that_is_started_again_is_a_failure_once_and_keeps_its_pod() -> None:
    begun = decided([(with_sidecar(HELD_BACK), running()), (pod(1), running())])
    assert begun.record.transition is not None
    assert (begun.record.transition.cause, begun.record.retries) == ("ContainerRestarted", 1)
    assert begun.record.lost == ()
    stopped = decided([(with_sidecar(HELD_BACK), running()), (pod(1), ready(1))], begun.record)
    assert (stopped.record.retries, acts(stopped, DeletePod)) == (1, []), "nobody waits for workers that are gone"
    back = decided([(with_sidecar(RESTARTED), ready(0)), (pod(1), ready(1))], stopped.record)
    assert (back.record.generation, back.record.members) == (2, (pid(0), pid(1)))
    assert len(acts(back, StartWorkers)) == 2


def test_an_agent_that_began_anew_while_its_generation_ran_is_a_failure() -> None:
    todo = decided([(pod(0, container=RESTARTED), ready(0)), (pod(1), running())])
    begun = todo.record.transition
    assert begun is not None
    assert (begun.cause, begun.uses_budget, todo.record.retries) == ("AgentRestarted", True, 1)
    assert "has restarted" in begun.message


def test_an_answer_from_before_the_generation_ran_is_no_news() -> None:
    just_settled = trains(2, running_since=NOW - seconds(2))
    todo = decided([(pod(0), ready(0)), (pod(1), running())], just_settled)
    assert todo.record.transition is None
    assert todo.wake_at is not None
    assert todo.wake_at <= NOW + seconds(15)


def test_an_agent_that_takes_its_first_start_has_not_begun_anew() -> None:
    starting = trains(2, running_since=None, generation_began_at=NOW - seconds(5))
    assert decided([(pod(0), ready(0)), (pod(1), running())], starting).record.transition is None


def test_an_agent_that_was_started_again_is_awaited_like_a_new_one() -> None:
    record = trains(2, transition=transition(TransitionKind.RECOVERY, uses_budget=True))
    unheard = ObservedAgent(trying_since=NOW - seconds(20), connection_refused=True)
    snapshot = observed(job(record), [(pod(0, container=RESTARTED), unheard), (pod(1), ready(1))])
    assert assess(snapshot).by_id[pid(0)].health is Health.PENDING


def test_the_core_asks_for_nothing_when_it_looks_a_second_time() -> None:
    record = trains(2, running_since=LONG_AGO)
    first = decided([(with_sidecar(), running()), (pod(1), running())], record)
    again = decided([(with_sidecar(), running()), (pod(1), ready(1))], first.record)
    assert (again.record.restarts, again.record.retries) == (1, 1)
