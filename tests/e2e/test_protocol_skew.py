"""An operator and agents of two versions at once, as during an upgrade or a rollback: planned shrinks of real processes.

The previous version is the newest tag, or what PREVIOUS names; without tags, the sixtieth commit back.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.e2e.conftest import ROOT

STORY = "tests/e2e/test_planned_shrink.py"
WHERE = "import elastipod_operator, elastipod_agent; print(elastipod_operator.__file__, elastipod_agent.__file__)"
LIMIT_S = 600


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the previous version."""
    folder = tmp_path_factory.mktemp("previous")
    try:
        tags = git("tag", "--merged", "HEAD", "--sort=-version:refname", "v*").decode().split()
        revision = os.environ.get("PREVIOUS") or next(iter(tags), "HEAD~60")
        archive = git("archive", "--format=tar", revision)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the history of the checkout has no previous version: {error}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.mark.long("skew")
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("newer", ["operator", "agents"])
def test_the_other_version_is_understood(newer: str, previous: Path) -> None:
    operators, agents = (ROOT, previous) if newer == "operator" else (previous, ROOT)
    folders = (agents / "agent", operators / "operator", operators / "localcluster", operators)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    found = subprocess.run(
        [sys.executable, "-c", WHERE], cwd=operators, env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert [operators in Path(found[0]).parents, agents in Path(found[1]).parents] == [True, True], found
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", STORY]
    played = subprocess.run(command, cwd=operators, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert played.returncode == 0, played.stdout[-8000:]
    assert " passed" in played.stdout
