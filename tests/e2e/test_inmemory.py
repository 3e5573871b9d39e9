"""Resizes and recoveries in memory, with real worker processes: no step is lost, no sample is used twice, no bit differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.inmemory_job import WORKER, Ended, InMemoryJob, Resize
from tests.e2e.torch_fork_server import TorchForkServer

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import AuditReport, audit
from elastipod.chaos import FaultKind, Moment, PlannedFault

LIMIT_S = 60.0
JOINED = re.compile(r"pid (\d+) generation (\d+) rank (\d+) of (\d+) after step (\d+)")


@pytest.fixture(scope="module")
def servers() -> Iterator[TorchForkServer]:
    server = TorchForkServer({**os.environ, "OMP_NUM_THREADS": "1"})
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights that a single process ends with, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, str(WORKER), f'{{"folder": "{folder}", "step_s": 0}}']
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=200, stdout=subprocess.DEVNULL)
    return (folder / "final-single").read_text()


class Played:
    """A job that has ended, and what its ranks left."""

    def __init__(self, folder: Path, ended: Ended) -> None:
        self.folder, self.ended = folder, ended
        assert ended.is_complete, f"the job did not end:\n{self.told()}"
        self.finals = {path.read_text() for path in folder.glob("final-*")}
        self.report: AuditReport = audit(read_logs(folder / "samples"))

    def told(self) -> str:
        """All that happened, for a failing test."""
        outputs = sorted(self.folder.glob("output-*"))
        return "\n".join(
            [*self.ended.log, *(f"-- {path.name}\n{path.read_text('utf-8', 'replace')}" for path in outputs)]
        )

    def joined(self, generation: int) -> dict[int, tuple[int, int, int]]:
        """Give, by rank, the pid, the world size and the step with which a generation began."""
        found = (tuple(map(int, match)) for match in JOINED.findall(self.told()))
        return {rank: (pid, size, step) for pid, number, rank, size, step in found if number == generation}


@pytest.fixture
def play(tmp_path: Path, servers: TorchForkServer) -> Any:
    """Play a job to its end."""

    def run(**job: Any) -> Played:
        return Played(tmp_path, InMemoryJob(tmp_path, servers, **job).run(LIMIT_S))

    return run


def test_a_replaced_rank_is_filled_by_the_one_that_kept_its_process(play: Any, undisturbed: str) -> None:
    job = play(size=2, faults=[PlannedFault(FaultKind.KILL, Moment.BACKWARD, rank=1, step=8)])
    first, second = job.joined(1), job.joined(2)
    assert (job.ended.generations, job.ended.faults) == (2, 1), job.told()
    assert second[0][0] == first[0][0], "the survivor kept its process"
    assert second[1][0] != first[1][0]
    assert {step for _, _, step in second.values()} == {7}, "the step in work is computed again, no other"
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


def test_a_rank_that_holds_the_reduced_gradients_commits_though_its_peer_dies(play: Any, undisturbed: str) -> None:
    job = play(size=2, faults=[PlannedFault(FaultKind.KILL, Moment.BEFORE_APPLY, rank=0, step=8)])
    assert {step for _, _, step in job.joined(2).values()} == {8}, "no step is lost"
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()


def test_planned_changes_keep_processes_and_repeat_no_step(play: Any, undisturbed: str) -> None:
    job = play(size=2, resizes=[Resize(5, 4), Resize(12, 2)])
    worlds = [job.joined(generation) for generation in (1, 2, 3)]
    assert [len(world) for world in worlds] == [2, 4, 2]
    assert worlds[0][0][0] == worlds[1][0][0] == worlds[2][0][0], "rank 0 is one process"
    assert job.ended.processes == 4
    assert not any(job.report.steps_repeated.values()), job.told()
    assert (job.finals, job.report.exact) == ({undisturbed}, True), job.told()
