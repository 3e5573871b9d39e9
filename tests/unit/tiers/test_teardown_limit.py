"""A fixture that hangs after its test failed is failed too, by name, and the tests after it run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S, TEARDOWN_S
from tests.teardown_limit import TeardownLimit

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
from tests.teardown_limit import TeardownLimit
def pytest_configure(config):
    config.pluginmanager.register(TeardownLimit({limit_s}))
"""
TESTS = """
import signal, time, threading
import pytest

order = []

@pytest.fixture
def outer():
    yield
    order.append("outer")

@pytest.fixture
def hangs(outer):
    yield
    HANG

@pytest.mark.timeout(1)
def test_late(hangs):
    time.sleep(600)

def test_next():
    assert order == ["outer"], "the other fixtures were ended"
"""
WAITS_FOR_EVER = "threading.Event().wait()"
# It does not even notice that its time is up.
SWALLOWS = (
    "\n    while True:\n        try:\n            time.sleep(600)\n        except BaseException:\n            pass"
)


def run(folder: Path, hang: str, limit_s: float, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.format(limit_s=limit_s))
    (folder / "test_one.py").write_text(TESTS.replace("HANG", hang))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        *options,
        str(folder),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_fixture_that_hangs_is_failed_and_the_run_goes_on(tmp_path: Path) -> None:
    status, said = run(tmp_path, WAITS_FOR_EVER, 1.0, "-c", "/dev/null")
    assert status == 1
    assert re.search(r"^FAILED .*test_late", said, re.MULTILINE), said
    assert re.search(r"^ERROR .*test_late", said, re.MULTILINE), said
    assert "Failed: the teardown of test_one.py::test_late has not ended within 1 s" in said
    assert "1 failed, 1 passed, 1 error" in said


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n1",)], ids=["alone", "in a process of xdist"])
def test_one_that_does_not_end_at_all_ends_the_process_with_the_name_of_its_test(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    status, said = run(tmp_path, SWALLOWS, 1.0, "-c", "/dev/null", *options)
    assert status != 0
    assert re.search(r"the teardown of .*test_one\.py::test_late has not ended within 1 s", said), said
    assert "in hangs" in said, "the stack of where it hangs"
    if options:
        assert "test_late" in said.split("short test summary")[-1], "the session goes on and names the test"


def test_every_run_has_the_limit(pytestconfig: pytest.Config) -> None:
    (limit,) = [one for one in pytestconfig.pluginmanager.get_plugins() if isinstance(one, TeardownLimit)]
    assert limit.limit_s == TEARDOWN_S
