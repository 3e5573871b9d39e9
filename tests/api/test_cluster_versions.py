"""Other versions of Kubernetes and Kueue (`make test-long NAME=kubernetes`): the tests that depend on them most, on each.

`docs/reference/versions.md` has the result. `.venv/bin/python -m pytest --kubernetes=1.35 FILE` runs any other test on one of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.go_programs import ClusterVersions, offered_minors
from tests.long_runs import LongRun
from tests.nonempty import some

ROOT = Path(__file__).resolve().parents[2]
# What asks most of the API server, of Kueue, and of nodes.
FILES = {
    "tests/api": (
        *("admission", "refusals", "high_availability", "unreadable", "helm_wait"),
        *("kueue_install", "queue_flow", "queue_deletions", "kueue_cookbook", "growth_and_autoscaler"),
    ),
    "tests/chart": ("install", "lifecycle"),
    "tests/e2e": ("elastic_job", "kueue_install"),
}
LIMIT_S = 3600


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.long("kubernetes")
@pytest.mark.parametrize("minor", some(offered_minors()))
def test_it_runs_on_other_versions(minor: str, tmp_path: Path, long_run: LongRun) -> None:
    versions = ClusterVersions.of(minor)
    for folder, names in FILES.items():
        report = tmp_path / f"{Path(folder).name}.xml"
        files = [f"{folder}/test_{name}.py" for name in names]
        options = (
            "-q",
            "-p",
            "no:cacheprovider",
            f"--kubernetes={minor}",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
        )
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
        passed = int(suite.attrib["tests"]) - int(suite.attrib["skipped"])
        what = f"kubernetes {versions.kubernetes.removeprefix('v')}, kueue {versions.kueue.removeprefix('v')}"
        long_run.count(**{f"{what}: {folder}": passed})
