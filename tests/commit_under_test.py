"""What git says of this checkout, such as which commit a report is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit_under_test(root: Path = ROOT) -> str:
    """Give the commit that is tested, marked where files differ from it; empty outside of a checkout."""
    return (git_output(root, "describe", "--always", "--dirty", "--exclude=*") or "").strip()


def git_output(root: Path, *arguments: str) -> str | None:
    """Give what git prints; None where it is not installed or the folder is no checkout. Whose checkout it is does not matter."""
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
