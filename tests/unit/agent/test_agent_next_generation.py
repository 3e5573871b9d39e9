"""An agent that begins the next generation by itself once its workers have drained, as the /stop of the drain has said."""

from __future__ import annotations

from typing import Any

import pytest
from tests.agent_client import until
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.kept_workers_job import KEEP, Job
from tests.unit.agent.test_agent_kept_workers import STANDING

QUIET = ("replicated", "quiet")
DRAIN: dict[str, Any] = {"restart_mode": KEEP, "leaves": False}
NEXT: dict[str, Any] = {
    "rank": 1, "nnodes": 2, "faultCount": 1, "generation": 2, "master_addr": "127.0.0.1", "master_port": 20000,
}  # fmt: skip


@pytest.fixture
def job(agent: AgentInProcess) -> Job:
    return Job(agent)


def in_generation(job: Job, generation: int) -> dict[int, int]:
    """Wait until both workers are in a generation; gives their pids by rank."""
    until(lambda: len(job.pids(generation)) == 2, f"both ranks in run {generation}:\n{job.agent.printed()}")
    return job.pids(generation)


def is_ready_again(job: Job) -> bool:
    """Wait until the agent has drained and is ready: it begins nothing by itself."""
    seen = job.agent.until("ready")
    return (seen["generation"], seen["drained"], seen["next_generation"]) == (1, True, None)


@pytest.mark.parametrize("options", [(), STANDING], ids=["a plain start", "--inprocess-restart"])
def test_drained_workers_go_on_with_the_generation_that_the_stop_has_named(job: Job, options: tuple[str, ...]) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        assert "next" in job.agent.status()["features"]
        assert job.agent.drain(1, next=NEXT, **DRAIN)[0] == 200
        second = in_generation(job, 2)
        assert {rank - 2: pid for rank, pid in second.items()} == first, "the ranks are the new ones"
        seen = job.agent.until("running")
        assert (seen["generation"], seen["assigned_rank"], seen["next_generation"]) == (2, "1", None)
        assert job.agent.start(2, rank=1, nnodes=2) == (200, None), "a /start that comes as well is a repetition"
        assert in_generation(job, 2) == second

    job.run(scenario, *QUIET, options=options)


def held(job: Job) -> dict[str, Any]:
    """Start a run, and begin a drain while its ranks are in a long step; gives the status."""
    job.start(1)
    job.announced()
    (job.agent.folder / "held").touch()
    for rank in (0, 1):
        job.order(rank, "long")
    job.agent.until_printed("a long step", 2)
    assert job.agent.drain(1, next=NEXT, **DRAIN)[0] == 200
    return job.agent.status()


def test_a_later_stop_withdraws_it(job: Job) -> None:
    def scenario() -> None:
        assert held(job)["next_generation"] == 2
        assert job.agent.drain(1, **DRAIN) == (200, None)
        assert job.agent.status()["next_generation"] is None
        (job.agent.folder / "held").unlink()
        assert is_ready_again(job)

    job.run(scenario, *QUIET)


def test_a_later_stop_names_another_one(job: Job) -> None:
    def scenario() -> None:
        held(job)
        assert job.agent.drain(1, next=NEXT | {"generation": 3, "faultCount": 2, "rank": 0}, **DRAIN)[0] == 200
        assert job.agent.status()["next_generation"] == 3
        (job.agent.folder / "held").unlink()
        assert set(in_generation(job, 3)) == {0, 1}

    job.run(scenario, *QUIET)


def test_a_hard_stop_withdraws_it(job: Job) -> None:
    def scenario() -> None:
        held(job)
        assert job.agent.stop(1, restart_mode=KEEP) == (200, None)
        assert job.agent.status()["next_generation"] is None
        (job.agent.folder / "held").unlink()
        seen = job.agent.until("ready")
        assert (seen["generation"], seen["drained"]) == (1, False)

    job.run(scenario, *QUIET)


def test_a_generation_that_was_stopped_before_is_not_begun(job: Job) -> None:
    def scenario() -> None:
        held(job)
        assert job.agent.stop(2, is_graceful=True, timeout=60)[0] == 200
        assert job.agent.drain(1, next=NEXT, **DRAIN)[0] == 200
        (job.agent.folder / "held").unlink()
        assert is_ready_again(job)

    job.run(scenario, *QUIET)


@pytest.mark.parametrize(
    "script_args",
    [
        pytest.param(("replicated",), id="they have left data that all need, which the operator hands out"),
        pytest.param((*QUIET, "exit"), id="they have ended"),
    ],
)
def test_an_agent_waits_for_the_operator_if_its_workers_cannot_go_on_alone(
    job: Job, script_args: tuple[str, ...]
) -> None:
    def scenario() -> None:
        job.start(1)
        job.announced()
        assert job.agent.drain(1, next=NEXT, **DRAIN)[0] == 200
        seen = job.agent.until("ready")
        assert (seen["generation"], seen["next_generation"]) == (1, None)

    job.run(scenario, *script_args)


def test_a_start_that_cannot_be_used_is_refused_with_its_field(job: Job) -> None:
    def scenario() -> None:
        job.start(1)
        code, body = job.agent.drain(1, next=NEXT | {"rank": 2}, **DRAIN)
        assert code == 422
        assert "next.rank" in str(body)
        assert job.agent.status()["status"] == "running"

    job.run(scenario, *QUIET)


def test_workers_that_come_back_after_a_fault_wait_for_the_operator(job: Job) -> None:
    """They have acknowledged the event, and may lack what others were to hand over to them."""

    def scenario() -> None:
        job.start(1)
        job.announced()
        assert job.agent.drain(1, next=NEXT, **DRAIN)[0] == 200
        assert is_ready_again(job)

    job.run(scenario, *QUIET, "lost")
