"""Kill storms over the agents of a two-pod job, all of the agent's parts switched on: every gust ends in a READY agent."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess, suspend, until_gone
from tests.e2e.storm import Callers, Storm
from tests.e2e.storm_pods import Pod, Tally, bad_lines
from tests.e2e.storm_scripts import PLAIN, STANDING, TORCH
from tests.e2e.warm_start_run import make_bare_python, run_warm
from tests.long_runs import LongRun
from tests.nonempty import some
from tests.patience import PATIENCE_S
from tests.slow import all_but_first

MODES = ("warm", "cold", "inprocess", "warm inprocess")
GROWTH_BYTES = 12 << 20


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the standard library only: its fork server is there at once."""
    return make_bare_python(tmp_path_factory.mktemp("bare"))


@contextmanager
def storm_over(
    folder: Path,
    mode: str,
    seed: int,
    python: Path | str,
    *,
    script: str = "",
    nproc: tuple[int, int] = (1, 2),
    options: tuple[str, ...] = (),
) -> Iterator[Storm]:
    """Give a storm over two agents with so many workers; in the end both leave and nothing of theirs is left."""
    is_warm, is_standing = "warm" in mode, "inprocess" in mode
    folder.mkdir()
    (folder / "storm_train.py").write_text(script or (STANDING if is_standing else PLAIN), "utf-8")
    arguments = ["--hang-timeout=30", "--shutdown-timeout=2", *options]
    arguments += ["--inprocess-restart", "--inprocess-timeout=6"] if is_standing else []
    pods: list[Pod] = []
    agents: list[AgentProcess] = []
    try:
        for count in nproc:
            command = [f"--nproc-per-node={count}", *arguments, "storm_train.py"]
            agents.append(AgentProcess(folder, command, env={"PYTHON_EXEC": str(python)}, is_warm=is_warm))
        for agent in agents:
            until(agent.answers, "the agent's server")
            agent.until("ready")
        pods = [Pod(agent) for agent in agents]
        rng = random.Random(seed)
        storm = Storm(list(pods), folder, rng, is_warm=is_warm, is_standing=is_standing, deadline_s=PATIENCE_S)
        yield storm
        for number, pod in enumerate(storm.pods):
            known = pod.process.children(recursive=True)
            if number:
                pod.process.send_signal(signal.SIGTERM)
                assert pod.agent.process.wait(PATIENCE_S) in (0, 1, 143), pod.agent.printed()[-3000:]
            else:
                assert pod.agent.end() in (0, 1), pod.agent.printed()[-3000:]
            until_gone(known)
            assert not bad_lines(pod), pod.agent.printed()
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.send_signal(signal.SIGCONT)
                agent.process.send_signal(signal.SIGINT)  # with all that is below it
                with suppress(subprocess.TimeoutExpired):
                    agent.process.wait(10)
                agent.process.kill()
                agent.process.wait()
    assert not any(pod.folder.exists() for pod in pods), "nothing stays in shared memory"


def blow(storm: Storm, num_acts: int, longest: int) -> None:
    """Let a storm of so many acts blow, in generations of at most ``longest``; then look at what it has left."""
    for _ in range(2):
        storm.quiet_round()
    storm.check_nothing_left()
    before = [(pod.descriptors(), pod.uss(), pod.files()) for pod in storm.pods]
    begun = storm.tally.acts.total()
    with Callers(storm):
        while storm.tally.acts.total() - begun < num_acts:
            storm.round(storm.rng.randint(1, longest))
    storm.quiet_round()
    storm.check_nothing_left()
    storm.count_starts()
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


@pytest.mark.parametrize("mode", all_but_first(["warm inprocess", "cold"]))  # the long run has the others
def test_after_a_storm_the_agents_are_as_before(mode: str, tmp_path: Path, python: Path, seed: int) -> None:
    with storm_over(tmp_path / "storm", mode, seed, python) as storm:
        blow(storm, 20, 6)


def test_a_stopped_process_that_was_forked_ahead_ends_with_the_agent(tmp_path: Path, python: Path) -> None:
    (tmp_path / "train.py").write_text("", "utf-8")
    with run_warm(tmp_path, "--nproc-per-node=2", "train.py", python=python) as run:
        run.until_warm()
        pod = Pod(run.agent)
        for process in until(lambda: len(found := pod.ahead()) == 2 and found, "processes forked ahead"):
            suspend(process)


def test_a_stopped_process_that_was_forked_ahead_becomes_no_worker(tmp_path: Path, python: Path) -> None:
    (tmp_path / "train.py").write_text("", "utf-8")
    with run_warm(tmp_path, "train.py", python=python) as run:
        run.until_warm()
        pod = Pod(run.agent)
        (process,) = until(pod.ahead, "the process forked ahead")
        suspend(process)
        assert run.generation(1)["status"] == "completed"
        assert run.starts() == (1, 0), run.events("workers start cold")
        until_gone([process])


def test_a_server_that_is_stopped_while_it_imports_is_not_waited_for(tmp_path: Path, python: Path) -> None:
    (tmp_path / "slow.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(600)\n", "utf-8")
    (tmp_path / "train.py").write_text("", "utf-8")
    with run_warm(tmp_path, "--preload=slow", "train.py", python=python) as run:
        server = run.server()
        suspend(server)
        assert run.generation(1)["status"] == "completed"
        assert "it is stopped by a signal" in run.events("workers start cold")[0]
        until(lambda: not server.is_running(), "the end of the stopped server")


def test_an_outdated_server_is_replaced_by_one(tmp_path: Path, python: Path) -> None:
    (tmp_path / "recipe.py").write_text("", "utf-8")
    (tmp_path / "train.py").write_text("", "utf-8")
    with run_warm(tmp_path, "--preload=recipe", "train.py", python=python) as run:
        run.until_warm()
        (tmp_path / "recipe.py").write_text("NAME = 'renewed'\n", "utf-8")
        assert run.generation(1)["status"] == "completed"
        assert run.events("fork server is restarted")
        time.sleep(1.5)  # a replacement for a lost server would come after a second
        assert run.agent.printed().count("fork server is ready") == 2
        assert not run.events("fork server is lost")


def test_a_stop_during_the_post_train_script_brings_the_standing_workers_back(tmp_path: Path) -> None:
    (tmp_path / "post.sh").write_text("echo after\nsleep 600\n", "utf-8")
    with storm_over(tmp_path / "run", "inprocess", 1, sys.executable, options=_script(tmp_path, "post")) as storm:
        pod = storm.pods[1]
        for generation in (1, 2):
            (tmp_path / "run" / f"over-{generation}").touch()
            assert pod.agent.start(generation)[0] == 200
            pod.agent.until_printed("[post-train]:after", generation)
            assert pod.agent.stop(generation)[0] == 200
            pod.agent.until("ready")


def test_a_drain_of_a_run_that_no_worker_has_begun_is_no_late_one(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    (tmp_path / "pre.sh").write_text(f"while [ -e {hold} ]; do sleep 0.05; done\n", "utf-8")
    with storm_over(tmp_path / "run", "inprocess", 1, sys.executable, options=_script(tmp_path, "pre")) as storm:
        pod = storm.pods[1]
        (tmp_path / "run" / "over-1").touch()
        pod.agent.start(1)
        pod.agent.until("completed")
        hold.touch()
        pod.agent.stop(1)
        pod.agent.until("ready")
        assert not pod.below()["worker"], "they are started anew after the script"
        assert pod.agent.start(2)[0] == 200
        assert pod.agent.drain(2, timeout=600)[0] == 200
        hold.unlink()
        seen = pod.agent.until("ready")
        assert (seen["drained"], seen.get("reason")) == (False, None)
        until(lambda: len(pod.below()["worker"]) == 2, "the workers, which may be between fork and exec")


def _script(folder: Path, name: str) -> tuple[str, ...]:
    return (f"--{name}-train-script={folder / name}.sh",)


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
    with storm_over(tmp_path / "storm", "warm", long_run.seed, sys.executable, script=TORCH, nproc=(1, 1)) as storm:
        blow(storm, 60, 4)
    _count(long_run, "torch", storm.tally)


@pytest.mark.long("agent-storm")
@pytest.mark.parametrize("option", ["", "--inprocess-restart"])
def test_a_sigterm_at_any_moment_of_the_beginning(option: str, tmp_path: Path, python: Path, long_run: LongRun) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n", "utf-8")
    rng = random.Random(long_run.seed)
    codes: Counter[int] = Counter()
    for _ in range(40):
        agent = AgentProcess(
            tmp_path, [*filter(None, [option]), "train.py"], env={"PYTHON_EXEC": str(python)}, is_warm=True
        )
        time.sleep(rng.random() * 0.5)
        agent.process.terminate()
        codes[agent.process.wait(PATIENCE_S)] += 1
        assert not [line for line in agent.printed().splitlines() if "Traceback" in line or "failed" in line]
    assert set(some(codes)) <= {143, -signal.SIGTERM}, "after it, or before it could be caught"
    long_run.count(**{f"ended {code}{option}": number for code, number in codes.items()})


@pytest.mark.long("agent-storm")
def test_a_fault_in_a_pod_that_is_terminated_is_its_end(tmp_path: Path, long_run: LongRun) -> None:
    """Standing workers wait for the operator's word after a fault; the word may never come."""
    with storm_over(tmp_path / "storm", "inprocess", long_run.seed, sys.executable) as storm:
        for pod in storm.pods:
            assert pod.agent.start(1)[0] == 200
            pod.agent.until_printed("run 1 rank")
            pod.process.terminate()
            until(lambda: pod.agent.status()["terminating"], "terminating")  # noqa: B023
            pod.below()["worker"][0].kill()
            pod.agent.until("faulted")
        for pod in some(storm.pods):
            assert pod.agent.process.wait(PATIENCE_S) == 1
        storm.pods.clear()


def _count(long_run: LongRun, mode: str, tally: Tally) -> None:
    counts: dict[str, int | float] = {f"acts: {act}": number for act, number in sorted(tally.acts.items())}
    counts |= {f"stopped when {state}": number for state, number in sorted(tally.states.items())}
    counts |= {"generations": tally.generations, "status calls": tally.calls, "acts": tally.acts.total()}
    counts |= {"warm starts": tally.warm_starts, "cold starts": tally.cold_starts}
    old = long_run.counts
    totals = {f"{mode}: {name}": old.get(f"{mode}: {name}", 0) + number for name, number in counts.items()}
    slowest = {"slowest ready s": tally.slowest_ready_s, "slowest call s": tally.slowest_call_s}
    totals |= {f"{mode}: {name}": max(old.get(f"{mode}: {name}", 0), round(s, 2)) for name, s in slowest.items()}
    long_run.count(**totals)
