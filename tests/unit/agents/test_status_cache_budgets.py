"""What agents may make the operator hold: bounded for each agent, each job and all, told when it is too much, never cut into pieces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import NOW
from tests.unit.core.test_bounds import MIB, kept_bytes

from elastipod_operator.agents import status_cache as status_cache
from elastipod_operator.agents.budgets import ByteBudget
from elastipod_operator.agents.commands import _serialized
from elastipod_operator.agents.encoded_json import EncodedJson
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status import MAX_PROGRESS_BYTES, MAX_WORKER_DATA_BYTES, InvalidStatus, parse_status
from elastipod_operator.agents.status_cache import MAX_DATA, MAX_JOB_DATA, MAX_JOB_TEXTS, AgentStatusCache
from elastipod_operator.agents.status_requests import open_session
from elastipod_operator.core.snapshot import ObservedAgent

PLAIN = {"status": "running", "protocol": 1, "generation": 3}


@pytest.fixture
async def statuses(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AgentStatusCache]:
    """A status cache that asks nobody: its answers are given to it."""

    async def ask_nobody(*_: object) -> None:
        return None

    monkeypatch.setattr(AgentStatusCache, "_follow", ask_nobody)
    async with open_session() as session:
        made = AgentStatusCache(session, lambda _: None)
        yield made
        await made.close()


def tell(statuses: AgentStatusCache, pod: str, job: str = "job", **said: Any) -> ObservedAgent:
    """Have an agent answer."""
    statuses.watch(pod, Address(job, "10.0.0.1", 8080))
    watched = statuses._polled[pod]
    statuses._take(watched, parse_status({**PLAIN, **said}, watched.fact, NOW))
    return statuses.fact(pod)


def test_what_workers_leave_is_taken_whole_or_not_at_all() -> None:
    fits = [{"rank": 0, "data": "x" * (MAX_WORKER_DATA_BYTES - 30)}]
    taken = parse_status({**PLAIN, "worker_data": fits}, ObservedAgent(), NOW)
    assert (json.loads(f"[{taken.worker_data}]"), taken.fact.refused_answer) == (fits, "")
    refused = parse_status(
        {**PLAIN, "worker_data": [{"rank": 0, "data": "x" * MAX_WORKER_DATA_BYTES}]}, ObservedAgent(), NOW
    )
    assert refused.worker_data == ""
    assert f"the limit is {MAX_WORKER_DATA_BYTES}" in refused.fact.refused_answer


def test_progress_that_is_too_large_is_told() -> None:
    refused = parse_status({**PLAIN, "progress": {"a": "x" * MAX_PROGRESS_BYTES}}, ObservedAgent(), NOW)
    assert (refused.progress, "progress" in refused.fact.refused_answer) == ("", True)


async def test_nobody_is_told_a_part_of_what_workers_left(statuses: AgentStatusCache) -> None:
    for pod in "ab":
        tell(statuses, pod, worker_data=[{"rank": pod}])
    assert statuses.worker_data("ab") == EncodedJson('[{"rank": "a"}, {"rank": "b"}]')
    tell(statuses, "b", worker_data=["x" * MAX_WORKER_DATA_BYTES])
    assert statuses.worker_data("ab") is None
    tell(statuses, "b")
    assert statuses.worker_data("ab") == EncodedJson('[{"rank": "a"}]')


async def test_twenty_pods_of_answers_as_large_as_they_may_be_take_little_memory(statuses: AgentStatusCache) -> None:
    """As objects, each of these answers takes some twenty times as many bytes as it has."""

    def take() -> object:
        return [
            tell(statuses, f"pod-{n}", worker_data=[[]] * 16_000, progress={str(i): {} for i in range(1000)})
            for n in range(20)
        ]

    assert kept_bytes(take) < 3 * MIB


async def test_the_agents_of_one_job_together_have_a_bound_that_is_told(statuses: AgentStatusCache) -> None:
    large = ["x" * (MAX_WORKER_DATA_BYTES - 10)]
    fitting = MAX_JOB_DATA // MAX_WORKER_DATA_BYTES
    facts = [tell(statuses, f"pod-{n}", worker_data=large) for n in range(fitting + 2)]
    assert [bool(fact.refused_answer) for fact in facts] == [False] * fitting + [True] * 2
    assert str(MAX_JOB_DATA) in facts[-1].refused_answer
    assert tell(statuses, "other", "small", worker_data=large).refused_answer == "", "another job has its own"
    for n in range(fitting + 2):
        statuses.forget(f"pod-{n}")
    assert tell(statuses, "pod-0", worker_data=large).refused_answer == "", "what is forgotten holds nothing"
    assert statuses._data.held("job") == len(json.dumps(large)) - 2


async def test_what_all_jobs_hold_together_is_bounded_and_takes_nothing_from_small_ones(
    statuses: AgentStatusCache,
) -> None:
    large = ["x" * (MAX_WORKER_DATA_BYTES - 10)]
    number = MAX_DATA // MAX_WORKER_DATA_BYTES + 50
    refused = [
        bool(tell(statuses, f"pod-{n}", f"job-{n % 10}", worker_data=large).refused_answer) for n in range(number)
    ]
    assert any(refused)
    assert statuses._data.total <= MAX_DATA + 10 * status_cache.FREE_DATA
    assert tell(statuses, "other", "small", worker_data=large).refused_answer == ""


async def test_the_messages_of_failures_are_cut_once_a_job_has_many(statuses: AgentStatusCache) -> None:
    failure = {"global_rank": 0, "exitcode": 1, "message": "\N{SNOWMAN}" * 3000 + "ValueError: boom"}
    number = MAX_JOB_TEXTS // 6000 + 50
    facts = [tell(statuses, f"pod-{n}", failure=failure) for n in range(number)]
    assert facts[0].failure is not None
    assert facts[-1].failure is not None
    assert len(facts[0].failure.message) > 3000 > len(facts[-1].failure.message)
    assert facts[-1].failure.message.endswith("ValueError: boom")
    assert statuses._texts.held("job") <= MAX_JOB_TEXTS


async def test_an_answer_that_cannot_be_read_is_told_of_too(statuses: AgentStatusCache) -> None:
    tell(statuses, "a")
    statuses._note_failure(statuses._polled["a"], InvalidStatus("the agent's /status is larger than 1048576 bytes"))
    assert statuses.fact("a").refused_answer == "the agent's /status is larger than 1048576 bytes"
    assert tell(statuses, "a").refused_answer == ""


def test_a_budget_counts_by_job_and_over_all() -> None:
    budget = ByteBudget(per_job=10, in_all=15, free=3)
    assert (budget.change("a", 10), budget.change("a", 1)) == (True, False)
    assert (budget.change("b", 5), budget.change("b", 1)) == (True, False)
    assert budget.change("c", 3), "so much each job may have"
    assert not budget.change("c", 1)
    assert budget.change("a", -10)
    assert (budget.total, budget.held("a"), budget.held("c")) == (8, 0, 3)
    assert budget.change("c", 1)


def test_what_is_json_already_is_handed_on_as_it_is() -> None:
    shared = EncodedJson('[{"rank": 0}, 1e3]')
    parts: dict[int, str] = {}
    for rank in range(3):
        body = {"rank": rank, "worker_data": shared, "progress": {}}
        assert json.loads(_serialized(body, parts)) == {
            "rank": rank,
            "worker_data": [{"rank": 0}, 1000.0],
            "progress": {},
        }


def test_an_excess_is_news() -> None:
    fact = ObservedAgent()
    assert status_cache._stable_part(fact) != status_cache._stable_part(replace(fact, refused_answer="too much"))
