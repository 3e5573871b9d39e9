"""Kill storms over the agents of a two-pod job, all of the agent's parts switched on: every gust ends in a READY agent."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.agent_process import AgentProcess, until
from tests.e2e.storm import PLAIN, STANDING, TORCH, Callers, Pod, Storm, Tally, bad_lines
from tests.e2e.warm_run import make_bare_python
from tests.long_runs import LongRun

pytestmark = pytest.mark.timeout(120)

MODES = ("warm", "cold", "inprocess", "warm inprocess")
GROWTH_BYTES = 12 << 20


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the standard library only: its warm server is there at once."""
    return make_bare_python(tmp_path_factory.mktemp("bare"))


@contextmanager
def storm_over(folder: Path, mode: str, seed: int, python: Path | str, script: str = "") -> Iterator[Storm]:
    """Give a storm over two agents, one with two workers; in the end both leave and nothing of theirs is left."""
    is_warm, is_standing = "warm" in mode, "inprocess" in mode
    folder.mkdir()
    (folder / "storm_train.py").write_text(script or (STANDING if is_standing else PLAIN), "utf-8")
    options = ["--hang-timeout=30", "--shutdown-timeout=2"]
    options += ["--inprocess-restart", "--inprocess-timeout=2"] if is_standing else []
    pods: list[Pod] = []
    agents: list[AgentProcess] = []
    try:
        for count in (1, 2):
            arguments = [f"--nproc-per-node={count}", *options, "storm_train.py"]
            agents.append(AgentProcess(folder, arguments, env={"PYTHON_EXEC": str(python)}, is_warm=is_warm))
        for agent in agents:
            until(agent.answers, "the agent's server")
            agent.until("ready", 60)
        pods = [Pod(agent) for agent in agents]
        rng = random.Random(seed)
        yield Storm(pods, folder, rng, is_warm=is_warm, is_standing=is_standing, deadline_s=30)
        for number, pod in enumerate(pods):
            known = pod.process.children(recursive=True)
            if number:
                pod.process.send_signal(signal.SIGTERM)
                assert pod.agent.process.wait(20) in (0, 1, 143), pod.agent.printed()[-3000:]
            else:
                assert pod.agent.end() in (0, 1), pod.agent.printed()[-3000:]
            until(lambda: not [one for one in known if one.is_running()], "the end of all processes")  # noqa: B023
            assert not bad_lines(pod), pod.agent.printed()
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()
    assert not any(pod.folder.exists() for pod in pods), "nothing stays in shared memory"


def blow(storm: Storm, num_acts: int, longest: int) -> None:
    """Let a storm of so many acts blow, in generations of at most ``longest``; then look at what it has left."""
    for _ in range(2):
        storm.quiet_round(60)
    storm.check_nothing_left()
    before = [(pod.descriptors(), pod.uss(), pod.files()) for pod in storm.pods]
    begun = storm.tally.acts.total()
    with Callers(storm):
        while storm.tally.acts.total() - begun < num_acts:
            storm.round(storm.rng.randint(1, longest))
    storm.quiet_round(60)
    storm.check_nothing_left()
    for pod, (descriptors, uss, files) in zip(storm.pods, before, strict=True):
        until(lambda: not more(pod.descriptors(), descriptors), f"{more(pod.descriptors(), descriptors)} to be closed")  # noqa: B023
        until(lambda: pod.files() <= files, f"{pod.files() - files} to be removed")  # noqa: B023
        assert pod.uss() - uss < GROWTH_BYTES, f"{pod.uss()} bytes after {uss}"
    for pod in storm.pods:
        assert not bad_lines(pod), pod.agent.printed()


def more(now: list[str], before: list[str]) -> list[str]:
    """Give what is open now and was not before, each as often as it is too much."""
    left = list(before)
    found = []
    for one in now:
        if one in left:
            left.remove(one)
        else:
            found.append(one)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_after_a_storm_the_agents_are_as_before(mode: str, tmp_path: Path, python: Path, seed: int) -> None:
    with storm_over(tmp_path / "storm", mode, seed, python) as storm:
        blow(storm, 20, 6)


@pytest.mark.timeout(900)
@pytest.mark.long("agent-storm")
@pytest.mark.parametrize("mode", MODES)
def test_long_storms(mode: str, tmp_path: Path, python: Path, long_run: LongRun) -> None:
    for seed in range(long_run.seed, long_run.seed + 2):
        with storm_over(tmp_path / f"storm-{seed}", mode, seed, python) as storm:
            blow(storm, 120, 12)
        _count(long_run, mode, storm.tally)


@pytest.mark.timeout(900)
@pytest.mark.long("agent-storm")
def test_long_storm_over_torch(tmp_path: Path, long_run: LongRun) -> None:
    with storm_over(tmp_path / "storm", "warm", long_run.seed, sys.executable, TORCH) as storm:
        blow(storm, 60, 4)
    _count(long_run, "torch", storm.tally)


def _count(long_run: LongRun, mode: str, tally: Tally) -> None:
    counts: dict[str, int | float] = {f"acts: {act}": number for act, number in sorted(tally.acts.items())}
    counts |= {f"stopped when {state}": number for state, number in sorted(tally.states.items())}
    counts |= {"generations": tally.generations, "status calls": tally.calls, "acts": tally.acts.total()}
    old = long_run.counts
    totals = {f"{mode}: {name}": old.get(f"{mode}: {name}", 0) + number for name, number in counts.items()}
    slowest = {"slowest ready s": tally.slowest_ready_s, "slowest call s": tally.slowest_call_s}
    totals |= {f"{mode}: {name}": max(old.get(f"{mode}: {name}", 0), round(s, 2)) for name, s in slowest.items()}
    long_run.count(**totals)
