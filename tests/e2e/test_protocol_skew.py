"""An operator and agents of two versions at once, as during an upgrade or a rollback: planned shrinks of real processes.

The previous version is the newest tag, or what PREVIOUS names; without tags, the sixtieth commit back. It runs from its wheel, built
as its release builds it; only the tests that come with it are those of its sources.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.commit_under_test import git_output, unpack_commit
from tests.e2e.conftest import ROOT

STORY = "tests/e2e/test_planned_shrink.py"
WHERE = "import elastipod_operator, elastipod_agent; print(elastipod_operator.__file__, elastipod_agent.__file__)"
LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Previous:
    """The previous version. packages: the folder into which its wheel is installed."""

    sources: Path
    packages: Path


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    found = Previous(tmp_path_factory.mktemp("previous"), tmp_path_factory.mktemp("packages"))
    tags = (git_output(ROOT, "tag", "--merged", "HEAD", "--sort=-version:refname", "v*") or "").split()
    try:
        unpack_commit(ROOT, os.environ.get("PREVIOUS") or next(iter(tags), "HEAD~60"), found.sources)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"the history of the checkout has no previous version: {error}")
    wheels = found.sources / "dist"
    uv = Path(sys.executable).with_name("uv")
    run(found.sources / ".ci" / "wheels", wheels, cwd=found.sources, PYTHON=sys.executable, UV=str(uv))
    (wheel,) = wheels.glob("elastipod-*.whl")
    run(uv, "--offline", "pip", "install", "--no-deps", "--target", found.packages, wheel, cwd=found.sources)
    return found


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command to its end; gives what it printed. Fails with what it said if it fails."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long("skew")
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("newer", ["operator", "agents"])
def test_the_other_version_is_understood(newer: str, previous: Previous) -> None:
    """The wheel has all packages, so those that are to be the newer ones come before it."""
    if newer == "operator":
        tests, ours = ROOT, [ROOT / "operator", ROOT / "localcluster"]
    else:
        tests, ours = previous.sources, [ROOT / "agent"]
    env = {"PYTHONPATH": os.pathsep.join(map(str, [*ours, previous.packages, tests]))}
    found = [Path(path) for path in run(sys.executable, "-c", WHERE, cwd=tests, **env).split()]
    operators, agents = (ROOT, previous.packages) if newer == "operator" else (previous.packages, ROOT)
    assert [operators in found[0].parents, agents in found[1].parents] == [True, True], found
    pytest_command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--long=variants")
    played = run(*pytest_command, STORY, cwd=tests, **env)
    assert " passed" in played
