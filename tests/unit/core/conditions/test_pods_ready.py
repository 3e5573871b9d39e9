"""Condition PodsReady: what keeps pods from training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    seconds,
    silent,
    trains,
)
from tests.unit.core.conditions.reports import (
    STARTING,
    STARTS,
    condition,
    report,
    sentence,
    state,
    told,
    unschedulable,
    waits,
)

from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.snapshot import Condition, ObservedAgent, Policy, Snapshot


@pytest.mark.parametrize(
    ("number", "whose"),
    [
        pytest.param(1, f"the agent of pod {pod(0).name} and the operator do not accept each other", id="one"),
        pytest.param(
            3,
            f"the agent of pod {pod(0).name} (and of 2 more pods) and the operator do not accept each other",
            id="three",
        ),
    ],
)
def test_agents_that_do_not_know_the_operator_are_counted(number: int, whose: str) -> None:
    pods = [(pod(n), ready(authentication_failed=n < number)) for n in (3, 2, 1, 0)]
    assert sentence(observed(job(STARTS), pods), "PodsReady").startswith(whose)


@pytest.mark.parametrize(
    ("pods", "changes", "reason"),
    [
        pytest.param([(pod(0), silent(20)), (pod(1), silent(20))], {"pod_creation_error": "quota"}, "OperatorCutOff", id="nobody answers"),
        pytest.param([(pod(0), ready(authentication_failed=True)), (pod(1), silent(20))], {"pod_creation_error": "quota"},
                     "TokenRefused", id="one does not know us"),
        pytest.param([waits(0, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED)], {"pod_creation_error": "quota"}, "PodsRefused",
                     id="a refusal"),
        pytest.param([waits(0, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED)], {}, "ImagePullFailed", id="an image"),
        pytest.param([waits(0, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED, kill_at=NOW), (pod(1), ready())], {}, None,
                     id="not of a pod that goes"),
        pytest.param([(pod(0, phase="Failed", problem="x", problem_reason=Reason.CONTAINER_ENDED), None)], {}, "ContainerEnded",
                     id="an end"),
        pytest.param([waits(0, problem="x", problem_reason=Reason.UNSCHEDULABLE), (pod(1), ready())], {}, None, id="no room yet"),
        pytest.param([(pod(1, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED), ready()), (pod(0), ready())], {}, None,
                     id="nor what is over"),
        pytest.param([(pod(0), ObservedAgent(trying_since=LONG_AGO)), waits(1, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED)], {},
                     "AgentNotAnswering", id="the first pod counts"),
        pytest.param([waits(1, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED), (pod(0), ObservedAgent(trying_since=LONG_AGO))], {},
                     "AgentNotAnswering", id="in whatever order they are seen"),
        pytest.param([waits(0), (pod(1), ObservedAgent(trying_since=NOW))], {}, None, id="nothing yet"),
    ],
)  # fmt: skip
def test_what_keeps_pods_from_training(pods: list[Seen], changes: dict[str, Any], reason: str | None) -> None:
    found = [r for kind, _, r in told(observed(job(STARTS), pods, **changes)) if kind == "PodsReady"]
    assert found == ([reason] if reason else [])


@pytest.mark.parametrize(
    ("failures", "wishes", "says"),
    [
        pytest.param(0, policy(), "it ended", id="the first one is replaced at once"),
        pytest.param(3, policy(), "it ended; after repeated failures, its replacement waits until 12:00:40 UTC", id="not the fourth"),
        pytest.param(3, policy(suspend=True), "it ended", id="none is wanted now"),
    ],
)  # fmt: skip
def test_until_when_the_replacement_of_a_pod_that_failed_again_waits(failures: int, wishes: Policy, says: str) -> None:
    problem: dict[str, Any] = {"problem": "it ended", "problem_reason": Reason.CONTAINER_ENDED}
    ended = (pod(pid(0, 9), phase="Failed", created_at=NOW, failures_before=failures, **problem), None)
    assert sentence(observed(job(STARTS, wishes), [ended, (pod(1), ready())]), "PodsReady") == says


PULLING = {"problem": "image x cannot be pulled", "problem_reason": Reason.IMAGE_PULL_FAILED}
CANNOT_START = {"problem": "no secret y", "problem_reason": Reason.CONTAINER_CANNOT_START}


@pytest.mark.parametrize("problem", [PULLING, CANNOT_START], ids=["an image", "a container"])
@pytest.mark.parametrize(
    ("since_s", "is_told"), [pytest.param(29.9, False, id="it may heal"), pytest.param(30, True, id="it lasts")]
)
def test_trouble_that_may_heal_is_told_when_it_lasts(problem: dict[str, str], since_s: float, is_told: bool) -> None:
    snapshot = observed(job(STARTS), [waits(0, problem_since=NOW - seconds(since_s), **problem), waits(1)])
    found = report(snapshot)
    reasons = [c.reason for c in found.conditions if c.type == "PodsReady"]
    assert reasons == ([problem["problem_reason"]] if is_told else [])
    assert [note.reason for note in found.events] == reasons
    assert found.wake_at == (None if is_told else NOW + seconds(0.1)), "nothing else tells that it lasts"
    assert problem["problem"] in found.conditions[-1].message, "what is waited for is said at once"


UNKNOWN_TO_ALL = {"problem": "no scheduler has considered it", "problem_reason": Reason.NO_SCHEDULER}


@pytest.mark.parametrize(
    ("others", "wait_s"),
    [
        pytest.param([], None, id="no other pod"),
        pytest.param([waits(1, problem_since=NOW - seconds(40), **UNKNOWN_TO_ALL)], None, id="none was considered"),
        pytest.param([waits(1, considered_at=NOW - seconds(31))], None, id="it has stopped"),
        pytest.param([waits(1, considered_at=NOW - seconds(31)), waits(2, considered_at=NOW - seconds(4))], 26, id="it is slow"),
        pytest.param([(pod(pid(0, spec="more"), started=False, considered_at=NOW), None)], None, id="another spec names another one"),
        pytest.param([(pod(1, phase="Failed", considered_at=NOW - seconds(4)), None), (pod(pid(1, 1), started=False), None)], 26,
                     id="the pod that it considered was replaced since"),
    ],
)  # fmt: skip
def test_a_scheduler_that_considers_one_pod_after_the_other_is_not_missing(
    others: list[Seen], wait_s: float | None
) -> None:
    snapshot = observed(job(STARTS), [waits(0, problem_since=NOW - seconds(40), **UNKNOWN_TO_ALL), *others])
    found = report(snapshot)
    reasons = [c.reason for c in found.conditions if c.type == "PodsReady"]
    assert reasons == (["NoScheduler"] if wait_s is None else [])
    assert found.wake_at == (None if wait_s is None else NOW + seconds(wait_s))


def test_a_pod_is_waited_for_however_long_ago_its_scheduler_considered_another() -> None:
    pods = [waits(0, problem_since=NOW - seconds(10), **UNKNOWN_TO_ALL), waits(1, considered_at=LONG_AGO)]
    found = report(observed(job(STARTS), pods))
    assert "PodsReady" not in [c.type for c in found.conditions]
    assert found.wake_at == NOW + seconds(20)


def test_an_image_is_missing_whatever_the_scheduler_does_meanwhile() -> None:
    pods = [waits(0, problem_since=NOW - seconds(30), **PULLING), waits(1, considered_at=NOW)]
    found = report(observed(job(STARTS), pods)).conditions
    assert [c.reason for c in found if c.type == "PodsReady"] == [Reason.IMAGE_PULL_FAILED]


def test_the_container_in_which_no_agent_answers_is_that_of_the_pod() -> None:
    """The job may name another one by now."""
    pods: list[Seen] = [(pod(0, agent_container="side"), ObservedAgent(trying_since=LONG_AGO)), waits(1)]
    assert sentence(observed(job(STARTS), pods), "PodsReady").startswith(f"container side of pod {pod(0).name} runs")


def test_trouble_that_was_told_before_is_told_by_a_new_operator_too() -> None:
    before = (Condition("PodsReady", False, Reason.IMAGE_PULL_FAILED, "image x cannot be pulled", LONG_AGO),)
    found = report(observed(job(STARTS, conditions=before), [waits(0, problem_since=NOW, **PULLING)]))
    assert [c.reason for c in found.conditions if c.type == "PodsReady"] == ["ImagePullFailed"]
    assert found.events == ()
    other = report(observed(job(STARTS, conditions=before), [waits(0, problem_since=NOW, **CANNOT_START)]))
    assert [c.reason for c in other.conditions if c.type == "PodsReady"] == []


def test_the_first_of_several_troubles_that_will_have_lasted_is_waited_for() -> None:
    pods = [waits(n, problem_since=NOW - seconds(age), **PULLING) for n, age in enumerate((5, 20, 10))]
    assert report(observed(job(STARTS), pods)).wake_at == NOW + seconds(10)
    ended = (pod(3, phase="Failed", problem="it ended", problem_reason=Reason.CONTAINER_ENDED, problem_since=NOW), None)
    found = report(observed(job(STARTS), [*pods, ended]))
    assert [c.reason for c in found.conditions if c.type == "PodsReady"] == ["ContainerEnded"], "an end does not heal"
    assert found.wake_at == NOW + seconds(10)


@pytest.mark.parametrize(
    ("snapshot", "reason", "words"),
    [
        pytest.param(observed(job(STARTING), [unschedulable(0, problem="image x cannot be pulled",
                                                             problem_reason=Reason.IMAGE_PULL_FAILED)]),
                     "ImagePullFailed", "image x", id="an image"),
        pytest.param(observed(job(STARTING), [(pod(0), ObservedAgent(trying_since=LONG_AGO))]), "AgentNotAnswering", "hyperpodrun",
                     id="a container without an agent"),
        pytest.param(observed(job(STARTING), pod_creation_error="2 pods were refused: quota"), "PodsRefused", "quota", id="a quota"),
        pytest.param(observed(job(trains()), [(pod(0), silent(99)), (pod(1), silent(99))]), "OperatorCutOff", "training continues",
                     id="an operator that is cut off"),
    ],
)  # fmt: skip
def test_pods_ready_says_what_keeps_them_from_training_once(snapshot: Snapshot, reason: str, words: str) -> None:
    todo = plan(snapshot)
    told = condition(todo, "PodsReady")
    assert told.reason == reason
    assert words in told.message
    assert reason in [n.reason for n in todo.events]
    again = replace(snapshot, job=replace(snapshot.job, conditions=todo.conditions))
    assert reason not in [n.reason for n in plan(again).events]


def test_an_operator_that_just_began_does_not_say_that_it_is_cut_off() -> None:
    unheard = ObservedAgent(trying_since=NOW)
    todo = plan(observed(job(trains()), [(pod(0), unheard), (pod(1), unheard)]))
    assert not [c for c in todo.conditions if c.reason == "OperatorCutOff"]
    assert state(todo) == ("Running", True, "Training")


@pytest.mark.parametrize(
    ("silent_s", "end"),
    [
        pytest.param(20, "; if none answers by 12:29:40 UTC, the replicas are replaced", id="for a while"),
        pytest.param(1800, "until an agent answers", id="for so long that they are given up"),
    ],
)
def test_it_is_told_when_silent_replicas_are_replaced(silent_s: float, end: str) -> None:
    seen = [(pod(n), silent(silent_s)) for n in range(2)]
    assert sentence(observed(job(trains()), seen), "PodsReady").endswith(end)
