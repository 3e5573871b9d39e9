"""Workers that stop making steps: found, explained with their stacks and ended; the agent in the process of the test."""

from __future__ import annotations

import pytest
from tests.agent_client import until
from tests.unit.agent.agent_in_process import AgentInProcess

# The limits below are long enough for a worker that gets no processor for some seconds.
# Each rank reports steps 1 to 5; then rank 1 hangs, and rank 0 in a wait for it. Arguments: what they do otherwise. Slow steps are
# seen one by one, so the agent knows how long they take.
HANGS = """
import os, sys, threading, time
from elastipod.stack_signal import enable_stack_signal
from elastipod.worker_file import WorkerFile
rank = int(os.environ["LOCAL_RANK"])
page = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])
if "without-stacks" not in sys.argv:
    enable_stack_signal(page, rank)

def lost_in_thought():
    time.sleep(600)

def wait_for_peer():
    lost_in_thought()

for step in range(1, 6):
    page.report(rank, step=step + rank)
    time.sleep(0.8 if "slow steps" in sys.argv else 0.01)
print("has stopped", flush=True)
if "acknowledged" in sys.argv:
    page.acknowledge(rank)
    time.sleep(8)
    sys.exit(0)
(lost_in_thought if rank else wait_for_peer)()
"""


def test_a_hang_is_a_fault_with_steps_and_stacks(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1, rank=1, nnodes=2)
        agent.until_printed("has stopped", 2)
        seen = agent.until("faulted")
        assert seen["reason"] == "WorkerUnhealthy"
        first, *rest = seen["message"].splitlines()
        assert first.startswith("no step for ")
        assert "(limit 5 s; a step usually takes " in first
        assert "rank 2 stands at step 5 since " in first
        assert "rank 3 stands at step 6 since " in first
        at = rest.index("rank 2 in the main thread, innermost call first:")
        frames = [line.split()[0] for line in rest[at + 1 : at + 4]]
        assert frames == ["lost_in_thought", "wait_for_peer", "<module>"]
        assert rest.index("rank 3 in the main thread, innermost call first:") > at, "the rank that is behind tells more"
        agent.stop(1)
        agent.until("ready")

    agent.run(HANGS, scenario, "--nproc-per-node=2", "--hang-timeout=5", script_args=["slow steps"])
    lines = agent.printed().splitlines()
    for rank, function in enumerate(["wait_for_peer", "lost_in_thought"]):
        stacks = [line for line in lines if line.startswith(f"[default{rank}]:") and f"in {function}" in line]
        assert len(stacks) == 1, "each worker's own stack, once"


@pytest.mark.slow
def test_of_a_worker_that_offers_no_stacks_the_kernel_s_facts_are_told(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        message = agent.until("faulted")["message"]
        assert "rank 0 offers no stacks; process " in message
        assert "is in state S (sleeping) with 1 threads" in message

    agent.run(HANGS, scenario, "--hang-timeout=5", script_args=["without-stacks"])
    assert "[default0]:offers no stacks; process " in agent.printed()


@pytest.mark.parametrize("options", [("--hang-timeout=0",), ("--hang-timeout=600",)], ids=["off", "long"])
def test_no_worker_hangs_before_its_time_or_without_a_limit(agent: AgentInProcess, options: tuple[str, ...]) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("has stopped")
        agent.stop(1)
        seen = agent.until("ready")
        assert seen.get("reason") is None

    agent.run(HANGS, scenario, *options)


def test_workers_that_have_agreed_to_leave_do_not_hang(agent: AgentInProcess) -> None:
    """The event may have come through another pod."""

    def scenario() -> None:
        agent.start(1)
        until(lambda: agent.status()["drained"], "the end of the drain")
        assert agent.status()["reason"] == "Drained"

    agent.run(HANGS, scenario, "--hang-timeout=5", script_args=["acknowledged"])
    assert "no step for" not in agent.printed()


@pytest.mark.slow
def test_a_long_report_is_cut_in_the_log(agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod_agent.workers.hang_monitor._MAX_LOG_LINES", 2)

    def scenario() -> None:
        agent.start(1)
        agent.until("faulted")

    agent.run(HANGS, scenario, "--hang-timeout=5")
    lines = agent.printed().splitlines()
    stacks = [line for line in lines if line.startswith("[default0]:") and ("in " in line or "thread" in line)]
    assert len(stacks) == 2
    assert any("more lines of stacks are left out" in line for line in lines)
