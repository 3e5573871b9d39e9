"""Workers that are started ahead of their first generation, the agent in the process of the test."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from tests.agent_client import until
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.kept_workers_job import KEEP, LOOP, Job

from elastipod_agent.inprocess.worker_pool import WorkerPool


@pytest.fixture
def job(agent: AgentInProcess) -> Job:
    return Job(agent)


def preparation(agent: AgentInProcess, now: str) -> dict[str, Any]:
    """Wait until prepared workers have come this far; gives the status."""

    def seen() -> dict[str, Any] | None:
        status = agent.status()
        return status if status["preparation"] == now else None

    found: dict[str, Any] = until(seen, f"prepared workers that are {now}:\n{agent.printed()}")
    return found


def prepare(agent: AgentInProcess, generation: int = 3) -> tuple[int, Any]:
    store = {"master_addr": "10.0.0.9", "master_port": 4321}
    return agent.call("POST", "/prepare", {"nnodes": 2, "generation": generation, **store})


def test_prepared_workers_wait_at_the_barrier_and_are_those_of_the_next_start(job: Job) -> None:
    def scenario() -> None:
        assert "prepare" in job.agent.status()["features"]
        assert job.agent.status()["preparation"] is None
        assert prepare(job.agent) == (200, None)
        seen = preparation(job.agent, "ready")
        assert (seen["status"], seen["generation"]) == ("ready", 0)
        assert seen["in_memory"] == {"kind": "replicated", "kept": None}
        job.agent.until_printed("env {", 2)  # both have built what comes before the barrier
        assert job.agent.printed().count("'ELASTIPOD_FOLLOWED_STORE': '10.0.0.9:4321'") == 2, "and know whom to follow"
        assert prepare(job.agent) == (200, None), "a repetition"
        assert job.agent.start(3, rank=2, nnodes=3, spare=True) == (200, None), "a spare keeps them"
        assert job.agent.status()["preparation"] == "ready"
        started = job.start(4, rank=2, nnodes=3)
        assert job.agent.status()["preparation"] is None
        assert set(started) == {4, 5}
        seen = job.drain(4, restart_mode=KEEP, leaves=False)
        assert seen["in_memory"]["kept"] == 2
        assert job.start(5, rank=0, nnodes=3) == {rank - 4: pid for rank, pid in started.items()}
        job.order(1, "crash")
        job.agent.until("faulted")
        assert job.stop(5, restart_mode=KEEP)["in_memory"]["kept"] == 1, "they are kept workers like any others"

    job.run(scenario)
    assert job.agent.printed().count("env {") == 3
    assert job.agent.printed().count("ELASTIPOD_WORKER_KEY") == 3
    assert job.agent.printed().count("ELASTIPOD_FOLLOWED_STORE") == 2, (
        "one that is started in a generation follows nobody"
    )


def test_prepared_workers_are_told_when_an_agent_serves_the_store_that_they_follow(job: Job) -> None:
    def scenario() -> None:
        store = {"master_addr": "10.0.0.9", "master_port": 4321, "store_port": 8080}
        assert job.agent.call("POST", "/prepare", {"nnodes": 2, "generation": 3, **store}) == (200, None)
        job.agent.until_printed("'ELASTIPOD_FOLLOWED_STORE': 'agent://10.0.0.9:8080'", 2)

    job.run(scenario)


def test_a_start_waits_for_prepared_workers_that_are_on_their_way(job: Job) -> None:
    def scenario() -> None:
        assert prepare(job.agent) == (200, None)
        started = job.start(4)
        assert job.agent.printed().count("env {") == 2, "no others were started"
        assert set(started) == {0, 1}

    assert job.run(scenario) == 0


def test_what_a_prepared_process_knows_of_its_rank_is_nothing(agent: AgentInProcess) -> None:
    def scenario() -> None:
        assert prepare(agent, 7) == (200, None)
        agent.until_printed("rank -1 of 2 in 7 at  -1")

    script = """
import os, time
names = "RANK", "WORLD_SIZE", "ELASTIPOD_GENERATION", "MASTER_ADDR", "MASTER_PORT"
print("rank {} of {} in {} at {} {}".format(*map(os.environ.get, names)), flush=True)
time.sleep(600)
"""
    assert agent.run(script, scenario) == 0


@pytest.mark.parametrize(
    ("script", "why"),
    [
        pytest.param("raise SystemExit('no rank')", "ended with exit code 1", id="fails"),
        pytest.param("pass", "before it reached", id="ends"),
        pytest.param(
            "from hyperpod_elastic_agent.ipc import TrainingManager\nTrainingManager().InProcessRestart.hyperpod_barrier()",
            "have not announced",
            id="announces nothing",
        ),
    ],
)
def test_workers_that_cannot_be_prepared_are_started_with_their_generation(
    agent: AgentInProcess, script: str, why: str
) -> None:
    """The script can only run with a rank."""

    def scenario() -> None:
        assert prepare(agent) == (200, None)
        seen = preparation(agent, "failed")
        assert (seen["status"], seen["in_memory"], seen["failure"]) == ("ready", None, None)
        assert agent.start(4) == (200, None)
        agent.until_printed("trains as rank 0")
        agent.until("completed")

    unranked = script.replace("\n", "\n    ")
    trains = "print('trains as rank', os.environ['RANK'])"
    guarded = f"import os\nif os.environ['RANK'] == '-1':\n    {unranked}\nelse:\n    {trains}\n"
    assert agent.run(guarded, scenario) == 0
    assert why in agent.printed()


def test_a_start_that_finds_prepared_workers_failing_starts_others(agent: AgentInProcess) -> None:
    """Nothing of it is a fault of the generation."""

    def scenario() -> None:
        assert prepare(agent) == (200, None)
        agent.until_printed("prepared")
        assert agent.start(4) == (200, None)
        (agent.folder / "go").touch()
        agent.until("completed")

    script = """
import os, time
from pathlib import Path
if os.environ["RANK"] == "-1":
    print("prepared", flush=True)
    while not Path(os.environ["HOME"], "go").exists():
        time.sleep(0.01)
    raise SystemExit(3)
"""
    assert agent.run(script, scenario) == 0
    assert " fault job=" not in agent.printed()


def test_a_prepared_worker_that_dies_at_the_barrier_is_reported(job: Job) -> None:
    def scenario() -> None:
        assert prepare(job.agent) == (200, None)
        preparation(job.agent, "ready")
        (pid, *_) = map(int, re.findall(r"pid (\d+) waits", job.agent.printed()))
        os.kill(pid, signal.SIGKILL)
        preparation(job.agent, "failed")
        assert set(job.start(4)) == {0, 1}

    script = LOOP.replace(
        "while True:\n    start", "print('pid', os.getpid(), 'waits', flush=True)\nwhile True:\n    start"
    )
    assert job.agent.run(script, scenario, "--nproc-per-node=2", script_args=("replicated",)) == 0


@pytest.mark.parametrize("how", ["stop", "shutdown"])
def test_prepared_workers_end_when_they_are_told_to(job: Job, how: str) -> None:
    def scenario() -> None:
        assert prepare(job.agent) == (200, None)
        preparation(job.agent, "ready")
        if how == "stop":
            assert job.agent.stop(3, restart_mode="process_level_restart") == (200, None)
            seen = until(lambda: (s := job.agent.status())["in_memory"] is None and s, "the end of the workers")
            assert (seen["status"], seen["preparation"]) == ("ready", None)
            assert prepare(job.agent) == (200, None)
            preparation(job.agent, "ready")

    job.run(scenario)
    assert "the agent itself failed" not in job.agent.printed()


@pytest.mark.parametrize("script_args", [("replicated",), ("replicated", "exit")], ids=["return", "exit"])
def test_new_processes_of_a_pod_that_stays_begin_when_the_old_ones_have_ended(
    job: Job, script_args: tuple[str, ...]
) -> None:
    """They import and build while other pods drain and the operator decides."""

    def scenario() -> None:
        assert prepare(job.agent, 1) == (200, None)
        first = job.start(2)
        seen = job.drain(2, restart_mode="process_level_restart", leaves=False)
        assert (seen["drained"], seen["generation"]) == (True, 2)
        seen = preparation(job.agent, "ready")
        assert seen["in_memory"] == {"kind": "replicated", "kept": None}, "they hold nothing"
        assert prepare(job.agent, 2) == (200, None), "which has been done"
        second = job.start(3, rank=1, nnodes=2)
        assert not set(first.values()) & set(second.values())
        assert job.agent.printed().count("imports in") == 4, "no others were started"
        assert job.agent.printed().count("ELASTIPOD_FOLLOWED_STORE") == 2, "only the first ones had somebody to follow"

    assert job.run(scenario, *script_args) == 0


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"restart_mode": "process_level_restart", "leaves": True}, id="the pod goes"),
        pytest.param({"restart_mode": "process_level_restart"}, id="nobody says whether it stays"),
    ],
)
def test_nothing_is_started_before_it_is_known_that_the_pod_stays(job: Job, fields: dict[str, Any]) -> None:
    def scenario() -> None:
        job.start(1)
        job.announced()
        seen = job.drain(1, **fields)
        assert (seen["drained"], seen["preparation"], seen["in_memory"]) == (True, None, None)
        assert len(job.start(2)) == 2
        assert job.agent.printed().count("imports in") == 4

    job.run(scenario)


def test_a_pod_that_is_told_to_go_in_the_middle_of_a_drain_starts_no_others(job: Job) -> None:
    def scenario() -> None:
        job.start(1)
        job.announced()
        held = job.agent.folder / "held"
        held.touch()
        job.order(0, "long")
        job.agent.until_printed("a long step")
        for leaves in (False, True):
            assert job.agent.drain(1, leaves=leaves, restart_mode="process_level_restart") == (200, None)
        held.unlink()
        seen = job.agent.until("ready")
        assert (seen["drained"], seen["preparation"]) == (True, None)
        assert job.agent.printed().count("imports in") == 2

    job.run(scenario)


def test_an_agent_whose_workers_start_before_any_run_prepares_nothing(job: Job) -> None:
    def scenario() -> None:
        job.agent.until("ready")
        assert prepare(job.agent) == (200, None)
        assert job.agent.status()["preparation"] is None
        job.start(4)

    job.run(scenario, options=("--inprocess-restart",))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"generation": 3}, "nnodes"),
        ({"nnodes": 0, "generation": 3}, "nnodes"),
        ({"nnodes": 2, "generation": 0}, "generation"),
        ({"nnodes": 2, "generation": 3, "master_addr": "10.0.0.1", "master_port": 0}, "master_port"),
    ],
)
def test_a_prepare_that_cannot_be_used_names_its_field(
    agent: AgentInProcess, body: dict[str, int | str], problem: str
) -> None:
    def scenario() -> None:
        status, answer = agent.call("POST", "/prepare", body)
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", problem])

    agent.run("", scenario)


def test_an_agent_whose_disk_takes_no_files_prepares_nothing_and_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the prepared workers cannot be made."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(WorkerPool, "prepared", refuse)
            assert prepare(job.agent) == (200, None)
            preparation(job.agent, "failed")
        job.start(4)

    assert job.run(scenario) == 0
    assert "No space left on device" in job.agent.printed()
