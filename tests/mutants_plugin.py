"""A pytest plugin that tries mutants: the tests are collected once, then each mutant gets a fork of that process.

Without `todo.json` it runs each test once, also in a fork of its own, which records the functions that it runs
(`mutants_sitecustomize.py`); `unchanged.json` says how long each took that passed, and which failed. One that ends its process
fails, and the others go on.

With it, it reads `todo.json` (for each mutant its tests, in the order in which they are run) and writes `outcomes`, one line for each
mutant: its name and killed, timeout, survived or untested. mutmut's functions choose their mutant by $MUTANT_UNDER_TEST.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from mutmut.mutation.trampoline import get_mutant_under_test, set_mutant_under_test

# For each test: they take seconds at most. A mutant that makes one take this long does not terminate.
CPU_LIMIT_S, ELAPSED_LIMIT_S = 30, 120
# A mistake in a bound must not take the machine's memory.
MEMORY_LIMIT_BYTES = int(os.environ.get("MUTANTS_MEMORY_BYTES", str(3 << 30)))
FOUND, NOT_FOUND = 1, 0
NONE, RECORD = "", "stats"  # mutmut's own names: no mutant, and functions that record that they run
MAX_ANSWER_BYTES = 1 << 16
failures: list[pytest.TestReport] = []  # of the test in work, in its fork


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Try the mutants in the place of running the tests, or see what the tests run."""
    if session.testsfailed:
        pytest.exit("not all tests could be collected", returncode=pytest.ExitCode.INTERRUPTED)
    gc.freeze()  # forks share what there is
    if Path("todo.json").exists():
        try_all({item.nodeid: item for item in session.items}, json.loads(Path("todo.json").read_text()))
    else:
        see_which_functions_run(session.items)
    return True


def see_which_functions_run(items: list[pytest.Item]) -> None:
    """Run each test once, and keep how long each takes that passes."""
    seconds: dict[str, float] = {}
    failed: list[str] = []
    for item in items:
        began = time.monotonic()
        outcome, _ = try_out(RECORD, [item])
        if outcome == "survived":
            seconds[item.nodeid] = round(time.monotonic() - began, 3)
        else:
            failed.append(item.nodeid)
            print(f"{item.nodeid} fails without any mistake: {outcome}", flush=True)
    Path("unchanged.json").write_text(json.dumps({"seconds": seconds, "failed": failed}))


def try_all(items: dict[str, pytest.Item], todo: dict[str, list[str]]) -> None:
    """Try each mutant with the tests named for it, and write its outcome."""
    finders: dict[
        str, list[str]
    ] = {}  # by function, the latest first: they are likely to find the next mistake there too
    passes: dict[str, bool] = {}  # whether a test passes in a fork without a mistake
    with Path("outcomes").open("w") as outcomes:
        for mutant, tests in todo.items():
            before = finders.setdefault(mutant.rpartition("__mutmut_")[0], [])
            order = [items[test] for test in dict.fromkeys([*before, *tests])]
            outcome, finder = find(mutant, order, passes)
            if finder is not None:
                before[:] = [finder.nodeid, *(test for test in before if test != finder.nodeid)]
            print(mutant, outcome, file=outcomes, flush=True)
    print("failed without any mistake:", [test for test, is_passed in passes.items() if not is_passed])


def find(mutant: str, items: list[pytest.Item], passes: dict[str, bool]) -> tuple[str, pytest.Item | None]:
    """Try one mutant; a test that fails in a fork without any mistake too finds nothing, and is left out from then on."""
    while items := [item for item in items if passes.get(item.nodeid, True)]:
        outcome, finder = try_out(mutant, items)
        if finder is None:
            return outcome, None
        if finder.nodeid not in passes:
            passes[finder.nodeid] = try_out(NONE, [finder])[0] == "survived"
        if passes[finder.nodeid]:
            return outcome, finder
    return "untested", None


def try_out(mutant: str, items: list[pytest.Item]) -> tuple[str, pytest.Item | None]:
    """Try one mutant in a process group of its own; give the outcome and the test that found it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            set_mutant_under_test(mutant)  # also for tests that empty the environment
            os._exit(FOUND if any_fails(items, writing) else NOT_FOUND)
        finally:
            os._exit(FOUND)  # the test run itself broke
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests have started
    last = items[
        int(os.read(reading, MAX_ANSWER_BYTES).split()[-1])
    ]  # not to the end: a stray process may hold the pipe
    os.close(reading)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL):
        return "timeout", last
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_FOUND:
        return "survived", None
    return "killed", last


def any_fails(items: list[pytest.Item], started: int) -> bool:
    """Run tests until one fails, each within the limits of time; write the number of each that starts."""
    for number, item in enumerate(items):
        os.write(started, f"{number} ".encode())
        signal.alarm(ELAPSED_LIMIT_S)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU_LIMIT_S, resource.RLIM_INFINITY))
        # As in a run of pytest: with the filters of warnings that the test asks for, and whatever else surrounds a test there.
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        if failures:
            if get_mutant_under_test() in (NONE, RECORD):
                print(failures[0].longreprtext, flush=True)
            return True
    return False


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what failed; in a fork."""
    if report.failed:
        failures.append(report)
