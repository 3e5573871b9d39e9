"""The versions whose pauses are compared: this checkout, and the last one in which each change of size ended all workers."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.common.processes import Failed
from bench.launchers.nodes import REPOSITORY
from tests.commit_under_test import unpack_commit

FORMER_COMMIT = "971bb4e2"


@dataclass(frozen=True, slots=True)
class Version:
    """What a life of examples/lm is run with. root: its repository. is_traced: functions of its library are those that are noted."""

    root: Path
    is_traced: bool


PRESENT = Version(REPOSITORY, is_traced=True)


def former_version(folder: Path) -> Version:
    """Write the agent, library and examples of the former version into a folder. Raises Failed where the history lacks its commit."""
    try:
        unpack_commit(REPOSITORY, FORMER_COMMIT, folder, "agent", "examples")
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(
            f"no version {FORMER_COMMIT}, which needs git and a checkout with its whole history: {error}"
        ) from error
    return Version(folder, is_traced=False)
