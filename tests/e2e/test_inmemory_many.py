"""Hundreds of schedules in memory, of replicated and of sharded state: `make test-long NAME=inmemory`.

Environment: SCHEDULES, how many at least (500; each fourth of sharded state, where both states have its fault). RUN_SECONDS: no
further one begins after so long. RESUME=1: go on with what an earlier run left in .run/long/inmemory-schedules.jsonl, and play again
what failed there. AT_A_TIME: how many are played at a time (2).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.commit_under_test import commit_under_test
from tests.e2e import test_inmemory as replicated
from tests.e2e import test_inmemory_sharded as sharded
from tests.e2e.conftest import ROOT
from tests.e2e.inmemory_job import train_alone
from tests.e2e.inmemory_verdicts import LEAST_IN_MEMORY, Schedule, Verdict, Verdicts
from tests.e2e.torch_fork_server import TorchForkServer
from tests.long_runs import LongRun

TOTAL = int(os.environ.get("SCHEDULES", "500"))
RUN_SECONDS = float(os.environ.get("RUN_SECONDS", "inf"))
AT_A_TIME = int(os.environ.get("AT_A_TIME", "2"))
GOES_ON = os.environ.get("RESUME") == "1"
SCHEDULE_LIMIT_S = 600.0  # a job that has not ended by then waits for ever, also beside other load
ENOUGH = 500  # schedules with which every moment and kind can be asked for
REPORTS = ROOT / ".run" / "long"


class Run:
    """One run: plays schedules in threads, and keeps what became of each."""

    def __init__(self, folder: Path, long_run: LongRun) -> None:
        self._folder = folder
        self._long_run = long_run
        self._commit = commit_under_test()
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # each lost connection is told with a long trace otherwise
        self._servers = TorchForkServer({**os.environ, "OMP_NUM_THREADS": "1", **quiet})
        one_process, one_of_sharded = folder / "one-process", folder / "one-process-sharded"
        one_process.mkdir()
        train_alone(one_process, self._servers)
        self._weights = (one_process / "final-single").read_text()
        one_of_sharded.mkdir()
        train_alone(one_of_sharded, self._servers, sharded.SHARDED_WORKER)
        self._state = sharded.whole_state(one_of_sharded)
        self.verdicts = Verdicts(REPORTS / "inmemory-schedules.jsonl", goes_on=GOES_ON)

    def close(self) -> None:
        self._servers.close()

    def play(self, first: int, total: int, until: float) -> bool:
        """Play this many, and more while a fault was seen too seldom, at most twice as many; False when the time was up before.

        What failed in an earlier run is played again.
        """
        again = self.verdicts.unsettled()
        under_way: dict[Future[Verdict], Schedule] = {}

        def wanted() -> bool:
            played = len(self.verdicts.all()) + len(under_way)
            is_rare = total >= ENOUGH and played < 2 * total and bool(self.verdicts.rare())
            return bool(again) or played < total or is_rare

        with ThreadPoolExecutor(AT_A_TIME) as threads:
            while under_way or (wanted() and time.monotonic() < until):
                while len(under_way) < AT_A_TIME and wanted() and time.monotonic() < until:
                    each = again.pop() if again else self.verdicts.next(list(under_way.values()), first)
                    under_way[threads.submit(self._verdict, *each)] = each
                for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                    del under_way[done]
                    self.verdicts.add(done.result())
                self.report()
        return not wanted()

    def report(self) -> None:
        self._long_run.count(**self.verdicts.counts())
        self._long_run.detail(**self.verdicts.details())
        self._long_run.write()

    def _verdict(self, state: str, seed: int) -> Verdict:
        folder = self._folder / f"{state}-{seed}"
        began = time.monotonic()
        verdict = Verdict(state, seed, self._commit, 0.0)
        try:
            if state == "replicated":
                played = replicated.play_schedule(seed, folder, self._servers, SCHEDULE_LIMIT_S)
                verdict = verdict.of(played)
                replicated.check_played(played, self._weights)
            else:
                played = sharded.play_schedule(seed, folder, self._servers, SCHEDULE_LIMIT_S)
                verdict = verdict.of(played)
                sharded.check_played(seed, played, self._state)
        except Exception as error:  # the others are played nevertheless
            (REPORTS / f"inmemory-{state}-{seed}.txt").write_text(f"{type(error).__name__}: {error}\n", "utf-8")
            verdict = replace(verdict, problem=f"{type(error).__name__}: {error}".splitlines()[0])
        shutil.rmtree(folder)
        return replace(verdict, seconds=round(time.monotonic() - began, 1))


@pytest.fixture
def many(tmp_path: Path, long_run: LongRun) -> Iterator[Any]:
    run = Run(tmp_path, long_run)
    yield run
    run.close()


@pytest.mark.long("inmemory")
@pytest.mark.timeout(6 * 3600)
def test_many_schedules_end_as_if_nothing_had_happened(many: Run, seed: int) -> None:
    until = time.monotonic() + RUN_SECONDS
    is_complete = many.play(seed, TOTAL, until)
    found = many.verdicts
    assert not found.problems(), "\n".join(found.problems())
    assert is_complete, f"{len(found.all())} schedules were played in {RUN_SECONDS:g} s; RESUME=1 goes on"
    assert found.share_in_memory() >= LEAST_IN_MEMORY, found.counts()
    if TOTAL >= ENOUGH:
        assert not found.rare(), found.table()
