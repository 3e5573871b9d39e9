"""An agent says when its workers save: from the moment at which all of them know of the drain until they have ended."""

from __future__ import annotations

from pathlib import Path

from tests.agent_client import until
from tests.e2e.agent_scripts import RunAgent

# Asks for the event when the file ask-<rank> is there, says what it heard, and ends when the file end-<rank> is there.
ON_ORDER = """
import os, signal, time
from pathlib import Path
from elastipod.worker_file import WorkerFile
home, rank = Path(os.environ["HOME"]), int(os.environ["LOCAL_RANK"])
file = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])
signal.signal(signal.SIGUSR1, lambda *_: None)  # otherwise the agent says after a while that nobody hears of the drain
print("awake", rank, flush=True)
def wait_for(name):
    while not (home / f"{name}-{rank}").exists():
        time.sleep(0.02)
wait_for("ask")
assert file.event().level == 1
file.acknowledge(rank)
wait_for("end")
"""


def test_saving_begins_when_the_last_worker_knows_and_ends_with_the_workers(
    run_agent: RunAgent,
    tmp_path: Path,
) -> None:
    agent = run_agent(ON_ORDER, "--nproc-per-node=2")
    home = tmp_path
    agent.start(1)
    agent.until_printed("awake", 2)
    assert agent.status()["saving"] is False
    agent.drain(1)
    (home / "ask-0").touch()
    before = agent.status()
    assert (before["status"], before["saving"]) == ("stopping", False)
    (home / "ask-1").touch()
    until(lambda: agent.status()["saving"], "the agent to say that all workers know")
    seen = agent.status()
    assert (seen["status"], seen["drained"], seen["version"]) == ("stopping", False, before["version"] + 1)
    for rank in range(2):
        (home / f"end-{rank}").touch()
    seen = agent.until("ready")
    assert (seen["drained"], seen["saving"]) == (True, False)


def test_who_is_ended_hard_saves_nothing(run_agent: RunAgent, tmp_path: Path) -> None:
    agent = run_agent(ON_ORDER)
    agent.start(1)
    agent.until_printed("awake")
    agent.drain(1)
    (tmp_path / "ask-0").touch()
    until(lambda: agent.status()["saving"], "the agent to say that all workers know")
    agent.stop(1)
    seen = agent.until("ready")
    assert (seen["drained"], seen["saving"]) == (False, False)


# What each rank's CheckpointManager says once a checkpoint is durable.
TELLS = """
import os, time
from elastipod.checkpoint.agent_report import report_checkpoint
report_checkpoint(20, "/checkpoints/step-20")
report_checkpoint(40, "/checkpoints/step-40")
print("told", flush=True)
time.sleep(600)
"""


def test_the_newest_durable_checkpoint_reaches_the_operator(run_agent: RunAgent) -> None:
    agent = run_agent(TELLS, "--nproc-per-node=2")
    agent.start(1)
    agent.until_printed("told", 2)
    newest = {"elastipod": {"progressData": "/checkpoints/step-40", "progressCount": 40, "progressReported": True}}
    until(lambda: agent.status().get("progress") == newest, "the agent to say which checkpoint is the newest")
    agent.stop(1)
