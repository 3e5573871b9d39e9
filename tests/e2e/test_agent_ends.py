"""How a real agent process and its workers end: signals, shutdown, scripts around each start, storms."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess, is_gone
from tests.e2e.agent_scripts import FAMILY, POLL, SAY_RANK, RunAgent, _below, worker_pids
from tests.patience import PATIENCE_S


def test_sigterm_is_told_at_once_and_training_goes_on_until_the_drain(run_agent: RunAgent) -> None:
    agent = run_agent(POLL)
    agent.start(1)
    agent.until_printed("pid")
    agent.process.terminate()
    until(lambda: agent.status()["terminating"], "terminating")
    assert agent.status()["status"] == "running"
    agent.drain(1)
    assert agent.until("ready")["drained"] is True
    assert agent.call("POST", "/shutdown")[0] == 200
    assert agent.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("script", "state", "code"),
    [
        pytest.param(None, "ready", 143, id="before any run"),
        pytest.param(SAY_RANK, "completed", 0, id="after completion"),
        pytest.param("raise SystemExit(9)", "faulted", 1, id="after a fault"),
    ],
)
def test_sigterm_ends_an_idle_agent_quickly(run_agent: RunAgent, script: str | None, state: str, code: int) -> None:
    agent = run_agent(script or SAY_RANK)
    if script:
        agent.start(1)
    agent.until(state)
    agent.process.terminate()
    assert agent.process.wait(PATIENCE_S) == code


def test_shutdown_ends_workers_and_process(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, "--nproc-per-node=2")
    agent.start(1)
    agent.until_printed("pid", 2)
    workers = [psutil.Process(pid) for pid in worker_pids(agent)]
    assert agent.call("POST", "/shutdown") == (200, None)
    assert agent.process.wait(PATIENCE_S) == 0
    assert all(map(is_gone, workers))


def test_a_gentle_stop_sends_the_chosen_signal_first(run_agent: RunAgent) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
        "print('awake', flush=True)\ntime.sleep(600)\n"
    )
    agent = run_agent(script, "--shutdown-signal=SIGTERM")
    agent.start(1)
    agent.until_printed("awake")
    agent.stop(1)
    assert agent.until("ready")["drained"] is False
    agent.until_printed("bye")


def test_a_shell_may_be_the_parent_and_an_orphan_is_collected(run_agent: RunAgent) -> None:
    """A container's command is often a shell line: the agent collects what it adopts, PID 1 or not."""
    agent = run_agent(FAMILY, wrapper=("/bin/sh", "-c", '"$@"; code=$?; exit $code', "sh"))
    agent.start(1)
    agent.until_printed("family")
    assert agent.call("POST", "/shutdown")[0] == 200
    assert agent.process.wait(PATIENCE_S) == 0


def test_pre_and_post_scripts_see_the_size_of_every_start(run_agent: RunAgent, tmp_path: Path) -> None:
    (tmp_path / "pre.sh").write_text('echo "before $1 with $NNODES"\n', "utf-8")
    (tmp_path / "post.sh").write_text('echo "after $1 with $NNODES"\n', "utf-8")
    agent = run_agent(
        SAY_RANK,
        f"--pre-train-script={tmp_path / 'pre.sh'}",
        "--pre_train_args='the run'",
        f"--post-train-script={tmp_path / 'post.sh'}",
        "--post-train-args=it",
    )
    agent.start(1, nnodes=3)
    agent.until("completed")
    agent.until_printed("after it with 3")
    printed = agent.printed()
    assert printed.index("before the run with 3") < printed.index("rank 0 of 3") < printed.index("after it with 3")


def test_a_failing_pre_script_is_a_fault_with_its_words(run_agent: RunAgent, tmp_path: Path) -> None:
    (tmp_path / "pre.sh").write_text("echo no data at /data >&2\nexit 4\n", "utf-8")
    agent = run_agent(SAY_RANK, "--pre-train-script", str(tmp_path / "pre.sh"))
    agent.start(1)
    seen = agent.until("faulted")
    assert seen["reason"] == "PreScriptFailed"
    assert "exit code 4" in seen["message"]
    assert "no data at /data" in seen["message"]


def test_a_stop_during_a_long_pre_script_ends_it(run_agent: RunAgent, tmp_path: Path) -> None:
    (tmp_path / "pre.sh").write_text("echo waiting\nsleep 600\n", "utf-8")
    agent = run_agent(SAY_RANK, "--pre-train-script", str(tmp_path / "pre.sh"))
    agent.start(1)
    agent.until_printed("waiting")
    agent.stop(1)
    agent.until("ready")
    assert not _below(agent)


def test_what_keeps_workers_from_starting_is_told(run_agent: RunAgent, tmp_path: Path) -> None:
    agent = run_agent(SAY_RANK)
    (tmp_path / "train.py").unlink()
    agent.start(1)
    seen = agent.until("faulted")
    assert (seen["reason"], seen["message"]) == (
        "StartFailed",
        f"training script {tmp_path / 'train.py'} does not exist",
    )


def test_a_storm_of_signals_and_calls_ends_in_a_legal_state(run_agent: RunAgent, seed: int) -> None:
    agent = run_agent(POLL, "--nproc-per-node=2")
    process = psutil.Process(agent.process.pid)
    dice = random.Random(seed)
    agent.start(1)
    agent.stop(1)
    agent.until("ready")
    descriptors = process.num_fds()
    for generation in range(2, 22):
        assert agent.start(generation)[0] == 200
        for _ in range(dice.randrange(5)):
            _throw(dice, agent, process, generation)
        if agent.status()["status"] != "ready":
            agent.stop(generation)
        agent.until("ready")
        assert not process.children(recursive=True)
    until(lambda: process.num_fds() <= descriptors, "the descriptors of ended workers to be closed")
    assert "Traceback" not in agent.printed()


def _throw(dice: random.Random, agent: AgentProcess, process: psutil.Process, generation: int) -> None:
    """Do one thing to an agent or its workers, whatever they are doing (a worker may be just about to exec)."""
    child = dice.choice([None, *process.children()])
    act = dice.choice(["kill", "terminate", "suspend", "stop", "drain", "again", "older", "status"])
    if act in ("kill", "terminate", "suspend"):
        if child is not None:
            with suppress(psutil.NoSuchProcess):
                getattr(child, act)()
    elif act == "stop":
        agent.stop(generation)
    elif act == "drain":
        agent.drain(generation, timeout=dice.choice([0, 0.05, 0.5]))
    elif act == "again":
        assert agent.start(generation)[0] == 200
    elif act == "older":
        assert agent.start(generation - 1)[0] == 409
    else:
        assert agent.status()["generation"] == generation
