"""Workers of a plain start that announce that they can live on, the agent in the process of the test."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from threading import Event
from typing import Any

import pytest
from tests.agent_client import until
from tests.patience import PATIENCE_S
from tests.slow import all_but_first
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.kept_workers_job import KEEP, LOOP, Job

from elastipod_agent.inprocess import kept_pool
from elastipod_agent.inprocess.process_starter import ProcessStarter
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.ipc.link import REPORT_DELAY_S
from elastipod_agent.workers.group import WorkerGroup

STANDING = ("--inprocess-restart",)


@pytest.fixture
def job(agent: AgentInProcess) -> Job:
    return Job(agent)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_that_can_live_on_keep_their_processes_over_a_planned_change(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        seen = job.drain(1, restart_mode=KEEP, leaves=False)
        assert (seen["drained"], seen["reason"], seen["restartMode"]) == (True, "Drained", "process_level_restart")
        assert seen["in_memory"] == {"kind": "replicated", "kept": 2}
        assert [one["data"] for one in seen["worker_data"]] == ["data of 0", "data of 1"]
        assert (seen["gap_s"], seen["steps_repeated"]) == (None, None), "nothing came before the first generation"
        second = job.start(2, rank=1, nnodes=2)
        gap_s = until(lambda: job.agent.status()["gap_s"], "the first step after the change")
        assert 0 < gap_s < PATIENCE_S
        assert job.agent.status()["steps_repeated"] in range(1 + seen["worker"]["step"]), "its steps begin anew"
        assert {rank - 2: pid for rank, pid in second.items()} == first
        assert job.agent.status()["in_memory"] == {"kind": "replicated", "kept": None}
        assert job.agent.status()["worker"]["step"] >= 1
        job.drain(2, restart_mode=KEEP, leaves=True)
        assert all(map(is_alive, first.values())), "a leaver gives its state until it is told to go"

    assert job.run(scenario) == 0
    printed = job.agent.printed()
    assert "told False True" in printed
    assert "told True True" in printed
    assert "'TORCH_NCCL_ASYNC_ERROR_HANDLING': '0'" in printed
    assert not any(map(is_alive, job.pids(1).values()))


def test_a_dead_rank_is_replaced_beside_the_ones_that_live_on(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.order(1, "crash")
        seen = job.agent.until("faulted")
        assert (seen["reason"], seen["failure"]["signal"]) == ("WorkerCrash", "SIGKILL")
        assert seen["restartMode"] == "in_process_restart"
        assert is_alive(first[0]), "it may hold the only copy of the state"
        seen = job.stop(1, restart_mode=KEEP)
        assert seen["in_memory"] == {"kind": "replicated", "kept": 1}
        job.agent.until_printed("env {", 3)  # of the new process, which is at the barrier before the agent is ready
        second = job.start(2)
        assert (second[0] == first[0], second[1] == first[1]) == (True, False)
        job.announced()
        assert job.stop(2, restart_mode=KEEP)["in_memory"]["kept"] == 2, "a fault elsewhere"
        assert job.start(3) == second

    job.run(scenario)
    assert job.agent.printed().count("called back 0") == 2


def test_nothing_is_started_beside_kept_workers_that_survive_a_kill(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold their devices: new processes would fail on those, and the reason would be hidden."""
    survivor = subprocess.Popen(["sleep", "600"])  # stands for a worker that hangs in the kernel

    async def end(group: WorkerGroup, *arguments: Any) -> list[int]:
        return [*await ended(group, *arguments), survivor.pid]

    ended = WorkerGroup.end
    told = f"processes {survivor.pid} cannot be killed; the node may need attention"

    def scenario() -> None:
        job.start(1)
        job.announced()
        job.drain(1, restart_mode=KEEP, leaves=False)
        with monkeypatch.context() as patched:
            patched.setattr(WorkerGroup, "end", end)
            job.stop(1, restart_mode="process_level_restart")  # deeper than the last one, between two runs
            until(lambda: job.agent.status()["in_memory"] is None, "the end of the kept workers")
        job.agent.call("POST", "/prepare", {"generation": 2, "nnodes": 1})
        until(lambda: job.agent.status()["preparation"] == "failed", "that nothing is prepared")
        assert job.agent.start(2) == (200, None)
        seen = job.agent.until("faulted")
        assert (seen["reason"], seen["message"]) == ("WorkerUnhealthy", told)
        job.agent.stop(2)
        assert job.agent.until("faulted")["message"] == told
        assert job.agent.start(3)[0] == 409
        assert job.pids(2) == {}
        survivor.kill()
        survivor.wait()
        job.stop(2)
        job.start(3)

    try:
        job.run(scenario)
    finally:
        survivor.kill()
        survivor.wait()


def imported(agent: AgentInProcess) -> list[int]:
    """Give the pids of all processes that have begun to import."""
    return [int(pid) for pid in re.findall(r"imports in (\d+)", agent.printed())]


def test_the_successor_of_a_dead_rank_imports_while_the_operator_decides(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.order(1, "crash")
        job.agent.until("faulted")
        job.agent.until_printed("env {", 3)
        seen = job.agent.status()
        assert (seen["status"], seen["in_memory"]) == ("faulted", {"kind": "replicated", "kept": None})
        assert [(one["rank"], one["failed"]) for one in seen["worker_data"]] == [(0, False), (1, True)]
        assert is_alive(first[0])
        (successor,) = set(imported(job.agent)) - set(first.values())
        seen = job.stop(1, restart_mode=KEEP)
        assert seen["in_memory"] == {"kind": "replicated", "kept": 1}
        assert job.start(2) == {0: first[0], 1: successor}

    job.run(scenario)
    assert len(imported(job.agent)) == 3
    assert job.agent.printed().count("called back 0") == 1


@pytest.mark.slow
def test_what_the_workers_keep_stays_known_while_a_successor_imports(job: Job) -> None:
    """The operator may ask only then, and the depth of the recovery depends on it."""
    held = job.agent.folder / "held"

    def scenario() -> None:
        job.start(1)
        job.announced()
        held.touch()
        job.order(1, "crash")
        job.agent.until("faulted")
        job.agent.until_printed("imports in", 3)
        time.sleep(3 * REPORT_DELAY_S)
        assert job.agent.status()["in_memory"] == {"kind": "replicated", "kept": None}
        assert job.agent.stop(1, restart_mode=KEEP) == (200, None)
        job.agent.until_printed("called back 0")
        held.unlink()
        assert job.agent.until("ready")["in_memory"] == {"kind": "replicated", "kept": 1}

    job.run(scenario)


@pytest.mark.slow
def test_a_successor_that_builds_into_a_run_costs_nobody_the_state_when_that_run_is_stopped(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies at the barrier, the next run begins meanwhile, and a fault elsewhere stops it before the successor has built."""
    monkeypatch.setattr(kept_pool, "RETURN_LIMIT_S", 0.5)
    held = job.agent.folder / "held"

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        assert job.drain(1, restart_mode=KEEP)["in_memory"]["kept"] == 2
        held.touch()
        os.kill(first[0], signal.SIGKILL)
        job.agent.until_printed("imports in", 3)
        assert job.agent.start(2) == (200, None)
        until(lambda: 1 in job.pids(2), "the survivor in the run")
        assert job.agent.stop(2, restart_mode=KEEP) == (200, None)
        job.agent.until_printed("called back 1")
        time.sleep(1)  # twice as long as a rank has to come back from a run
        held.unlink()
        assert job.agent.until("ready")["in_memory"] == {"kind": "replicated", "kept": 1}
        assert job.start(3)[1] == first[1]

    job.run(scenario)


@pytest.mark.slow
def test_a_rank_that_asks_again_at_the_barrier_while_another_still_imports_is_not_late(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks once in a minute, and is not at the barrier for a moment then; its time to come back has long passed."""
    pools: list[WorkerPool] = []
    recall, held = WorkerPool.recall, job.agent.folder / "held"

    def noted(pool: WorkerPool, replace: frozenset[int], **how: Any) -> None:
        pools.append(pool)
        recall(pool, replace, **how)

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        held.touch()
        job.order(1, "crash")
        job.agent.until("faulted")
        assert job.agent.stop(1, restart_mode=KEEP) == (200, None)
        until(lambda: pools and pools[0]._ranks[0].was_waiting, "rank 0 at the barrier, as the agent has seen")
        pools[0]._ranks[0].deadline = 0.0
        time.sleep(0.5)
        held.unlink()
        assert job.agent.until("ready")["in_memory"] == {"kind": "replicated", "kept": 1}
        assert job.start(2)[0] == first[0]

    monkeypatch.setattr(WorkerPool, "recall", noted)
    script = LOOP.replace("page =", "import elastipod.ipc.clients\nelastipod.ipc.clients.MAX_WAIT_S = 0.1\npage =")
    job.agent.run(script, scenario, "--nproc-per-node=2", script_args=("replicated",))


@pytest.mark.parametrize("how", all_but_first(["stop", "shutdown", "sigterm"]))
def test_a_successor_ends_with_the_others_where_they_are_not_kept(job: Job, how: str) -> None:
    def scenario() -> None:
        job.start(1)
        job.announced()
        job.order(1, "crash")
        job.agent.until("faulted")
        job.agent.until_printed("env {", 3)
        if how == "stop":
            assert job.stop(1, restart_mode="process_level_restart")["in_memory"] is None
            assert not any(map(is_alive, imported(job.agent)))
            assert not set(imported(job.agent)) & set(job.start(2).values())
        elif how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: not any(map(is_alive, imported(job.agent))), "the end of all")

    job.run(scenario)
    assert not any(map(is_alive, imported(job.agent)))
    assert "the agent itself failed" not in job.agent.printed()


def test_no_successor_comes_before_the_decision_where_the_last_one_kept_no_process(job: Job) -> None:
    """As with spec.elastipod.recovery: Process, or an operator that knows of no kept workers."""

    def crash(generation: int, mode: str, *, successors: int) -> None:
        before = len(imported(job.agent))
        job.order(1, "crash")
        job.agent.until("faulted")
        time.sleep(0.3)
        until(lambda: len(imported(job.agent)) >= before + successors, "the successor")
        assert len(imported(job.agent)) == before + successors
        job.stop(generation, restart_mode=mode)

    def scenario() -> None:
        for generation, (mode, successors) in enumerate([("process_level_restart", 1), (KEEP, 0), (KEEP, 1)], start=1):
            job.start(generation)
            job.announced()
            crash(generation, mode, successors=successors)

    job.run(scenario)


def test_a_rank_that_died_is_replaced_once_where_all_are_to_be(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[int] = []
    replace_workers = WorkerGroup.replace_workers

    async def noted(group: WorkerGroup, environ: Any, start: Any, local_ranks: frozenset[int]) -> None:
        replaced.extend(local_ranks)
        await replace_workers(group, environ, start, local_ranks)

    def scenario() -> None:
        job.start(1)
        job.announced()
        job.order(1, "crash")
        job.agent.until("faulted")
        replaced.clear()
        job.stop(1, restart_mode="process_level_restart")
        job.start(2)

    monkeypatch.setattr(WorkerGroup, "replace_workers", noted)
    job.run(scenario, options=("--inprocess-restart",))
    assert sorted(replaced) == [0, 1]


@pytest.mark.slow
def test_a_successor_that_fails_before_the_stop_is_not_started_again_until_then(job: Job) -> None:
    ends = 'if Path(os.environ["HOME"], "broken").exists():\n    sys.exit("broken")\n'
    script = LOOP.replace("be_held()\nagent =", f"{ends}agent =")
    broken = job.agent.folder / "broken"

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        broken.touch()
        job.order(1, "crash")
        job.agent.until("faulted")
        until(lambda: len(imported(job.agent)) == 3, "the successor")
        until(lambda: not is_alive(imported(job.agent)[-1]), "its end")
        time.sleep(0.3)
        assert len(imported(job.agent)) == 3
        broken.unlink()
        assert job.stop(1, restart_mode=KEEP)["in_memory"]["kept"] == 1
        second = job.start(2)
        assert (second[0], second[1]) == (first[0], imported(job.agent)[-1])

    options = ("--nproc-per-node=2",)
    job.agent.run(script, scenario, *options, script_args=("replicated",))
    assert "a worker ended between runs" in job.agent.printed(), "it counts as a failure on the way to the barrier"


def test_a_pod_that_is_being_terminated_starts_no_successor(job: Job) -> None:
    def scenario() -> None:
        job.start(1)
        job.announced()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: job.agent.status()["terminating"], "the end of the pod to be known")
        job.order(1, "crash")
        job.agent.until("faulted")
        time.sleep(0.3)
        assert len(imported(job.agent)) == 2

    job.run(scenario)


def test_no_successor_comes_before_the_decision_where_a_script_prepares_a_complete_set(job: Job) -> None:
    def scenario() -> None:
        job.start(1)
        job.announced()
        job.order(1, "crash")
        job.agent.until("faulted")
        time.sleep(0.3)
        assert len(imported(job.agent)) == 2
        assert job.stop(1, restart_mode=KEEP)["in_memory"]["kept"] == 1

    job.run(scenario, options=("--pre-train-script=/bin/true",))


@pytest.mark.slow
def test_a_pod_with_new_processes_only_is_ready_while_they_still_import(job: Job) -> None:
    held = job.agent.folder / "held"

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        held.touch()
        for rank in range(2):
            job.order(rank, "crash")
        job.agent.until("faulted")
        until(lambda: not any(map(is_alive, first.values())), "both ranks to die")
        seen = job.stop(1, restart_mode=KEEP)
        assert seen["in_memory"] is None
        assert job.agent.start(2) == (200, None)
        job.agent.until("running")
        until(lambda: len(living()) == 2, "two new processes")
        early = living()
        assert job.pids(2) == {}
        os.kill(early.pop(), signal.SIGKILL)
        until(
            lambda: len(living() - early) == 1, "another one in the place of the one that has died before the barrier"
        )
        held.unlink()
        until(lambda: len(job.pids(2)) == 2, "both in the run")
        assert set(job.pids(2).values()) == living(), "the run has lost nobody"

    def living() -> set[int]:
        lines = re.findall(r"imports in (\d+)", job.agent.printed())
        return {pid for pid in map(int, lines) if is_alive(pid)} - set(job.pids(1).values())

    job.run(scenario)


@pytest.mark.parametrize(
    ("is_graceful", "mode"),
    [
        pytest.param(False, "process_level_restart", id="new processes"),
        pytest.param(False, "job_level_restart", id="new pods", marks=pytest.mark.slow),
        pytest.param(False, None, id="an operator that names no mode", marks=pytest.mark.slow),
        pytest.param(True, "process_level_restart", id="a drain, then new processes", marks=pytest.mark.slow),
    ],
)
def test_a_stop_that_goes_deeper_ends_all_processes(job: Job, is_graceful: bool, mode: str | None) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        fields = {} if mode is None else {"restart_mode": mode}
        seen = job.drain(1, **fields) if is_graceful else job.stop(1, **fields)
        assert (seen["drained"], seen["in_memory"]) == (is_graceful, None)
        assert not any(map(is_alive, first.values()))
        second = job.start(2)
        assert not set(first.values()) & set(second.values())
        job.announced()
        job.drain(2, restart_mode=KEEP)
        assert job.start(3) == second, "they can be kept again"

    job.run(scenario)
    if is_graceful:
        job.agent.until_printed("told None False")


def test_a_drain_of_an_operator_that_knows_of_no_kept_workers_keeps_who_returns(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        assert job.drain(1)["drained"] is True
        assert job.start(2) == first

    job.run(scenario)
    assert "told None None" in job.agent.printed(), "so that they save a checkpoint first"


@pytest.mark.slow
def test_workers_that_exit_after_a_drain_are_started_by_the_next_start(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        seen = job.drain(1, restart_mode=KEEP)
        assert (seen["drained"], seen["in_memory"]) == (True, None)
        assert not set(first.values()) & set(job.start(2).values())

    job.run(scenario, "replicated", "exit")


@pytest.mark.slow
def test_a_worker_that_does_not_come_back_costs_the_processes_of_its_pod(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastipod_agent.inprocess.kept_pool.RETURN_LIMIT_S", 4.0)  # enough for the other rank

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.order(0, "stuck")
        until(lambda: not (job.agent.folder / "order-0").exists(), "the order")
        seen = job.stop(1, restart_mode=KEEP)
        assert seen["in_memory"] is None
        assert not any(map(is_alive, first.values()))
        assert not set(first.values()) & set(job.start(2).values())

    job.run(scenario)
    assert "local rank 0 did not reach the barrier within 4 s" in job.agent.printed()


def test_workers_that_a_drain_does_not_reach_in_its_time_come_back_with_what_they_hold(job: Job) -> None:
    """A member that must go may keep the others from reaching the stop step; it must not cost them their state. Nobody waits for it."""

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        seen = job.drain(1, restart_mode=KEEP, timeout=0.3, leaves=False)
        assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")
        assert seen["message"].endswith("were returned to the barrier")
        assert seen["in_memory"] == {"kind": "replicated", "kept": 2}
        assert job.start(2) == first
        seen = job.drain(2, restart_mode=KEEP, timeout=0.3, leaves=True)
        assert (seen["reason"], seen["in_memory"]) == ("DrainTimedOut", None)
        assert not any(map(is_alive, first.values()))

    job.run(scenario, "replicated", "deaf")


def test_a_drain_that_a_rank_hangs_in_ends_the_processes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod_agent.inprocess.pooled_workers.LATE_RETURN_S", 0.5)

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.order(0, "stuck")
        until(lambda: not (job.agent.folder / "order-0").exists(), "the order")
        seen = job.drain(1, restart_mode=KEEP, timeout=0.3)
        assert (seen["drained"], seen["reason"], seen["in_memory"]) == (False, "DrainTimedOut", None)
        assert not any(map(is_alive, first.values()))

    job.run(scenario)


def test_kept_workers_that_wait_are_ended_by_a_stop_that_goes_deeper(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.drain(1, restart_mode=KEEP)
        assert job.agent.stop(1, restart_mode=KEEP) == (200, None)
        assert all(map(is_alive, first.values()))
        assert job.agent.stop(1, restart_mode="process_level_restart") == (200, None)
        assert job.agent.status()["status"] == "ready"
        assert not set(first.values()) & set(job.start(2).values())

    job.run(scenario)


@pytest.mark.parametrize("mode", ["process_level_restart", pytest.param(None, marks=pytest.mark.slow)])
def test_a_stop_that_goes_deeper_does_not_wait_for_a_successor_that_still_imports(job: Job, mode: str | None) -> None:
    held = job.agent.folder / "held"

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        held.touch()
        job.order(1, "crash")
        job.agent.until("faulted")
        job.agent.until_printed("imports in", 3)
        assert job.agent.stop(1, restart_mode=KEEP) == (200, None)
        job.agent.until_printed("called back 0")
        assert job.agent.stop(1, restart_mode=KEEP) == (200, None)
        assert job.agent.status()["status"] == "stopping"
        seen = job.stop(1, **({} if mode is None else {"restart_mode": mode}))
        assert seen["in_memory"] is None
        assert not any(map(is_alive, imported(job.agent)))
        held.unlink()
        assert not set(first.values()) & set(job.start(2).values())

    job.run(scenario)


def test_a_stop_that_goes_deeper_does_not_wait_for_a_worker_that_a_drain_has_not_reached(job: Job) -> None:
    held = job.agent.folder / "held"

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        held.touch()
        job.order(0, "long")
        job.agent.until_printed("a long step")
        assert job.agent.drain(1, restart_mode=KEEP, timeout=0.2) == (200, None)
        job.agent.until_printed("told None True")
        time.sleep(0.4)  # until the time of the drain is over
        assert job.agent.status()["status"] == "stopping"
        assert job.stop(1, restart_mode="process_level_restart")["in_memory"] is None
        assert not any(map(is_alive, first.values()))

    job.run(scenario)
    assert "did not reach the barrier" not in job.agent.printed()


def test_a_standing_pod_that_waits_for_a_successor_replaces_all_workers_if_a_stop_goes_deeper(job: Job) -> None:
    held = job.agent.folder / "held"

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        held.touch()
        job.order(1, "crash")
        job.agent.until("faulted")
        assert job.agent.stop(1, restart_mode=KEEP) == (200, None)
        job.agent.until_printed("imports in", 3)
        assert job.agent.stop(1, restart_mode="process_level_restart") == (200, None)
        until(lambda: not is_alive(first[0]), "the end of the other rank")
        assert job.agent.status()["status"] == "stopping"
        held.unlink()
        assert job.agent.until("ready")["in_memory"] == {"kind": "replicated", "kept": 0}
        assert not set(first.values()) & set(job.start(2).values())

    job.run(scenario, options=STANDING)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_stop_that_goes_deeper_replaces_the_workers_of_a_standing_pod_that_wait(job: Job, is_at_once: bool) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        assert job.drain(1, restart_mode=KEEP)["in_memory"] == {"kind": "replicated", "kept": 2}
        assert job.agent.stop(1, restart_mode=KEEP) == (200, None)
        assert job.agent.status()["in_memory"]["kept"] == 2
        assert job.agent.stop(1, restart_mode="process_level_restart") == (200, None)
        if not is_at_once:
            job.agent.until_printed("env {", 4)
            job.announced(kept=0)
            again = set(imported(job.agent))
            assert job.agent.stop(1, restart_mode="process_level_restart") == (200, None)
        second = set(job.start(2).values())
        assert not set(first.values()) & second
        if not is_at_once:
            assert second <= again, "those that hold nothing are left alone"

    job.run(scenario, options=STANDING)


def test_a_drain_that_goes_deeper_replaces_the_workers_of_a_standing_pod(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        assert job.drain(1, restart_mode="process_level_restart")["drained"] is True
        job.announced(kept=0)
        assert not set(first.values()) & set(job.start(2).values())

    job.run(scenario, options=STANDING)


def test_a_worker_that_dies_while_it_waits_is_replaced(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        assert job.drain(1, restart_mode=KEEP)["in_memory"]["kept"] == 2
        os.kill(first[0], signal.SIGKILL)
        job.announced(kept=1)
        second = job.start(2)
        assert (second[0] == first[0], second[1] == first[1]) == (False, True)

    job.run(scenario)


@pytest.mark.parametrize("options", [pytest.param((), id="kept"), pytest.param(STANDING, id="standing")])
def test_a_pod_whose_last_kept_worker_dies_while_it_waits_says_that_it_holds_nothing(
    job: Job, options: tuple[str, ...]
) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.order(1, "crash")
        job.agent.until("faulted")
        assert job.stop(1, restart_mode=KEEP)["in_memory"] == {"kind": "replicated", "kept": 1}
        os.kill(first[0], signal.SIGKILL)
        job.announced(kept=0)
        assert not set(first.values()) & set(job.start(2).values())
        job.announced()

    job.run(scenario, options=options)


def test_a_start_waits_for_the_process_that_replaces_the_last_kept_worker(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, may_start = ProcessStarter.start, Event()
    may_start.set()

    async def start_late(starter: ProcessStarter, *arguments: Any) -> Any:
        await asyncio.to_thread(may_start.wait, PATIENCE_S)
        return await start(starter, *arguments)

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.order(1, "crash")
        job.agent.until("faulted")
        assert job.stop(1, restart_mode=KEEP)["in_memory"] == {"kind": "replicated", "kept": 1}
        may_start.clear()
        os.kill(first[0], signal.SIGKILL)
        job.announced(kept=0)
        assert job.agent.start(2) == (200, None)
        assert job.agent.status()["status"] == "running"
        may_start.set()
        until(lambda: len(job.pids(2)) == 2, "both ranks in the run")

    monkeypatch.setattr(ProcessStarter, "start", start_late)
    job.run(scenario)


def test_workers_that_are_prepared_after_kept_ones_have_ended_have_lived_through_no_run(job: Job) -> None:
    def scenario() -> None:
        job.start(1)
        job.announced()
        job.drain(1, restart_mode=KEEP)
        job.announced(kept=2)
        assert job.agent.stop(1, restart_mode="process_level_restart") == (200, None)
        until(lambda: job.agent.status()["in_memory"] is None, "the end of the kept workers")
        assert job.agent.call("POST", "/prepare", {"nnodes": 1, "generation": 1}) == (200, None)
        until(lambda: job.agent.status()["preparation"] == "ready", "other workers")
        assert job.agent.status()["in_memory"] == {"kind": "replicated", "kept": None}

    job.run(scenario)


def test_a_worker_may_ask_for_new_processes_of_all(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.order(1, "process_level_restart")
        seen = job.agent.until("faulted")
        assert (seen["restartMode"], seen["reason"]) == ("process_level_restart", "LostItsMind")
        assert all(map(is_alive, first.values()))
        job.stop(1, restart_mode="process_level_restart")
        assert not set(first.values()) & set(job.start(2).values())

    job.run(scenario)


def test_a_training_that_ends_is_completed_and_leaves_nothing(job: Job) -> None:
    def scenario() -> None:
        job.start(1)
        job.announced()
        job.order(0, "end")
        job.order(1, "end")
        seen = job.agent.until("completed")
        assert seen["in_memory"] is None
        job.stop(1)
        job.start(2)

    job.run(scenario, options=("--post-train-script=/bin/sh", "--post-train-args=-c 'echo post ran'"))
    assert job.agent.printed().count("post ran") == 1


def test_workers_that_announce_nothing_end_as_ever(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.order(0, "crash")
        job.agent.until("faulted")
        until(lambda: not is_alive(first[1]), "the end of the other rank")
        seen = job.stop(1, restart_mode=KEEP)
        assert seen["in_memory"] is None
        assert not set(first.values()) & set(job.start(2).values())
        job.stop(2, restart_mode=KEEP)
        assert not set(job.pids(2).values()) & set(job.start(3).values())

    job.run(scenario, "replicated", "silent")


def test_what_is_announced_must_be_known(job: Job) -> None:
    def scenario() -> None:
        assert job.agent.start(1, rank=0, nnodes=1) == (200, None)
        seen = job.agent.until("faulted")
        assert "keep: kind must be replicated or sharded" in seen["message"]

    job.run(scenario, "whatever")


def test_log_rules_that_are_added_later_apply_to_kept_workers(job: Job) -> None:
    rules = [{"name": "long", "logPattern": "a long step", "faultOnMatch": True}]

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.drain(1, restart_mode=KEEP)
        assert job.start(2, log_monitoring_configuration=rules) == first
        job.order(0, "long")
        assert job.agent.until("faulted")["reason"] == "LogFault_long"
        assert job.stop(2, restart_mode=KEEP)["in_memory"] == {"kind": "replicated", "kept": 2}

    job.run(scenario)


def test_kept_workers_whose_output_cannot_be_read_keep_their_state_and_log_rules_apply_to_their_successors(
    job: Job,
) -> None:
    rules = [{"name": "quiet", "logPattern": "no such line", "expectedStartCutOffInSeconds": 0.1}]

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.drain(1, restart_mode=KEEP)
        assert job.start(2, log_monitoring_configuration=rules) == first
        job.agent.until_printed("WARNING log rules apply to new processes only")
        until(lambda: (job.agent.status()["worker"]["step"] or 0) > 20, "a second of silence")
        assert job.agent.status()["status"] == "running"
        job.order(0, "crash")
        assert job.agent.until("faulted")["reason"] == "WorkerCrash"
        assert job.stop(2, restart_mode=KEEP)["in_memory"] == {"kind": "replicated", "kept": 1}
        third = job.start(3, log_monitoring_configuration=rules)
        assert (third[0] == first[0], third[1] == first[1]) == (False, True)
        assert job.agent.until("faulted")["reason"] == "LogHang_quiet"

    job.run(scenario, options=("--redirects=0:2", f"--log-dir={job.agent.folder / 'logs'}"))
    assert job.agent.printed().count("log rules apply to new processes only") == 1


def test_a_rank_that_hangs_is_killed_and_replaced_and_the_other_keeps_its_process(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        until(lambda: (job.agent.status()["worker"]["step"] or 0) > 5, "some steps")
        os.kill(first[1], signal.SIGSTOP)
        seen = job.agent.until("faulted")
        assert (seen["reason"], seen["restartMode"]) == ("WorkerUnhealthy", KEEP)
        until(lambda: not is_alive(first[1]), "the end of the rank that hangs")
        assert is_alive(first[0])
        assert job.stop(1, restart_mode=KEEP)["in_memory"] == {"kind": "replicated", "kept": 1}
        second = job.start(2)
        assert (second[0] == first[0], second[1] == first[1]) == (True, False)

    job.run(scenario, options=("--hang-timeout=5",))
    assert "workers that hang are killed" in job.agent.printed()


def test_a_rank_that_hangs_before_its_first_step_after_a_change_is_killed_and_the_other_keeps_its_process(
    job: Job,
) -> None:
    """It is at the barrier when it stops, so it makes no step in the second generation; its peer does."""

    def scenario() -> None:
        first = job.start(1)
        job.announced()
        until(lambda: (job.agent.status()["worker"]["step"] or 0) > 5, "some steps")
        job.drain(1, restart_mode=KEEP, leaves=False)
        os.kill(first[1], signal.SIGSTOP)
        assert job.agent.start(2) == (200, None)
        seen = job.agent.until("faulted")
        assert (seen["reason"], seen["restartMode"]) == ("WorkerUnhealthy", KEEP)
        assert "rank 1 has made no step in this generation" in seen["message"]
        until(lambda: not is_alive(first[1]), "the end of the rank that hangs")
        assert job.stop(2, restart_mode=KEEP)["in_memory"] == {"kind": "replicated", "kept": 1}
        third = job.start(3)
        assert (third[0] == first[0], third[1] == first[1]) == (True, False)

    job.run(scenario, options=("--hang-timeout=5",))
    assert "workers that hang are killed" in job.agent.printed()


@pytest.mark.parametrize("mode", [KEEP, "process_level_restart"])
def test_workers_that_learn_of_a_drain_through_another_pod_wait_for_the_stop_that_follows(job: Job, mode: str) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.announced()
        job.order(0, "agree")
        job.order(1, "agree")
        seen = job.agent.until("ready")
        assert (seen["drained"], seen["in_memory"]) == (True, {"kind": "replicated", "kept": 2})
        assert job.agent.drain(1, restart_mode=mode) == (200, None)
        second = job.start(2)
        assert (second == first) is (mode == KEEP)
        assert bool(set(first.values()) & set(second.values())) is (mode == KEEP)

    job.run(scenario)
