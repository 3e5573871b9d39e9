"""What every tier shares: options, reasons for skips, time limits, the leak check and the reports of long runs."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from tests.leaks import children, threads_that_stay
from tests.long_runs import LongRun, LongRuns, reports_folder
from tests.patience import PATIENCE_S, TEARDOWN_S, TIER_TIMEOUT_S
from tests.teardown_limit import TeardownLimit

TESTS = Path(__file__).resolve().parent
ROOT_TIERS = frozenset({"api", "e2e", "chart"})
LEAKABLE_TIERS = frozenset(
    {"unit", "sim"}
)  # the others keep a cluster between tests; the session's end is checked instead
CLUSTER_FIXTURES = frozenset({"cluster", "cut_short", "bare_api_server"})
DEFAULT_SEED = 20240611
EXAMPLES, QUICK_EXAMPLES = 100, 25  # of each property, unless its test says how many
LEFT_RUNNING = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("elastipod")
    group.addoption("--long", metavar="NAME", default=None, help="run the long test of this name only; empty: all")
    group.addoption("--quick", action="store_true", help="leave out the tests marked slow, as `make test` does")
    group.addoption("--share", metavar="K/N", help="collect only the K-th of N shares of the files of tests")
    group.addoption("--seed", type=int, default=DEFAULT_SEED, help="seed of every random choice of a test")
    group.addoption("--kubernetes", metavar="MINOR", help="run clusters of another version of Kubernetes (tests/go)")


def pytest_configure(config: pytest.Config) -> None:
    # An example that takes long says something about the machine; a test that hangs meets its own time limit.
    examples = QUICK_EXAMPLES if config.getoption("--quick") else EXAMPLES
    hypothesis.settings.register_profile("elastipod", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("elastipod")
    config.pluginmanager.register(TeardownLimit(TEARDOWN_S))
    if minor := config.getoption("--kubernetes"):
        from tests.go_programs import ClusterVersions  # needs more Python than the library's own tests

        ClusterVersions.of(minor).use()
    folder = reports_folder(TESTS.parent, config.getoption("keyword"), config.args)
    config.stash[LongRuns.key] = LongRuns(folder, seed=config.getoption("--seed"))


def tier_of(item: pytest.Item) -> str:
    """Give the tier of a test: the folder below tests/ that holds it."""
    return item.path.relative_to(TESTS).parts[0]


@cache
def why_no_cluster() -> str | None:
    """Say why no local cluster can run here, or None when it can, be it one without nodes."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux (network namespaces, mounts), and this is {sys.platform}"
    if os.geteuid() != 0:
        return "needs root (network namespaces, mounts); run it as root to include it"
    return None


@cache
def why_no_namespaces() -> str | None:
    """Say why even root gets no namespaces here, or None when it does."""
    from elastipod_local.errors import UnsupportedError  # needs more Python than the library's own tests
    from elastipod_local.machine import require_namespaces

    try:
        require_namespaces()
    except UnsupportedError as reason:
        return str(reason)
    return None


def why_skipped(item: pytest.Item) -> str | None:
    """Say why a test cannot run here, or None when it can."""
    tier = tier_of(item)
    if tier not in ROOT_TIERS and not item.get_closest_marker("needs_root"):
        return None
    if (reason := why_no_cluster()) or tier not in ROOT_TIERS:
        return reason or why_no_namespaces()
    from tests.preparation import why_no_nodes, with_nodes  # needs more Python than the library's own tests

    return why_no_nodes() if with_nodes(tier, getattr(item, "fixturenames", ())) else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of other shares, which need not even be imported."""
    share: str | None = config.getoption("--share")
    is_left_out = share is not None and collection_path.match("test_*.py") and not is_in_share(collection_path, share)
    return True if is_left_out else None


def is_in_share(path: Path, share: str) -> bool:
    """Whether a file of tests is in a share such as "1/2". Every file is in one; files of one folder are shared out evenly."""
    number, of = map(int, share.split("/"))
    return _numbers()[path] % of == number - 1


@cache
def _numbers() -> dict[Path, int]:
    return {path: number for number, path in enumerate(sorted(TESTS.rglob("test_*.py")))}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        tier = tier_of(item)
        if CLUSTER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("cluster")
        limit_s = TIER_TIMEOUT_S.get(tier, 300)
        own = item.get_closest_marker("timeout")
        if own is None or own.args[0] < limit_s:  # a busy machine may need what any test here has
            item.add_marker(pytest.mark.timeout(limit_s), append=False)
        if reason := why_skipped(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    _select(config, items)


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long runs that are not wanted, and slow tests where the others shall do."""
    wanted: str | None = config.getoption("--long")
    is_quick: bool = config.getoption("--quick")

    def is_selected(item: pytest.Item) -> bool:
        if marker := item.get_closest_marker("long"):
            return wanted is not None and wanted in ("", marker.args[0])
        return wanted is None and not (is_quick and item.get_closest_marker("slow"))

    dropped = [item for item in items if not is_selected(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if is_selected(item)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among modules and tests while they become more: it took a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch and build what the selected tests need, minutes the first time."""
    gc.freeze()  # modules and tests live to the end: a tenth of all processor time went into looking at them again
    if any(tier_of(item) in ROOT_TIERS for item in session.items):
        from tests.preparation import prepare_session  # needs more Python than the library's own tests

        prepare_session(session)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this session (--seed); every random choice of a test starts from it."""
    value: int = request.config.getoption("--seed")
    return value


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> LongRun:
    """The record of a test marked `long(name)`; what it is given ends up in .run/long/<name>.json."""
    marker = request.node.get_closest_marker("long")
    assert marker is not None, "long_run is for tests marked with pytest.mark.long(name)"
    return request.config.stash[LongRuns.key].open(marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("long")
    if marker is not None and (report.when == "call" or report.failed):
        item.config.stash[LongRuns.key].close(marker.args[0], item.name, report)
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit or sim test that leaves a child process or a thread behind."""
    if tier_of(request.node) not in LEAKABLE_TIERS:
        yield
        return
    threads_before, children_before = set(threading.enumerate()), children()
    yield
    threads = threads_that_stay(threads_before, PATIENCE_S / 4)
    _, left = psutil.wait_procs(children() - children_before, timeout=PATIENCE_S / 4)
    assert not threads, f"the test left threads running: {', '.join(threads)}"
    assert not left, f"the test left processes running: {left}"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what the tests in a process of pytest-xdist have left running."""
    node.config.stash.setdefault(LEFT_RUNNING, []).extend(getattr(node, "workeroutput", {}).get("left_running", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves child processes, whatever its tier; clusters die with their fixtures."""
    _, children = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=PATIENCE_S / 4)
    left = [*session.config.stash.get(LEFT_RUNNING, []), *map(str, children)]
    told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if told is not None:  # a process of pytest-xdist; the session that it belongs to fails
        told["left_running"] = left
        return
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    for one in left:
        print(f"\nleft running by the tests: {one}", file=sys.stderr)
