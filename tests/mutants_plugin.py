"""A pytest plugin that tries mutants: the tests are collected once, then each mutant gets a fork of that process.

It reads `todo.json` (for each mutant its tests, in the order in which they are run) and writes `outcomes`, one line for each
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
from _pytest.runner import runtestprotocol

# For each test: they take seconds at most. A mutant that makes one take this long does not terminate.
CPU_LIMIT_S, ELAPSED_LIMIT_S = 30, 120
# A mistake in a bound must not take the machine's memory.
MEMORY_LIMIT_BYTES = int(os.environ.get("MUTANTS_MEMORY_BYTES", str(3 << 30)))
FOUND, NOT_FOUND = 1, 0
NONE = ""


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Try the mutants in the place of running the tests."""
    assert not session.testsfailed, "the tests could not be collected"
    items = {item.nodeid: item for item in session.items}
    todo: dict[str, list[str]] = json.loads(Path("todo.json").read_text())
    gc.freeze()  # forks share what there is
    finders: dict[
        str, list[str]
    ] = {}  # by function, the latest first: they are likely to find the next mistake there too
    proven: set[str] = set()  # tests that pass in a fork without a mistake
    with Path("outcomes").open("w") as outcomes:
        for mutant, tests in todo.items():
            before = finders.setdefault(mutant.rpartition("__mutmut_")[0], [])
            order = list(dict.fromkeys([*before, *tests]))
            outcome, finder = try_out(mutant, [items[test] for test in order]) if tests else ("untested", None)
            if finder is not None:
                check_passes(finder, proven)
                before[:] = [finder.nodeid, *(test for test in before if test != finder.nodeid)]
            print(mutant, outcome, file=outcomes, flush=True)
    return True


def check_passes(item: pytest.Item, proven: set[str]) -> None:
    """Check that a test that found a mistake passes without one; otherwise it finds the machine, not the mistake."""
    if item.nodeid not in proven:
        outcome, _ = try_out(NONE, [item])
        assert outcome == "survived", f"without any mistake the outcome of {item.nodeid} is: {outcome}"
        proven.add(item.nodeid)


def try_out(mutant: str, items: list[pytest.Item]) -> tuple[str, pytest.Item | None]:
    """Try one mutant in a process group of its own; give the outcome and the test that found it, if that is known."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            os.environ["MUTANT_UNDER_TEST"] = mutant
            finder = first_to_fail(items)
            os.write(writing, b"" if finder is None else str(finder).encode())
            os._exit(NOT_FOUND if finder is None else FOUND)
        finally:
            os._exit(FOUND)  # the test run itself broke
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests have started
    with os.fdopen(reading) as answer:
        number = answer.read()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL):
        return "timeout", None
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_FOUND:
        return "survived", None
    return "killed", items[int(number)] if number else None


def first_to_fail(items: list[pytest.Item]) -> int | None:
    """Run tests until one fails, each within the limits of time; give its number."""
    for number, item in enumerate(items):
        signal.alarm(ELAPSED_LIMIT_S)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU_LIMIT_S, resource.RLIM_INFINITY))
        failed = next((report for report in runtestprotocol(item, log=False, nextitem=None) if report.failed), None)
        if failed is not None:
            if os.environ["MUTANT_UNDER_TEST"] == NONE:
                print(failed.longreprtext, flush=True)
            return number
    return None
