"""An agent that does not accept the operator's token: what the user is told, in plain words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.nonempty import every
from tests.unit.core.builders import NOW, agent, job, observed, pod, running, seconds, trains

from elastipod_operator.core.plan import plan
from elastipod_operator.core.snapshot import ObservedAgent

DENIED = ObservedAgent(trying_since=NOW - seconds(1), authentication_failed=True)


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        pytest.param("s-1", ("Secret s-1 does not hold", "delete that Secret and the pod"), id="a changed Secret"),
        pytest.param(
            "",
            ("not the operator's", "remove ELASTIPOD_KEY and ELASTIPOD_TOKEN from the template"),
            id="the user's own token",
        ),
    ],
)
def test_it_is_said_at_once_with_what_to_do(secret: str, words: tuple[str, ...]) -> None:
    pods = [(pod(0, key_secret=secret), DENIED), (pod(1, key_secret=secret), DENIED)]
    made = plan(observed(job(), pods))
    told = next(c for c in made.conditions if c.type == "PodsReady")
    assert (told.reason, told.status) == ("TokenRefused", False)
    assert "agent of pod job-workers-0 (and of 1 more pod)" in told.message
    assert every(word in told.message for word in words)
    assert [note.reason for note in made.events if note.is_warning] == ["TokenRefused"]
    again = plan(observed(job(made.record, conditions=made.conditions), pods))
    assert [note for note in again.events if note.is_warning] == [], "said once"


def test_a_job_that_trains_goes_on_when_no_agent_knows_the_operator_any_more() -> None:
    long_silent = replace(agent(), last_answer=NOW - seconds(60), authentication_failed=True)
    pods = [(pod(0, key_secret="s"), long_silent), (pod(1, key_secret="s"), long_silent)]
    made = plan(observed(job(trains(2)), pods))
    assert next(c for c in made.conditions if c.type == "PodsReady").reason == "TokenRefused"
    assert made.conditions[-1].type == "Running"
    assert made.record.transition is None


def test_nothing_is_said_where_all_is_well() -> None:
    made = plan(observed(job(trains(2)), [(pod(0), running()), (pod(1), running())]))
    assert [c.type for c in made.conditions] == ["Created", "PodsRunning", "Scaling", "Running"]
