"""Our agent and library beside other Pythons and torches than the project's own, and what installing them moves there."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from xml.etree import ElementTree

import pytest
from tests import peers
from tests.e2e.versions_run import (
    Combination,
    build_wheel,
    find_python,
    install,
    make_environment,
    run_job,
    versions_of,
)
from tests.long_runs import LongRun

from elastipod_local.paths import cache_dir

COMBINATIONS = [
    Combination("3.10", ("torch==2.4.1", "numpy==1.26.4")),
    Combination("3.11", ("torch==2.7.1", "numpy<2.3")),
    Combination("3.12", ("torch==2.9.*", "numpy")),
    Combination("3.13", ("torch", "numpy")),
]
# Their names and what they need decide; the newest of each, since tests are no part of what users install.
TEST_TOOLS = ("pytest>=8", "pytest-timeout", "pytest-asyncio", "hypothesis", "psutil")
UNIT_LIMIT_S = 600


@pytest.mark.parametrize(("is_warm", "parallel"), [(True, "fsdp2"), (False, "ddp")], ids=["warm", "cold"])
def test_a_job_runs_on_an_older_torch(is_warm: bool, parallel: str, tmp_path: Path) -> None:
    python = peers.peer_python("torch211")
    assert versions_of(python)["torch"] != versions_of(Path(peers.sys.executable))["torch"]
    run_job(python, tmp_path / "job", is_warm=is_warm, parallel=parallel)
    seen = {
        line for log in (tmp_path / "job").glob("agent-*.log") for line in re.findall("torch [0-9.]+", log.read_text())
    }
    assert seen == {"torch 2.11.0"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, as it is published."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))
