"""Hundreds of schedules in memory, of replicated and of sharded state: `make test-long NAME=inmemory`.

Environment: SCHEDULES, how many (500; each fourth of sharded state). RUN_SECONDS: no further one begins after so
long. RESUME=1: go on with what an earlier run left in .run/long/inmemory-schedules.jsonl, and play again what failed there.
AT_A_TIME: how many are played at a time (2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import test_inmemory as replicated
from tests.e2e import test_inmemory_sharded as sharded
from tests.e2e.conftest import ROOT
from tests.e2e.inmemory_job import WORKER
from tests.e2e.inmemory_schedules import KINDS_AT
from tests.e2e.inmemory_verdicts import LEAST_IN_MEMORY, Verdict, Verdicts
from tests.e2e.torch_fork_server import TorchForkServer
from tests.long_runs import LongRun
from tests.patience import PATIENCE_S

TOTAL = int(os.environ.get("SCHEDULES", "500"))
RUN_SECONDS = float(os.environ.get("RUN_SECONDS", "inf"))
AT_A_TIME = int(os.environ.get("AT_A_TIME", "2"))
GOES_ON = os.environ.get("RESUME") == "1"
SCHEDULE_LIMIT_S = 600.0  # a job that has not ended by then waits for ever, also beside other load
ENOUGH = 500  # schedules with which every moment and kind can be asked for
REPORTS = ROOT / ".run" / "long"
Schedule = tuple[str, int]


def schedules(first: int, total: int) -> Iterator[Schedule]:
    """Give the schedules of a run, each fourth of sharded state. Seeds in a row go through all moments and kinds."""
    for at in range(total):
        if at % 4 == 3:
            yield "sharded", first + total - total // 4 + at // 4
        else:
            yield "replicated", first + at - at // 4


def more_of(rare: Iterable[int], first: int) -> list[Schedule]:
    """Give further schedules, beginning at a seed, with the faults at these places of KINDS_AT."""
    wanted = set(rare)
    seeds = range(first, first + len(KINDS_AT))
    return [("replicated", seed) for seed in seeds if seed % len(KINDS_AT) in wanted]


def final_of_one_process(worker: Path, folder: Path) -> None:
    folder.mkdir()
    command = [sys.executable, str(worker), f'{{"folder": "{folder}", "step_s": 0}}']
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)


class Run:
    """One run: plays schedules in threads, and keeps what became of each."""

    def __init__(self, folder: Path, long_run: LongRun) -> None:
        self._folder = folder
        self._long_run = long_run
        self._commit = _commit()
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # each lost connection is told with a long trace otherwise
        self._servers = TorchForkServer({**os.environ, "OMP_NUM_THREADS": "1", **quiet})
        final_of_one_process(WORKER, folder / "one-process")
        self._weights = (folder / "one-process" / "final-single").read_text()
        final_of_one_process(sharded.SHARDED_WORKER, folder / "one-process-sharded")
        self._state = sharded.whole_state(folder / "one-process-sharded")
        self.verdicts = Verdicts(REPORTS / "inmemory-schedules.jsonl", goes_on=GOES_ON)

    def close(self) -> None:
        self._servers.close()

    def play(self, wanted: Iterable[Schedule], until: float) -> bool:
        """Play those that are not settled yet; False when the time was up before all were."""
        left = [each for each in wanted if not self.verdicts.is_settled(*each)]
        under_way: set[Future[Verdict]] = set()
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            while under_way or (left and time.monotonic() < until):
                while left and len(under_way) < AT_A_TIME and time.monotonic() < until:
                    under_way.add(threads.submit(self._verdict, *left.pop(0)))
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for each in done:
                    self.verdicts.add(each.result())
                self.report()
        return not left

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


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture
def many(tmp_path: Path, long_run: LongRun) -> Iterator[Any]:
    run = Run(tmp_path, long_run)
    yield run
    run.close()


@pytest.mark.long("inmemory")
@pytest.mark.timeout(6 * 3600)
def test_many_schedules_end_as_if_nothing_had_happened(many: Run, seed: int) -> None:
    until = time.monotonic() + RUN_SECONDS
    is_complete = many.play(schedules(seed, TOTAL), until)
    first = seed + TOTAL
    while is_complete and TOTAL >= ENOUGH and (rare := many.verdicts.rare()) and first < seed + 2 * TOTAL:
        is_complete = many.play(more_of(rare, first), until)  # faults that did not come to happen: another came first
        first += len(KINDS_AT)
    found = many.verdicts
    assert not found.problems(), "\n".join(found.problems())
    assert is_complete, f"{len(found.all())} schedules were played in {RUN_SECONDS:g} s; RESUME=1 goes on"
    assert found.share_in_memory() >= LEAST_IN_MEMORY, found.counts()
    if TOTAL >= ENOUGH:
        assert not found.rare(), found.table()
