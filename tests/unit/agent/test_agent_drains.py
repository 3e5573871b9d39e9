"""Drains of the agent with small real workers: what workers hear, how long they have, and what is reported."""

from __future__ import annotations

import time

import pytest
from tests.agent_client import until
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.worker_scripts import DRAINS, WAITS

from elastipod_agent.core.exits import StopMode
from elastipod_agent.generation.generation_run import GenerationRun


def test_a_graceful_stop_drains(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid", 2)
        assert agent.drain(1) == (200, None)
        seen = agent.until("ready")
        assert (seen["drained"], seen["reason"], seen.get("message"), seen["generation"]) == (True, "Drained", None, 1)
        assert seen["worker"]["step"] == 7, "the last report stays readable"
        assert agent.drain(1) == (200, None), "a repetition changes nothing"
        assert agent.status()["version"] == seen["version"]

    assert agent.run(DRAINS, scenario, "--nproc-per-node=2") == 0
    for word in ("draining workers", "drained", "/stop changes nothing"):
        assert word in agent.printed()


def test_workers_on_their_way_out_of_a_drain_are_reported_as_saving(agent: AgentInProcess) -> None:
    slow = DRAINS + "print('saving', flush=True)\ntime.sleep(600)\n"

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid", 2)
        assert agent.status()["saving"] is False
        agent.drain(1, timeout=600)
        until(lambda: agent.status()["saving"], "the workers to be saving")
        assert agent.status()["unanswered"] is False
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["saving"], seen["drained"], seen.get("reason")) == (False, False, None)

    agent.run(slow, scenario, "--nproc-per-node=2")


def test_the_event_carries_the_deadline_and_who_leaves(agent: AgentInProcess) -> None:
    tells = (
        DRAINS
        + "left = page.event().deadline - time.time(), page.steady_deadline() - time.monotonic()\n"
        + "print('time', [500 < one < 601 for one in left], 'leaves', page.leaves(), flush=True)\n"
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        agent.stop(1, is_graceful=True, timeout=600, leaves=True)
        agent.until("ready")

    agent.run(tells, scenario)
    assert "time [True, True] leaves True" in agent.printed()


def test_a_repeated_stop_tells_workers_that_their_pod_leaves_after_all(agent: AgentInProcess) -> None:
    tells = (
        DRAINS.replace("page.acknowledge", "\nwhile not page.leaves(): time.sleep(0.01)\npage.acknowledge")
        + "print('leaves', page.leaves(), page.kept(), flush=True)\n"
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        agent.drain(1, timeout=600, leaves=False, restart_mode="process_level_restart")
        agent.drain(1, timeout=600, leaves=False)
        assert agent.status()["status"] == "stopping"
        agent.drain(1, timeout=600, leaves=True)
        agent.until("ready")

    agent.run(tells, scenario)
    assert "leaves True False" in agent.printed()


def test_a_drain_without_time_ends_in_a_kill(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        asked_at = time.monotonic()
        agent.drain(1, timeout=0.3)
        seen = agent.until("ready")
        assert time.monotonic() - asked_at >= 0.3
        assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")
        assert "did not drain" in seen["message"]

    agent.run(WAITS, scenario)
    assert "reason=DrainTimedOut" in agent.printed()
    assert "SIGUSR1" not in agent.printed(), "the wake-up signal kills nobody who does not listen"


def test_a_repeated_stop_gives_a_drain_less_time_and_never_more(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=600)
        asked_at = time.monotonic()
        assert agent.drain(1, timeout=1)[0] == 200
        agent.drain(1, timeout=600)
        assert agent.until("ready")["reason"] == "DrainTimedOut"
        assert time.monotonic() - asked_at >= 1

    agent.run(WAITS, scenario)
    assert agent.printed().count("the drain has less time") == 1


def drain_and_stop(agent: AgentInProcess) -> None:
    """Stop a pod in the middle of a drain: it has neither drained nor been late."""

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=600)
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen.get("reason")) == (False, None)

    agent.run(WAITS, scenario)


def test_a_hard_stop_ends_a_drain_and_is_no_late_one(agent: AgentInProcess) -> None:
    drain_and_stop(agent)


def test_a_hard_stop_is_no_late_drain_even_if_the_time_runs_out_meanwhile(
    agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerationRun, "is_late", lambda run: run.stop_mode is StopMode.HARD)

    drain_and_stop(agent)


def test_workers_that_cannot_know_of_a_drain_are_reported(
    agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastipod_agent.generation.generation_run.ANSWER_TIME_S", 0.2)
    monkeypatch.setattr("elastipod_agent.generation.generation_run.IMPORT_TIME_S", 0.2)

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=600)
        until(lambda: agent.status()["unanswered"], "the agent to find out")
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen["reason"], seen["unanswered"]) == (False, "EventUnanswered", False)
        assert "elastic_event_detected()" in seen["message"]

    agent.run(WAITS, scenario)


def test_workers_with_a_handler_can_know_of_a_drain(agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod_agent.generation.generation_run.ANSWER_TIME_S", 0.2)
    monkeypatch.setattr("elastipod_agent.generation.generation_run.IMPORT_TIME_S", 0.2)
    handles = (
        "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n"
        + WAITS.replace("600", "1")
        + "time.sleep(1)\n" * 600
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=1.0)
        assert agent.until("ready")["reason"] == "DrainTimedOut"

    agent.run(handles, scenario)
    assert "no worker asks" not in agent.printed()


def test_a_crash_during_a_drain_is_reported(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid", 2)
        agent.drain(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen["reason"], seen["failure"]["exitcode"]) == (False, "WorkerCrash", 3)

    assert agent.run(DRAINS + "sys.exit(3)\n", scenario, "--nproc-per-node=2") == 1


def test_a_drain_that_came_through_another_pod_is_no_completion(agent: AgentInProcess) -> None:
    acknowledges = (
        "import os\nfrom elastipod.worker_file import WorkerFile\n"
        "WorkerFile.open(os.environ['ELASTIPOD_WORKER_FILE']).acknowledge(0)\n"
    )

    def scenario() -> None:
        agent.start(1)
        until(lambda: agent.status()["drained"], "the drain")
        assert (agent.status()["status"], agent.status()["reason"]) == ("ready", "Drained")
        assert "STOPPING" in agent.status()["transitions"]

    agent.run(acknowledges, scenario)
