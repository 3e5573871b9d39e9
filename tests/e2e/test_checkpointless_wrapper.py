"""The original's checkpointless library with our agent: its own wrapper, unchanged, keeps processes over faults and a drain.

No package index has that library, so this needs it on PYTHONPATH (version 1.0.1 was tested) and is skipped elsewhere. What the
library imports from NeMo and its kin is stubbed (checkpointless_stubs.py), and gloo takes the place of NCCL.
"""

from __future__ import annotations

import os
import re
import signal
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import PACKAGES
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.inprocess_pods import Pods
from tests.long_runs import LongRun
from tests.nonempty import every

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("checkpointless_wrapper_worker.py")
LIBRARY = "hyperpod_checkpointless_training"
RANKS = 2
ENOUGH_STEPS = 3  # in a run; after the first two the library recovers in the process


def library_folder() -> Path:
    """Give the folder that holds the library, or skip the test. It is found without being imported."""
    spec = find_spec(LIBRARY)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if Path(folder, "inprocess", "wrap.py").is_file():
            return Path(folder).parent
    pytest.skip(f"needs the original's library {LIBRARY}, which is in no package index; put its folder on PYTHONPATH")


class Wrapped:
    """A pod of two ranks under the library's wrapper."""

    def __init__(self, run_agent: RunAgent, folder: Path) -> None:
        path = os.pathsep.join(map(str, (PACKAGES, ROOT, library_folder())))
        self.agent = run_agent(
            SCRIPT.read_text("utf-8"), f"--nproc-per-node={RANKS}", "--inprocess-restart", "--inprocess-timeout=120",
            env={"PYTHONPATH": path, "HPCT_USE_ROOTLESS": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        self.job = Pods(folder, [self.agent], RANKS)

    def until_trains(self, generation: int) -> dict[int, int]:
        """Wait until each rank has made some steps of a started run; give their processes, by rank."""
        for rank in range(RANKS):
            of_run = (
                rf"run {generation} restarts {generation - 1} rank {rank} of {RANKS} step \d+ which is {ENOUGH_STEPS}\n"
            )
            until(lambda: re.search(of_run, self.agent.printed()), f"steps of rank {rank} in run {generation}")  # noqa: B023 called here
        return self.job.pids(generation)

    def held(self, generation: int) -> dict[int, int]:
        """Give how many steps each rank had in its memory when it entered a run."""
        said = re.findall(rf"run {generation} restarts .* rank (\d) of .* held (\d+) from", self.agent.printed())
        return {int(rank): int(steps) for rank, steps in said}

    def begins_with(self, generation: int) -> int:
        """Give the step that all ranks began a run with."""
        (step,) = set(re.findall(rf"run {generation} restarts .* from (\d+) pid", self.agent.printed()))
        return int(step)

    def goes_on(self, generation: int) -> bool:
        """Tell whether a run began where the one before ended. A fault may come between a step and the line about it."""
        steps = re.findall(rf"run {generation - 1} restarts .* step (\d+) which", self.agent.printed())
        return abs(self.begins_with(generation) - max(map(int, steps))) <= 1


@pytest.mark.long("checkpointless")
def test_the_originals_wrapper_keeps_its_processes(run_agent: RunAgent, tmp_path: Path, long_run: LongRun) -> None:
    wrapped = Wrapped(run_agent, tmp_path)
    agent, job = wrapped.agent, wrapped.job
    job.start(1)
    first = wrapped.until_trains(1)
    assert set(first) == set(range(RANKS))
    assert agent.printed().count("has its rank") == RANKS

    job.order(1, "raise")
    assert agent.until("faulted")["restartMode"] == "in_process_restart"
    job.stop(1, restart_mode="ipr")
    job.start(2)
    assert wrapped.until_trains(2) == first, "no process is new, not even that of the rank that raised"
    assert wrapped.goes_on(2), "with the steps that they had"
    assert every(steps > 0 for steps in wrapped.held(2).values())

    agent.drain(2, timeout=0.2)  # the library knows no elastic event, so this becomes a fault for it
    seen = agent.until("ready")
    assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")
    job.start(3)
    assert wrapped.until_trains(3) == first
    assert wrapped.goes_on(3)

    os.kill(first[1], signal.SIGKILL)
    agent.until("faulted")
    assert psutil.pid_exists(first[0])
    job.stop(3, restart_mode="ipr")
    job.start(4)
    fourth = wrapped.until_trains(4)
    assert (fourth[0] == first[0], fourth[1] == first[1]) == (True, False), "only who died is replaced"
    assert wrapped.goes_on(4)
    assert wrapped.held(4) == {0: wrapped.begins_with(4), 1: 0}, "it has what the other kept"

    job.stop(4, restart_mode="ipr")
    job.order(1, "raise")
    assert agent.start(5) == (
        200,
        None,
    )  # not job.start: rank 1 may be gone from the run before rank 0 has said that it is in it
    assert agent.until("faulted")["restartMode"] == "process_level_restart", "the library's wish after a first step"
    job.stop(5, restart_mode="process_level_restart")
    job.start(6)
    assert not set(wrapped.until_trains(6).values()) & set(fourth.values())
    assert wrapped.begins_with(6) == 0

    for rank in range(RANKS):
        job.order(rank, "finish")
    agent.until("completed")
    long_run.count(runs=6, ranks=RANKS)
