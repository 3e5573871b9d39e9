"""What git knows of this checkout: which commit a report is of, and the files of an earlier one."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_UNPACKS_WITHIN_S = 60


def commit_under_test(root: Path = ROOT) -> str:
    """Give the commit that is tested, marked where files differ from it; empty outside of a checkout."""
    return (git_output(root, "describe", "--always", "--dirty", "--exclude=*") or "").strip()


def git_output(root: Path, *arguments: str) -> str | None:
    """Give what git prints; None where it is not installed or the folder is no checkout. Whose checkout it is does not matter."""
    try:
        done = subprocess.run(_git(root, *arguments), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def unpack_commit(root: Path, commit: str, folder: Path, *paths: str) -> None:
    """Write the files of a commit into a folder. paths: files and folders of it; all where none is given.

    Raises FileNotFoundError where git is not installed, and subprocess.SubprocessError where the history lacks the commit.
    """
    command = _git(root, "archive", "--format=tar", commit, *paths)
    done = subprocess.run(command, capture_output=True, check=True, timeout=_UNPACKS_WITHIN_S)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def _git(root: Path, *arguments: str) -> list[str]:
    return ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
