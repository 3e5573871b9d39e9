"""Silent hangs: found, explained with stacks, and not invented."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess
from tests.e2e.agent_scripts import RunAgent

# The limits below are long enough for a worker that gets no processor for some seconds.
# Steps of 10 ms; after some of them rank 1 hangs as the script's argument says, and rank 0 waits for it, as in a collective.
TRAIN = """
import ctypes, os, sys, time
from pathlib import Path
from elastipod import report
from elastipod.worker_file import WorkerFile
how, rank = sys.argv[1], int(os.environ["LOCAL_RANK"])

def meet_the_other_ranks():
    home, ranks = Path(os.environ["HOME"]), range(int(os.environ["LOCAL_WORLD_SIZE"]))
    (home / f"up-{rank}").touch()
    while not all((home / f"up-{one}").exists() for one in ranks):
        time.sleep(0.01)

def drained():
    return WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"]).event().level > 0

def hang_asleep():
    while True:
        time.sleep(600)

def hang_in_c_code_with_the_gil():
    while True:
        ctypes.PyDLL(None).sleep(600)

def wait_for_the_other_rank():
    while True:
        time.sleep(0.05)

def evaluate_for_long():
    for _ in range(100):
        time.sleep(0.1)
        report(20, 200)

meet_the_other_ranks()
for step in range(1, 21):
    time.sleep(0.01)
    report(step, step * 10)
print("made its steps", flush=True)
if how == "evaluate":
    evaluate_for_long()
elif how == "hang":
    (hang_asleep if rank == 1 else wait_for_the_other_rank)()
elif how == "alone":
    hang_asleep()
elif how == "gil":
    (hang_in_c_code_with_the_gil if rank == 1 else wait_for_the_other_rank)()
elif how == "pause":
    time.sleep(0.7)
elif how == "save for long":
    while not drained():
        time.sleep(0.05)
        report(20, 200)
    time.sleep(10)
"""


@pytest.mark.parametrize(
    ("how", "function"),
    [
        pytest.param("hang", "hang_asleep", id="asleep"),
        pytest.param("gil", "hang_in_c_code_with_the_gil", id="in C code that holds the GIL"),
    ],
)
def test_a_silent_hang_is_a_fault_with_the_stacks_of_all_workers(
    run_agent: RunAgent, tmp_path: Path, how: str, function: str
) -> None:
    last_words = tmp_path / "termination-log"
    last_words.touch()
    agent = run_agent(
        TRAIN,
        "--nproc-per-node=2",
        "--hang-timeout=5",
        script_args=(how,),
        env={"ELASTIPOD_TERMINATION_LOG": str(last_words)},
    )
    agent.start(1, rank=1, nnodes=2)
    seen = agent.until("faulted")
    assert seen["reason"] == "WorkerUnhealthy"
    message = seen["message"]
    assert re.match(
        r"no step for [0-9.]+ s \(limit 5 s[;)]", message
    )  # the agent looks too seldom to see a step's time
    assert "ranks 2-3 stand at step 20 since 2" in message.splitlines()[0]
    assert f"  {function} (" in message
    assert "  wait_for_the_other_rank (" in message
    assert last_words.read_text("utf-8") == message
    agent.until_printed(f"in {function}\n")  # the log is written beside the fault, not before it
    agent.until_printed("in wait_for_the_other_rank\n")
    printed = agent.printed().splitlines()
    assert [line for line in printed if line.startswith("[default1]:") and line.endswith(f"in {function}")]
    assert [line for line in printed if line.startswith("[default0]:") and line.endswith("in wait_for_the_other_rank")]
    agent.stop(1)
    assert agent.until("ready")["drained"] is False


@pytest.mark.slow
def test_a_hanging_worker_behind_a_shell_is_found_too(run_agent: RunAgent, tmp_path: Path) -> None:
    """The process that answers is then not the one that the agent started; and nobody else gets the signal."""
    shell = tmp_path / "run.sh"
    agent = run_agent(TRAIN, "--hang-timeout=5", "--no-python", "/bin/sh", str(shell))
    shell.write_text(f"set -e\n{sys.executable} train.py alone\necho the shell went on\n", "utf-8")
    agent.start(1)
    assert "  hang_asleep (" in agent.until("faulted")["message"]
    assert "the shell went on" not in agent.printed()


def test_workers_that_offer_no_stacks_are_told_by_what_the_kernel_knows(run_agent: RunAgent) -> None:
    agent = run_agent(
        "import os, time\nfrom elastipod.worker_file import WorkerFile\n"
        "WorkerFile.open(os.environ['ELASTIPOD_WORKER_FILE']).report(0, step=3)\ntime.sleep(600)\n",
        "--hang-timeout=3",
    )
    agent.start(1)
    seen = agent.until("faulted")
    assert "rank 0 stands at step 3 since" in seen["message"]
    assert "rank 0 offers no stacks; process" in seen["message"]
    assert "is in state S (sleeping) with 1 threads" in seen["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "timeout"),
    [
        pytest.param("pause", "0", id="watched by nobody"),
        pytest.param("pause", "auto", id="not silent for long enough"),
        pytest.param("evaluate", "8", id="reports of the same step"),
    ],
)
def test_what_is_no_hang_is_left_alone(run_agent: RunAgent, how: str, timeout: str) -> None:
    agent = run_agent(TRAIN, "--nproc-per-node=2", f"--hang-timeout={timeout}", script_args=(how,))
    agent.start(1)
    assert agent.until("completed")["failure"] is None


@pytest.mark.slow
def test_a_drain_that_takes_its_time_is_no_hang(run_agent: RunAgent) -> None:
    agent: AgentProcess = run_agent(TRAIN, "--hang-timeout=8", script_args=("save for long",))
    agent.start(1)
    agent.until_printed("made its steps")
    agent.drain(1)
    until(lambda: agent.status()["status"] == "ready", "the end of the drain")
    assert agent.status()["failure"] is None


def test_with_virtual_local_ranks_each_worker_still_has_a_place_of_its_own(run_agent: RunAgent) -> None:
    agent = run_agent(
        "import os\nfrom elastipod import report\nfrom elastipod.local_worker import local_worker\n"
        "report(1, 1)\nprint('sees', os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'], 'is', os.environ['RANK'],"
        " local_worker().local_rank, flush=True)\n",
        "--nproc-per-node=2",
        "--virtual-local-rank",
        env={"CUDA_VISIBLE_DEVICES": "4,7"},
    )
    agent.start(1, rank=1, nnodes=2)
    agent.until("completed")
    agent.until_printed("[default0]:sees 0 4 is 2 0")
    agent.until_printed("[default1]:sees 0 7 is 3 1")
