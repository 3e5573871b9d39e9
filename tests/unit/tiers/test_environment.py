"""Which interpreter `.venv` is made with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / ".ci" / "environment"
# An interpreter that says it is of another version.
PRETENDER = """#!/bin/bash
if [[ $1 == -V ]]; then echo "Python {version}"; exit; fi
exec {real} -c 'import sys; sys.version_info = ({numbers}); exec(sys.argv[1])' "$2"
"""


def functions() -> str:
    """The functions of the script, without what it does."""
    text = SCRIPT.read_text()
    return "\n".join(re.findall(r"^\w+\(\) \{.*\}$|^\w+\(\) \{\n(?:.*\n)*?\}$", text, re.MULTILINE))


def found(folder: Path, versions: dict[str, str], preferred: str = "") -> subprocess.CompletedProcess[str]:
    """What is found where these interpreters are on PATH."""
    for name, version in versions.items():
        numbers = version.replace(".", ", ")
        (folder / name).write_text(PRETENDER.format(version=version, numbers=numbers, real=sys.executable))
        (folder / name).chmod(0o755)
    environ = {"PATH": str(folder), **({"PYTHON": preferred} if preferred else {})}
    return subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", f"{functions()}\nfind_python"],
        env=environ,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        pytest.param({"python3": "3.12.3", "python3.13": "3.13.0"}, "python3", id="the system's own comes first"),
        pytest.param(
            {"python3": "3.14.0", "python3.13": "3.13.0"}, "python3.13", id="one that is too new is passed over"
        ),
        pytest.param(
            {"python3": "3.9.2", "python3.11": "3.11.2"}, "python3.11", id="one that is too old is passed over"
        ),
    ],
)
def test_the_first_interpreter_that_fits_is_taken(versions: dict[str, str], expected: str, tmp_path: Path) -> None:
    assert found(tmp_path, versions).stdout.strip() == expected


@pytest.mark.parametrize(
    ("versions", "preferred", "said"),
    [
        ({"python3": "3.14.0"}, "", "needs Python 3.11, 3.12 or 3.13; python3 is Python 3.14.0. Install one"),
        ({}, "", "needs Python 3.11, 3.12 or 3.13; python3 is missing. Install one"),
        (
            {"mine": "3.14.0", "python3": "3.12.0"},
            "mine",
            "mine is Python 3.14.0. Install one, or name it: make PYTHON=",
        ),
    ],
)
def test_where_none_fits_it_is_said_what_is_needed(
    versions: dict[str, str], preferred: str, said: str, tmp_path: Path
) -> None:
    ended = found(tmp_path, versions, preferred)
    assert ended.returncode == 1
    assert said in ended.stderr
