"""Planned shrinks of sharded state, from the operator's decision to the last bit: real agents, real processes, no checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.core_operator import CoreOperator
from tests.e2e.inmemory_holds import hold
from tests.e2e.inmemory_schedules import JOINED
from tests.e2e.test_inmemory_sharded import HSDP, SHARDED_WORKER, undisturbed, whole_state  # noqa: F401 a fixture
from tests.patience import PATIENCE_S
from tests.unit.core.builders import pid, policy, seconds

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.chaos import CHAOS_ENV, FaultKind, Moment, PlannedFault
from elastipod.checkpoint.collective_planning import DOMAIN_ENV
from elastipod_operator.core.record import Depth
from elastipod_operator.core.sizes import Sizes

# The worker's file is run under its own path, so that it finds what lies beside it.
RUN_WORKER = (
    f"import runpy, sys; sys.path.insert(0, {str(SHARDED_WORKER.parents[2])!r}); "
    f"runpy.run_path({str(SHARDED_WORKER)!r}, run_name='__main__')"
)
BY_TWO = Sizes((2, 4), 4)
FIRST_STEPS = 4  # after which the ranks wait for the first call to stop


@dataclass
class Job:
    """Four pods that the operator's core looks after."""

    agents: list[Any]
    operator: CoreOperator
    folder: Path
    hold: Path

    def act(self) -> None:
        """Make one pass of the operator."""
        self.operator.act()
        if any(path == "/stop" and body["is_graceful"] for _, path, body in self.operator.calls):
            self.hold.unlink(missing_ok=True)

    def act_until(self, condition: Callable[[], Any], what: str) -> Any:
        def passed() -> Any:
            self.act()
            return condition()

        try:
            return until(passed, what, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.operator.record}\n{self.told()}") from error

    def told(self) -> str:
        return "\n".join(agent.printed() for agent in self.agents)

    def steps(self) -> int:
        return min(agent.status()["worker"]["step"] or 0 for agent in self.agents)

    def joined(self) -> list[dict[int, tuple[int, int]]]:
        """Give for each generation, by rank, the pid and the step after which it began."""
        found: dict[int, dict[int, tuple[int, int]]] = {}
        for match in JOINED.findall(self.told()):
            process, generation, rank, _, step = map(int, match)
            found.setdefault(generation, {})[rank] = (process, step)
        return [found[generation] for generation in sorted(found)]


@pytest.fixture
def begin(run_agent: RunAgent, tmp_path: Path) -> Any:
    """Let four pods train, and give the job after some steps."""

    def make(fault: PlannedFault | None = None, **options: Any) -> Job:
        held = hold(tmp_path, FIRST_STEPS)
        told = json.dumps({"folder": str(tmp_path), "step_s": 0.05, **options})
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if fault is not None:
            env[CHAOS_ENV] = json.dumps([asdict(replace(fault, once=str(tmp_path / "fault")))])
        agents = [
            run_agent(RUN_WORKER, script_args=(told,), env={**env, DOMAIN_ENV: f"rack-{n}"}, is_warm=True)
            for n in range(4)
        ]
        wishes = policy(2, 4, sizes=BY_TWO, scaling_timeout=seconds(600))
        # The port of the ranks follows from the generation.
        job = Job(agents, CoreOperator(agents, wishes, generation=random.randrange(100, 800)), tmp_path, held)
        job.act_until(lambda: all(agent.status()["status"] == "running" for agent in agents), "four pods that train")
        job.act_until(lambda: job.steps() >= FIRST_STEPS, "some steps")
        assert held.exists(), "nothing was to be stopped yet"
        return job

    return make


def check_end(job: Job, undisturbed: dict[str, str], *, stay: tuple[int, int]) -> None:  # noqa: F811
    """Two pods go on from memory, in their processes, with the step that follows; the end is as if nothing had happened."""
    job.act_until(lambda: job.operator.has_ended, "the end of the job")
    assert job.operator.record is not None
    assert (job.operator.record.outcome, job.operator.record.outcome_reason) == ("Completed", "Completed")
    shrink = job.operator.history[-1]
    assert (shrink.from_size, shrink.to_size, shrink.depth) == (4, 2, Depth.MEMORY), job.operator.history
    first, last = job.joined()
    assert [last[rank][0] for rank in range(2)] == [first[rank][0] for rank in stay], (
        "those who stay kept their processes"
    )
    assert len({step for _, step in last.values()}) == 1
    assert not list(job.folder.glob("**/step-*")), "there is no checkpoint that anybody could have read"
    report = audit(read_logs(job.folder / "samples"))
    assert report.exact, report
    assert not any(report.steps_repeated.values()), report
    assert whole_state(job.folder) == undisturbed


@pytest.mark.long("variants")
@pytest.mark.parametrize("mesh", [pytest.param({"shard": -1}, id="FSDP2"), pytest.param(HSDP, id="HSDP")])
def test_a_lower_size_takes_the_last_two_after_they_have_given_their_shards_away(
    mesh: dict[str, int],
    begin: Any,
    undisturbed: dict[str, str],  # noqa: F811
) -> None:
    job = begin(mesh=mesh)
    job.operator.policy = policy(2, 2)
    job.act_until(
        lambda: job.operator.record.generation == job.operator.history[0].generation + 1, "the next generation"
    )
    leaves = {n: body["leaves"] for n, path, body in job.operator.calls if path == "/stop" and body["is_graceful"]}
    assert leaves == {0: False, 1: False, 2: True, 3: True}
    assert job.operator.record.members == (pid(0), pid(1))
    check_end(job, undisturbed, stay=(0, 1))
    assert not [child for agent in job.agents[2:] if agent.process.poll() is None for child in _children(agent)]


@pytest.mark.long("variants")
def test_a_pod_that_must_go_takes_another_along(begin: Any, undisturbed: dict[str, str]) -> None:  # noqa: F811
    """Three cannot train, so the operator chooses one of them; survivors do not wait until the others are gone."""
    job = begin()
    job.operator.must_go(1)
    job.act_until(lambda: job.operator.record.transition is not None, "the drain")
    assert job.operator.record.transition.leavers == (pid(1), pid(3))
    job.act_until(lambda: job.operator.record.transition is None, "the next generation")
    assert job.agents[1].process.poll() is None, "those who leave are still there"
    assert job.operator.record.members == (pid(0), pid(2))
    check_end(job, undisturbed, stay=(0, 2))


@pytest.mark.long("variants")
def test_a_pod_that_must_go_when_all_have_stopped_gives_its_shard_away_from_the_next_generation(
    begin: Any,
    undisturbed: dict[str, str],  # noqa: F811
) -> None:
    job = begin()
    job.operator.policy = policy(2, 4, sizes=Sizes((2, 3), 2))
    job.act()
    assert job.operator.record.transition.leavers == (pid(3),)
    following = job.operator.record.transition.next_generation
    assert following.members == (pid(0), pid(1), pid(2))
    until(
        lambda: all(agent.status()["generation"] == following.generation for agent in job.agents[:3]),
        "those who stay to have begun the next generation by themselves",
        PATIENCE_S,
    )
    job.operator.must_go(0)
    job.act_until(lambda: job.operator.has_ended, "the end of the job")
    assert [(one.from_size, one.to_size, one.depth) for one in job.operator.history[1:]] == [
        (4, 3, Depth.MEMORY),
        (3, 2, Depth.MEMORY),
    ]
    assert job.operator.record.members == (pid(1), pid(2))
    report = audit(read_logs(job.folder / "samples"))
    assert report.exact, report
    assert not any(report.steps_repeated.values()), report
    assert whole_state(job.folder) == undisturbed


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        pytest.param(FaultKind.KILL, 3, id="a leaver dies", marks=pytest.mark.slow),
        pytest.param(FaultKind.KILL, 0, id="one that stays dies", marks=pytest.mark.long("variants")),
        pytest.param(FaultKind.RAISE, 2, id="a leaver raises", marks=pytest.mark.long("variants")),
    ],
)
def test_a_fault_in_a_hand_over_brings_the_leavers_back_and_they_leave_later(
    kind: FaultKind,
    rank: int,
    begin: Any,
    undisturbed: dict[str, str],  # noqa: F811
) -> None:
    """Four go on from memory, with the part of the dead from its copy; then the shrink comes again."""
    job = begin(fault=PlannedFault(kind, Moment.HAND_OVER, rank=rank), copies={"memory_bytes": 1 << 20})
    job.operator.policy = policy(2, 4, sizes=Sizes((2, 2), 2))
    job.act_until(lambda: job.operator.has_ended, "the end of the job")
    assert (job.folder / "fault").exists(), "it happened"
    assert [(one.from_size, one.to_size, one.depth) for one in job.operator.history[1:]] == [
        (4, 4, Depth.MEMORY),
        (4, 2, Depth.MEMORY),
    ], job.told()
    assert job.operator.record.members == (pid(0), pid(1))
    worlds = job.joined()
    assert [len(world) for world in worlds] == [4, 4, 2]
    kept = [worlds[1][each][0] == worlds[0][each][0] for each in range(4)]
    assert kept == [each != rank for each in range(4)], "all others kept their processes"
    assert not list(job.folder.glob("**/step-*")), "there is no checkpoint that anybody could have read"
    report = audit(read_logs(job.folder / "samples"))
    assert report.exact, report
    assert sum(report.steps_repeated.values()) <= 1, report
    assert whole_state(job.folder) == undisturbed


def _children(agent: Any) -> list[psutil.Process]:
    return psutil.Process(agent.process.pid).children(recursive=True)
