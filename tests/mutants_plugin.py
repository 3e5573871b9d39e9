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
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

# The tests of a function need some seconds at most; what needs so much processor time has lost its way.
CPU_LIMIT_S = 30
# A mistake in a bound must not take the machine's memory.
MEMORY_LIMIT_BYTES = 3 << 30
FOUND, NOT_FOUND = 1, 0
NONE = ""


def pytest_runtestloop(session: pytest.Session) -> bool:
    """Try the mutants in the place of running the tests."""
    assert not session.testsfailed, "the tests could not be collected"
    items = {item.nodeid: item for item in session.items}
    todo: dict[str, list[str]] = json.loads(Path("todo.json").read_text())
    gc.freeze()  # forks share what there is
    assert try_out(NONE, session.items) == ("survived", None), "the tests fail without any mistake"
    finders: dict[
        str, list[str]
    ] = {}  # by function, the latest first: they are likely to find the next mistake there too
    with Path("outcomes").open("w") as outcomes:
        for mutant, tests in todo.items():
            before = finders.setdefault(mutant.rpartition("__mutmut_")[0], [])
            order = list(dict.fromkeys([*before, *tests]))
            outcome, finder = try_out(mutant, [items[test] for test in order]) if tests else ("untested", None)
            if finder is not None:
                before[:] = [finder.nodeid, *(test for test in before if test != finder.nodeid)]
            print(mutant, outcome, file=outcomes, flush=True)
    return True


def try_out(mutant: str, items: list[pytest.Item]) -> tuple[str, pytest.Item | None]:
    """Say how one mutant fared, in a process of its own, and which test found it, if that is known."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 5))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
            os.environ["MUTANT_UNDER_TEST"] = mutant
            finder = first_to_fail(items)
            os.write(writing, b"" if finder is None else str(finder).encode())
            os._exit(NOT_FOUND if finder is None else FOUND)
        finally:
            os._exit(FOUND)  # the test run itself broke
    os.close(writing)
    with os.fdopen(reading) as answer:
        number = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return "timeout", None
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_FOUND:
        return "survived", None
    return "killed", items[int(number)] if number else None


def first_to_fail(items: list[pytest.Item]) -> int | None:
    """Run tests until one fails; give its number."""
    for number, item in enumerate(items):
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=None)):
            return number
    return None
