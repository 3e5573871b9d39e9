"""The whole path's own parts: logs of pods, the Job that is the peer, rows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from bench import cluster
from bench.common.processes import Failed
from bench.common.samples import Samples
from bench.launchers.steplog import Worker
from bench.whole_path.rows import rows
from bench.whole_path.sides import BATCH_JOB, EARLY_CRASH, GROW, MEMORY, NODE_LOSS, TooLate, batch_job
from bench.whole_path.worlds import Worlds, host_pid
from tests.agent_client import until

STEP = "begin {began} 1\ngrouped {began} {rank} 2\nstep {at} {number} {rank} 2\n"


def write(logs: Path, container: str, name: str, **values: float) -> None:
    (logs / container).mkdir(exist_ok=True)
    (logs / container / f"{name}.log").write_text(STEP.format(**values))


def test_processes_of_two_containers_may_have_the_same_number(tmp_path: Path) -> None:
    worlds = Worlds(tmp_path)
    for rank, container in enumerate("ab"):
        write(tmp_path, container, "17", began=5.0, at=6.0 + rank, number=1, rank=rank)
    first = worlds.wait_for(2, since=4.0)
    assert [(one.name, one.rank) for one in first] == [("a/17", 0), ("b/17", 1)]
    for rank, container in enumerate("ab"):
        write(tmp_path, container, "17-2", began=8.0, at=9.0, number=2, rank=rank)
    assert [one.name for one in worlds.wait_for(2, since=4.0)] == ["a/17-2", "b/17-2"], "the present world is past now"
    assert [one.steps[-1].at for one in worlds.again(first)] == [6.0, 7.0]


def test_a_process_is_found_by_its_container_and_its_number_there() -> None:
    with subprocess.Popen(["sleep", "99"], env={"BENCH_LOGS": "/data/one/logs/a-b"}) as process:
        # Until it has become sleep, its environment is that of this process.
        seen = until(lambda: _found(f"a-b/{process.pid}-2"), "the process")
        process.kill()
    assert seen == process.pid
    assert _found(f"a-b/{process.pid}-2") is None
    assert _found(f"a/{os.getpid()}") is None, "another container's"


def _found(name: str) -> int | None:
    try:
        return host_pid(Worker(name))
    except Failed:
        return None


def test_a_job_without_a_log_has_no_worlds_yet(tmp_path: Path) -> None:
    assert Worlds(tmp_path / "logs").read() == []


def test_each_attempt_of_the_job_meets_at_an_address_of_its_own() -> None:
    body = batch_job("peer", attempt=3, size=2)
    assert body["metadata"]["name"] == "peer-3"
    assert (body["spec"]["completions"], body["spec"]["parallelism"], body["spec"]["backoffLimit"]) == (2, 2, 0)
    (container,) = body["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (env["ATTEMPT"], env["WORLD_SIZE"], env["JOB"]) == ("3", "2", "peer")
    assert "master-$ATTEMPT" in container["command"][-1]


def test_a_node_that_is_seen_late_once_is_missed_and_an_event_that_failed_is_told() -> None:
    samples = Samples()
    for seen in (9.0, 15.5):
        samples.add(MEMORY, "node loss seen", seen)
    samples.add(MEMORY, GROW, 0.3)
    samples.fail(BATCH_JOB, GROW, "waited 150 s in vain")
    drawn = {row.metric: row for row in rows(samples, [MEMORY, BATCH_JOB])}
    assert drawn["node loss seen, memory"].met is False
    grown = drawn["grow 2->4, memory"]
    assert (grown.peer, grown.met, grown.is_measured) == (BATCH_JOB, None, False)
    assert "waited 150 s in vain" in grown.how


class Played:
    """A job for which some events fail."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self._failures = failures
        self.happened: list[str] = []

    def __getattr__(self, event: str) -> Callable[..., None]:
        def happen(*arguments: object) -> None:
            self.happened.append(event)
            if event in self._failures:
                raise self._failures[event]

        return happen


def play(failures: Mapping[str, Exception], monkeypatch: pytest.MonkeyPatch) -> tuple[Played, Samples]:
    class PlayedJob(Played):
        def __init__(self, *arguments: object) -> None:
            super().__init__(failures)
            jobs.append(self)

    jobs: list[Played] = []
    samples = Samples(repeat=1)
    monkeypatch.setattr(cluster, "ElasticJob", PlayedJob)
    cluster._play(cast(Any, None), MEMORY, 1, samples)
    return jobs[0], samples


def test_an_early_crash_that_fails_is_told_on_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    job, samples = play({"crash_early": Failed("waited 150 s in vain")}, monkeypatch)
    assert job.happened[-3:] == ["crash", "crash_early", "end"]
    drawn = {row.metric: row for row in rows(samples, [MEMORY])}
    assert "waited 150 s in vain" in drawn["early crash back, memory"].how
    assert "waited 150 s in vain" not in drawn["crash back, memory"].how


def test_a_job_whose_early_crash_came_too_late_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    job, samples = play({"crash_early": TooLate("after 7.0 s it is too late")}, monkeypatch)
    assert job.happened[-3:] == ["crash_early", "lose_node", "end"]
    assert samples.failures[MEMORY, EARLY_CRASH] == ["after 7.0 s it is too late"]


def test_runs_without_a_figure_are_missing_on_its_row() -> None:
    samples = Samples(repeat=5)
    samples.add(MEMORY, "node loss seen", 9.0)
    drawn = {row.metric: row for row in rows(samples, [MEMORY])}
    assert (drawn["node loss seen, memory"].missing, drawn["node loss seen, memory"].met) == (4, False)


def test_without_the_peer_its_column_is_empty() -> None:
    drawn = rows(Samples(), [MEMORY])
    assert {row.peer for row in drawn} == {None}
    assert len({row.metric for row in drawn}) == len(drawn)
    assert any(row.metric.startswith(NODE_LOSS) for row in drawn)
