"""Signals to the agent, its shutdown, and the signals that it sends to its workers."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
from tests.agent_client import until
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.worker_scripts import DRAINS, SAYS, WAITS, pids


def test_sigterm_is_reported_at_once_and_training_goes_on_until_the_drain(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: agent.status()["terminating"], "terminating")
        assert agent.status()["status"] == "running"
        agent.drain(1)
        assert agent.until("ready")["drained"] is True

    assert agent.run(DRAINS, scenario) == 0
    assert "SIGTERM: the workers continue" in agent.printed()


@pytest.mark.parametrize(
    ("script", "state", "code"),
    [
        pytest.param(None, "ready", 143, id="before any run"),
        pytest.param(SAYS, "completed", 0, id="after completion"),
        pytest.param("raise SystemExit(9)", "faulted", 1, id="after a fault"),
    ],
)
def test_sigterm_ends_an_idle_agent_at_once(agent: AgentInProcess, script: str | None, state: str, code: int) -> None:
    def scenario() -> None:
        if script:
            agent.start(1)
        agent.until(state)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: "gone" in agent.printed(), "the end")

    assert agent.run(script or SAYS, scenario) == code
    assert "SIGTERM: " in agent.printed()


def test_sigterm_before_anything_runs_ends_the_agent(agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a container would ignore it, and be killed at the end of the pod's grace period."""
    monkeypatch.setattr("elastipod_agent.main.take_credentials", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        agent.run_alone("train.py")
    assert ended.value.code == 143


def test_without_any_place_for_its_files_the_agent_ends_with_a_sentence(
    agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("elastipod_agent.endpoint_file.fast_directory", lambda: None)
    monkeypatch.setattr("elastipod_agent.main.gettempdir", fail)
    assert agent.run_alone("train.py") == 1
    assert "No usable temporary directory found" in agent.termination_message


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_an_interrupt_ends_workers_and_agent(agent: AgentInProcess, number: signal.Signals) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        os.kill(os.getpid(), number)
        until(lambda: "gone" in agent.printed(), "the end")

    assert agent.run(DRAINS, scenario) == 128 + number
    assert f"{number.name}: leaving now" in agent.printed()


def test_a_second_sigterm_ends_what_runs(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: agent.status()["terminating"], "terminating")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: "gone" in agent.printed(), "the end")

    assert agent.run(DRAINS, scenario) == 143


def test_shutdown_ends_the_workers(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid", 2)
        assert agent.call("POST", "/shutdown") == (200, None)

    assert agent.run(DRAINS, scenario, "--nproc-per-node=2") == 0
    assert len(pids(agent)) == 2
    until(
        lambda: not [pid for pid in pids(agent) if Path(f"/proc/{pid}").exists()],
        "the workers' parents to collect them",
    )


def test_a_gentle_stop_sends_the_chosen_signal_first(agent: AgentInProcess) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n" + WAITS
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen["failure"]) == (False, None)

    agent.run(script, scenario, "--shutdown-signal=SIGTERM")
    assert "bye" in agent.printed()


def test_who_ignores_the_chosen_signal_is_killed_after_the_patience(agent: AgentInProcess) -> None:
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        asked_at = time.monotonic()
        agent.stop(1)
        agent.until("ready")
        assert time.monotonic() - asked_at >= 1

    agent.run(script, scenario, "--shutdown-signal=SIGTERM", "--shutdown-timeout=1")
