"""Log rules and the way of workers' lines, with real agents, workers and matchers."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.output_load import run_load

# Does what its arguments say, one after the other, in local rank 0; other local ranks repeat the first line for ever.
SAY = """
import os, sys, time
if os.environ["LOCAL_RANK"] != "0":
    while True:
        print(sys.argv[1].partition(":")[2], flush=True)
        time.sleep(0.05)
for what in sys.argv[1:]:
    verb, _, rest = what.partition(":")
    if verb == "out":
        print(rest, flush=True)
    elif verb == "err":
        print(rest, file=sys.stderr, flush=True)
    elif verb == "beat":
        while not os.path.exists("stop-beating"):
            print(rest, flush=True)
            time.sleep(0.05)
    elif verb == "many":
        for number in range(int(rest)):
            print("loss:", number, flush=True)
    elif verb == "wait":
        time.sleep(float(rest))
"""


def rule(name: str, pattern: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "logPattern": pattern, **fields}


def slow(name: str, pattern: str, points: int, **fields: Any) -> dict[str, Any]:
    return rule(name, pattern, metricThreshold=-1, operator="gt", metricEvaluationDataPoints=points, **fields)


def matchers(agent: AgentProcess) -> list[psutil.Process]:
    """Give the agent's matcher processes."""
    children = psutil.Process(agent.process.pid).children()
    return [child for child in children if any("matcher_process" in part for part in command_line(child))]


def kill_a_matcher(agent: AgentProcess) -> bool:
    """Kill one of the agent's matchers; False when there is none."""
    for matcher in matchers(agent):
        with suppress(psutil.NoSuchProcess):
            matcher.kill()
            return True
    return False


def command_line(process: psutil.Process) -> list[str]:
    """Give what a process was started with, nothing for one that has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def descriptors(process: psutil.Process) -> tuple[list[str], int]:
    """Give what the process has open, and its number of Unix sockets; HTTP connections come and go with our calls."""
    targets: list[str] = []
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.append(str(entry.readlink()))
    return sorted(one for one in targets if not one.startswith("socket:")), len(process.net_connections("unix"))


@pytest.mark.parametrize(
    ("says", "log_rule", "reason", "words"),
    [
        pytest.param(
            ["out:something else", "wait:600"],
            rule("JobStart", ".*Experiment configuration.*", expectedStartCutOffInSeconds=0.3),
            "LogHang_JobStart",
            "no line matched .*Experiment configuration.* in the first 0.3 s of the workers",
            id="no first match",
        ),
        pytest.param(
            ["out:loss: 1", "out:loss: 2", "wait:600"],
            rule("Hang", r".*loss: (\d+)", expectedRecurringFrequencyInSeconds=5, expectedStartCutOffInSeconds=200),
            "LogHang_Hang",
            "after 2; the last was: loss: 2",
            id="no further match",
        ),
        pytest.param(
            ["err:loss: 5", "out:loss: 6", "err:loss: 7", "wait:600"],
            slow("Spike", r"loss: (\d+(\.\d+)?)", 3),
            "LogSlow_Spike",
            "the number was above -1 3 times in a row",
            id="numbers on both streams",
        ),
        pytest.param(
            ["out:all is well", "out:Xid 79 on GPU 3", "wait:600"],
            rule("Device", "Xid", faultOnMatch=True),
            "LogFault_Device",
            "a line that means a fault was printed: Xid 79 on GPU 3",
            id="a line that is the fault",
        ),
    ],
)
def test_a_rule_that_is_broken_is_a_fault_in_every_pod(
    run_agent: RunAgent, says: list[str], log_rule: dict[str, Any], reason: str, words: str
) -> None:
    agent = run_agent(SAY, "--nproc-per-node=1", "-r3", "--log-dir=logs", script_args=tuple(says))
    agent.start(1, rank=1, nnodes=2, log_monitoring_configuration=[log_rule])
    seen = agent.until("faulted")
    assert seen["reason"] == reason
    assert words in seen["message"]
    until(lambda: not matchers(agent), "the end of the matcher")


def test_only_local_rank_0_is_watched_and_a_kept_rule_is_no_fault(run_agent: RunAgent) -> None:
    agent = run_agent(SAY, "--nproc-per-node=2", script_args=("out:Xid of others", "many:2000"))
    rules = [
        rule("First", "Xid of others", expectedStartCutOffInSeconds=300, stopPattern="loss: 1999"),
        slow("Enough", r"loss: (\d+)", 2001),
        rule("OnlyOne", "Xid of others", metricThreshold=0, operator="gt"),
    ]
    agent.start(1, log_monitoring_configuration=rules)
    agent.until_printed("[default1]:Xid of others", 20)
    agent.until_printed("[default0]:loss: 1999")
    assert agent.status()["status"] == "running"
    agent.stop(1)
    agent.until("ready")
    assert agent.status().get("reason") is None


@pytest.mark.slow
def test_a_slow_pattern_and_killed_matchers_cost_no_line_and_no_answer(run_agent: RunAgent, tmp_path: Path) -> None:
    count = 20_000
    # Between the halves come lines that are matched and hold no number, until the last matcher was killed.
    says = ("out:" + "x" * 100, f"many:{count // 2}", "beat:loss: none", f"many:{count // 2}", "out:end", "wait:600")
    agent = run_agent(SAY, script_args=says)
    agent.start(
        1,
        log_monitoring_configuration=[
            rule("Evil", "(x+x+)+y|loss: 99999", expectedStartCutOffInSeconds=300),
            slow("All", r"loss: (\d+)", count),
        ],
    )
    for _ in range(3):
        until(lambda: kill_a_matcher(agent), "a matcher")
        assert agent.status()["status"] == "running"
    (tmp_path / "stop-beating").touch()
    seen = agent.until("faulted")
    assert (seen["reason"], seen["failure"]["global_rank"]) == ("LogSlow_All", None)
    assert f"{count} times in a row" in seen["message"]
    agent.until_printed("log rule is no longer monitored", 1)
    assert agent.printed().count("log rule is no longer monitored") == 1
    assert "rule=Evil" in agent.printed()


@pytest.mark.slow
def test_what_the_agent_missed_while_it_was_stopped_is_no_silence(run_agent: RunAgent, tmp_path: Path) -> None:
    agent = run_agent(SAY, script_args=("beat:loss: 1", "wait:600"))
    hang = rule("Hang", "loss: ", expectedRecurringFrequencyInSeconds=8)
    agent.start(1, log_monitoring_configuration=[hang])
    agent.until_printed("loss: 1", 3)
    (worker,) = [one for one in psutil.Process(agent.process.pid).children() if "train.py" in " ".join(one.cmdline())]
    agent.process.send_signal(signal.SIGSTOP)
    worker.suspend()  # the whole pod is frozen, for longer than the rule allows
    time.sleep(10)
    agent.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    worker.resume()
    beats = agent.printed().count("loss: 1")
    agent.until_printed("loss: 1", beats + 3)
    assert agent.status()["status"] == "running"
    (tmp_path / "stop-beating").touch()
    assert agent.until("faulted")["reason"] == "LogHang_Hang"


def test_a_stop_leaves_no_matcher_and_no_descriptor(run_agent: RunAgent) -> None:
    agent = run_agent(SAY, "--shutdown-signal=SIGKILL", script_args=("out:loss: 1", "wait:600"))
    process = psutil.Process(agent.process.pid)
    before = descriptors(process)
    for generation in range(1, 5):
        agent.start(generation, log_monitoring_configuration=[slow("All", r"loss: (\d+)", 2)])
        until(lambda: matchers(agent), "a matcher")
        agent.until_printed("[default0]:loss: 1", generation)
        agent.stop(generation)
        agent.until("ready")
        until(lambda: not process.children(), "the end of a matcher whose start was still under way")
        until(lambda: descriptors(process) == before, "the workers' pipes to be closed")


@pytest.mark.slow
def test_a_full_rush_of_several_ranks_loses_no_line_on_a_slow_console(tmp_path: Path) -> None:
    for tee in ([], ["--tee=3", "--log-dir=logs"]):
        load = run_load(
            tmp_path,
            rate_mb_s=0,
            nproc=3,
            num_lines=30_000,
            options=tee,
            slow_s=0.02,
            rules=[slow("All", r"loss: (\d+)", 10**6)],
        )
        assert load.wrong == []
        assert load.num_lines == load.num_expected == 90_000
    for rank in range(3):
        for stream, name in enumerate(("stdout.log", "stderr.log")):
            (path,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/{name}")
            numbers = [int(line.split()[2]) for line in path.read_text().splitlines()]
            assert numbers == list(range(stream, 30_000, 2))


def test_filtered_lines_of_all_ranks_are_copied_into_one_file(run_agent: RunAgent, tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "print('loss of', rank, flush=True); print('noise', flush=True); print('a,b', rank, flush=True)\n"
        "print('error of', rank, file=sys.stderr, flush=True); print('loss', file=sys.stderr, flush=True)\n"
    )
    agent = run_agent(
        script,
        "--nproc-per-node=2",
        "--tee=1",
        "--log-dir=logs",
        "--duplicate-stdout-filters=loss,a,,b",
        "--duplicate-stderr-filters=error",
    )
    for generation in (1, 2):  # the second run's files are its own
        agent.start(generation)
        agent.until("completed")
        agent.until_printed("INFO completed", generation)  # after all lines of the workers
        agent.stop(generation)
        agent.until("ready")
    for attempt in range(2):
        (out,) = tmp_path.glob(f"logs/*/attempt_{attempt}/filtered_stdout.log")
        (err,) = tmp_path.glob(f"logs/*/attempt_{attempt}/filtered_stderr.log")
        assert sorted(out.read_text().splitlines()) == [
            f"[default{rank}]:{text} {rank}" for rank in range(2) for text in ("a,b", "loss of")
        ]
        assert sorted(err.read_text().splitlines()) == [f"[default{rank}]:error of {rank}" for rank in range(2)]
    assert "no effect inside a pod" not in agent.printed()
