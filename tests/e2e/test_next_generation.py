"""A planned change that its operator has decided and told: real agents and workers carry it out, whatever becomes of the operator."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.agent_client import until
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.core_operator import CoreOperator
from tests.e2e.test_drain_without_successors import ENV, SCRIPT, STEP
from tests.patience import PATIENCE_S
from tests.unit.core.builders import pid, policy, seconds

from elastipod_operator.core.record import Depth


@pytest.fixture
def job(run_agent: RunAgent, tmp_path: Path) -> Job:
    return Job(run_agent, tmp_path)


class Job:
    """Two pods that train, and a third one that may join them. holds: files that hold up the workers of a pod before their next step."""

    def __init__(self, run_agent: RunAgent, folder: Path) -> None:
        self.holds = [folder / f"hold-{ordinal}" for ordinal in range(3)]
        self.agents = [
            run_agent(SCRIPT, script_args=(str(folder / "saved"), str(hold)), env=ENV) for hold in self.holds
        ]
        wishes = policy(2, 3, scaling_timeout=seconds(0))
        self.operator = CoreOperator(self.agents[:2], wishes, generation=random.randrange(100, 800))
        self.operator.act_until(
            lambda: self.operator.record is not None and self.made(self.generation, 0), "two pods that train"
        )

    @property
    def generation(self) -> int:
        assert self.operator.record is not None
        return self.operator.record.generation

    def made(self, generation: int, ordinal: int) -> list[tuple[int, int]]:
        """Give the process and the step of each step that a pod has made in a generation."""
        found = [tuple(map(int, match)) for match in STEP.findall(self.agents[ordinal].printed())]
        return [(process, step) for process, step, its in found if its == generation]

    def tells_of_growth(self) -> int:
        """Let the operator decide to take the third pod, and tell the agents; gives the generation that follows. It does nothing then."""
        present = self.generation
        self.operator.add(self.agents[2])
        self.operator.act_until(lambda: self.calls(present, "/stop") >= {0, 1}, "a /stop for both")
        assert self.operator.record is not None
        assert self.operator.record.transition is not None
        following = self.operator.record.transition.next_generation
        assert following is not None
        assert following.members == (pid(0), pid(1), pid(2))
        return following.generation

    def calls(self, generation: int, path: str) -> set[int]:
        """Give the pods that got a call of a generation."""
        return {n for n, called, body in self.operator.calls if called == path and body.get("generation") == generation}


def test_a_growth_goes_on_without_the_operator_and_is_taken_over_when_it_is_back(job: Job) -> None:
    following = job.tells_of_growth()
    until(
        lambda: all(job.made(following, n) for n in range(3)), "steps of all three, although nobody decides", PATIENCE_S
    )
    assert job.calls(following, "/start") == {2}, "the others have begun by themselves"
    before = job.made(job.generation, 0)
    assert job.made(following, 0)[0] == (before[-1][0], before[-1][1] + 1), (
        "the same process goes on, and repeats no step"
    )
    job.operator.act_until(
        lambda: job.generation == following and job.operator.record is not None, "the operator to take it over"
    )
    record = job.operator.record
    assert record is not None
    assert (record.members, record.transition) == ((pid(0), pid(1), pid(2)), None)
    assert job.operator.history[-1].depth is Depth.MEMORY
    assert job.calls(following, "/start") == {2}
    step = job.made(following, 1)[-1][1]
    job.operator.act_until(lambda: job.made(following, 1)[-1][1] > step, "further steps")
    assert job.generation == following


def test_a_growth_whose_newcomer_is_lost_in_the_drain_is_withdrawn(job: Job) -> None:
    job.holds[0].touch()
    until(lambda: "held" in job.agents[0].printed(), "a worker that does not come any further", PATIENCE_S)
    following = job.tells_of_growth()
    until(
        lambda: job.agents[0].status()["next_generation"] == following, "an agent that knows what follows", PATIENCE_S
    )
    job.agents[2].process.kill()
    job.operator.must_go(2)
    job.operator.act_until(
        lambda: all(job.agents[n].status()["next_generation"] is None for n in (0, 1)),
        "agents that know of nothing more",
    )
    job.holds[0].unlink()
    job.operator.act_until(lambda: job.generation > following and job.made(job.generation, 1), "the two to go on")
    record = job.operator.record
    assert record is not None
    assert record.members == (pid(0), pid(1))
    assert job.operator.history[-1].depth is Depth.MEMORY
    assert not job.made(following, 0)
