"""Scripts before and after each start, and a training script that is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.worker_scripts import SAYS


def test_pre_and_post_scripts_see_the_size_of_every_start(agent: AgentInProcess) -> None:
    pre, post = agent.folder / "pre.sh", agent.folder / "post.sh"
    pre.write_text('echo "before $1 with $NNODES"\n')
    post.write_text('echo "after $1 with $NNODES"\nexit 5\n')

    def scenario() -> None:
        agent.start(1, nnodes=3)
        seen = agent.until("completed")
        assert seen["message"].startswith("training completed, but")
        assert "exit code 5" in seen["message"]
        assert seen["message"].endswith("after it with 3")

    agent.run(
        SAYS, scenario, f"--pre-train-script={pre}", "--pre-train-args='the run'", f"--post-train-script={post}",
        "--post-train-args=it",
    )  # fmt: skip
    printed = agent.printed()
    marks = "[pre-train]:before the run with 3", "rank 0 of 3", "[post-train]:after it with 3"
    assert sorted(marks, key=printed.index) == list(marks)
    assert agent.termination_message.startswith("training completed, but")


def test_a_failing_pre_script_is_a_fault_with_its_words(agent: AgentInProcess) -> None:
    (agent.folder / "pre.sh").write_text("echo no data at /data >&2\nexit 4\n")

    def scenario() -> None:
        agent.start(1)
        seen = agent.until("faulted")
        assert (seen["reason"], seen["failure"]["global_rank"]) == ("PreScriptFailed", None)
        assert "exit code 4; the end of its output:\nno data at /data" in seen["message"]

    agent.run(SAYS, scenario, "--pre-train-script", str(agent.folder / "pre.sh"))
    assert "rank 0" not in agent.printed()


def test_a_pre_script_that_cannot_be_run_is_a_fault(agent: AgentInProcess) -> None:
    script = agent.folder / "pre"
    script.write_text("#!/nowhere\n")
    script.chmod(0o755)

    def scenario() -> None:
        agent.start(1)
        seen = agent.until("faulted")
        assert seen["reason"] == "PreScriptFailed"

    agent.run(SAYS, scenario, "--pre-train-script", str(script))


def test_a_stop_during_a_long_pre_script_ends_it(agent: AgentInProcess) -> None:
    (agent.folder / "pre.sh").write_text("echo waiting as $$\nexec sleep 600\n")

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("waiting as")
        agent.stop(1)
        assert agent.until("ready")["failure"] is None

    agent.run(SAYS, scenario, "--pre-train-script", str(agent.folder / "pre.sh"))
    (pid,) = re.findall(r"waiting as (\d+)", agent.printed())
    assert not Path(f"/proc/{pid}").exists()
    assert "rank 0" not in agent.printed()


POST = """trap 'echo bye; exit 0' TERM
echo tidying
while [ ! -e "$1" ]; do sleep 0.02; done
echo tidied
"""


def test_a_drain_lets_the_post_script_end(agent: AgentInProcess) -> None:
    """It runs once, when training has completed: nobody would do the rest of its work."""
    post, go = agent.folder / "post.sh", agent.folder / "go"
    post.write_text(POST)

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("tidying")
        agent.drain(1)
        assert agent.status()["status"] == "stopping"
        go.touch()
        agent.until("ready")

    agent.run(SAYS, scenario, f"--post-train-script={post}", f"--post-train-args={go}")
    assert "[post-train]:tidied" in agent.printed()
    assert "bye" not in agent.printed()


@pytest.mark.parametrize("fields", [{}, {"is_graceful": True, "timeout": 0.1}], ids=["a hard stop", "a drain too late"])
def test_a_stop_asks_the_post_script_to_end_before_it_is_killed(agent: AgentInProcess, fields: dict[str, Any]) -> None:
    post = agent.folder / "post.sh"
    post.write_text(POST)

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("tidying")
        agent.stop(1, **fields)
        agent.until("ready")

    agent.run(SAYS, scenario, f"--post-train-script={post}", "--post-train-args=/nowhere/go")
    assert "[post-train]:bye" in agent.printed()
    assert "tidied" not in agent.printed()


@pytest.mark.parametrize("is_done", [True, False], ids=["it ended in the drain", "the drain ended it"])
def test_the_post_script_of_a_stopped_generation_runs_again_in_the_next_one(
    agent: AgentInProcess, is_done: bool
) -> None:
    """What was stopped has not completed, so the next generation does all of it."""
    post, go = agent.folder / "post.sh", agent.folder / "go"
    post.write_text(POST)

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("tidying")
        if is_done:
            agent.drain(1)
            go.touch()
        else:
            agent.stop(1, is_graceful=True, timeout=0.1)
        assert agent.until("ready")["drained"] is False
        go.touch()
        agent.start(2)
        agent.until("completed")

    agent.run(SAYS, scenario, f"--post-train-script={post}", f"--post-train-args={go}")
    assert agent.printed().count("[post-train]:tidying") == 2
    assert agent.printed().count("[post-train]:tidied") == 1 + is_done


def test_a_missing_training_script_is_a_fault(agent: AgentInProcess) -> None:
    def scenario() -> None:
        (agent.folder / "train.py").unlink()
        agent.start(1)
        seen = agent.until("faulted")
        text = f"training script {agent.folder / 'train.py'} does not exist"
        assert (seen["reason"], seen["message"]) == ("StartFailed", text)

    agent.run(SAYS, scenario)
