""".ci/environment: when it makes .venv anew, when it leaves it alone, and that two of it do not do so at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.agent_client import until
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
INPUTS = ("requirements/bootstrap.txt", "requirements/dev.txt", "pyproject.toml", ".ci/environment")
PYTHON = """#!/bin/sh
case "$*" in
  -V) cat "$LOG.version";;
  "-m venv"*) echo "venv $3" >> "$LOG";;
esac
"""


class Checkout:
    """A checkout whose Python and uv write down what they are asked to do; nothing is installed."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        for name in INPUTS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        shutil.copy(ROOT / ".ci" / "environment", folder / ".ci" / "environment")
        self._program(".venv/bin/python", PYTHON)
        self._program(".venv/bin/uv", '#!/bin/sh\necho "uv $2" >> "$LOG"\n')
        self.python("Python 3.11.7")
        for name in INPUTS:
            os.utime(folder / name, (1, 1))

    def _program(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def python(self, version: str) -> None:
        self.log.with_name("log.version").write_text(f"{version}\n")

    def start(self) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "LOG": str(self.log), "PYTHON": str(self.folder / ".venv/bin/python")}
        return subprocess.Popen([self.folder / ".ci" / "environment"], env=environ)

    def prepare(self) -> list[str]:
        """Run it; give what was done."""
        self.log.write_text("")
        assert self.start().wait(PATIENCE_S) == 0
        return self.log.read_text().splitlines()


SYNCED = ["uv sync", "uv install"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout", tmp_path / "log")


def test_what_is_ready_is_left_alone(checkout: Checkout) -> None:
    assert checkout.prepare() == SYNCED
    assert checkout.prepare() == []


@pytest.mark.parametrize("name", INPUTS)
def test_a_change_of_what_it_is_made_of_is_taken_over(name: str, checkout: Checkout) -> None:
    checkout.prepare()
    later = time.time() + 60
    os.utime(checkout.folder / name, (later, later))
    assert checkout.prepare() == SYNCED


def test_a_checkout_that_was_moved_gets_an_environment_of_its_own(checkout: Checkout, tmp_path: Path) -> None:
    """Programs and the editable install name the old place."""
    checkout.prepare()
    checkout.folder = checkout.folder.rename(tmp_path / "moved")
    assert checkout.prepare() == ["venv --clear", *SYNCED]


def test_another_python_in_its_place_gets_an_environment_of_its_own(checkout: Checkout) -> None:
    checkout.prepare()
    checkout.python("Python 3.11.9")
    assert checkout.prepare() == ["venv --clear", *SYNCED]


def test_an_environment_of_an_earlier_version_is_kept(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / ".ready").touch()
    assert checkout.prepare() == SYNCED


def test_a_second_one_waits_and_has_nothing_left_to_do(checkout: Checkout) -> None:
    checkout.log.touch()
    holder = os.open(checkout.folder, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    waiting = [checkout.start() for _ in range(2)]
    try:
        until(lambda: all(_waits(one) for one in waiting), "both to wait for the lock")
        assert checkout.log.read_text() == ""
    finally:
        os.close(holder)
        assert [one.wait(PATIENCE_S) for one in waiting] == [0, 0]
    assert checkout.log.read_text().splitlines() == SYNCED


def _waits(script: subprocess.Popen[bytes]) -> bool:
    children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
    return any("flock" in _name(child) for child in children)


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:  # it has ended, before its file was opened or after that
        return ""
