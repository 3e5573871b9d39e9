"""What importing the library costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PARTS = ("torch", "elastipod_operator", "elastipod_local", "elastipod_agent", "elastipod_client")


@pytest.mark.parametrize(
    "statement", ["import elastipod", "import elastipod.cli", "import elastipod.audit.report, elastipod.elastic_event"]
)
def test_importing_costs_no_torch_and_no_other_part(statement: str) -> None:
    script = f"{statement}; import sys; print([part for part in {PARTS!r} if part in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
