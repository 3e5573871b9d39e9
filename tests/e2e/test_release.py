"""What a release is made with: the workflow, the lists of contents, and `make kind` where it cannot run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import peers
from tests.nonempty import every, some
from tests.patience import PATIENCE_S

CI = peers.ROOT / ".ci"
WORKFLOW = CI / "release.yaml"


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S, **more)


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The lists of contents by image, written as a release writes them; the tools stay beside them."""
    folder = tmp_path_factory.mktemp("release")
    uv = Path(sys.executable).with_name("uv")
    done = run(CI / "sbom", folder, env={**os.environ, "TOOLS": str(folder / "tools"), "UV": str(uv)})
    assert done.returncode == 0, done.stdout + done.stderr
    found = {path.name.split(".")[0]: json.loads(path.read_text()) for path in folder.glob("*.cdx.json")}
    return {**found, "tools": {"folder": folder / "tools"}}


def names(found: dict[str, Any]) -> set[str]:
    return {one["name"] for one in found.get("components", [])}


@pytest.mark.long("variants")
def test_the_lists_name_every_pinned_package_and_no_index(lists: dict[str, dict[str, Any]]) -> None:
    for image, requirements in (("operator", "operator"), ("training", "train")):
        pins = (peers.ROOT / "requirements" / f"{requirements}.txt").read_text()
        assert names(lists[image]) == set(re.findall(r"^([a-z0-9._-]+)==", pins, re.MULTILINE))
    assert "torch" in names(lists["training"]) - names(lists["operator"])
    assert names(lists["agent"]) == set(), "the standard library alone"
    assert {image: lists[image]["metadata"]["component"]["name"] for image in ("operator", "agent")} == {
        "operator": "elastipod",
        "agent": "elastipod-agent",
    }
    addresses = set(re.findall(r"https?://[^/\"]+", json.dumps([lists["operator"], lists["training"]])))
    assert {one for one in addresses if "pypi" in one or "index" in one} <= {"https://pypi.org"}


@pytest.mark.long("variants")
def test_the_workflow_is_one(lists: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    check = [lists["tools"]["folder"] / "bin/check-jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = run(*check, WORKFLOW)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yaml"
    broken.write_text(WORKFLOW.read_text().replace("runs-on:", "run-on:", 1))
    assert run(*check, broken).returncode != 0, "the check can fail"


def steps() -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(WORKFLOW.read_text())["jobs"].values() for step in job["steps"]]


def test_its_scripts_are_shell(tmp_path: Path) -> None:
    for step in some(step for step in steps() if "run" in step):
        script = re.sub(r"\$\{\{.*?\}\}", "value", step["run"])
        assert run("bash", "-n", "-c", script).stderr == ""


def test_it_publishes_what_exists_and_signs_what_it_publishes() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    targets = set(re.findall(r"^FROM \S+ AS ([a-z-]+)$", (peers.ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert set(jobs["images"]["strategy"]["matrix"]["image"]) == {"operator", "agent", "training"} <= targets
    for job in ("images", "chart"):
        assert "cosign sign" in json.dumps(jobs[job])
        assert jobs[job]["permissions"]["id-token"] == "write"
    made = set(re.findall(r"^([a-z]+):", (peers.ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        word for step in steps() for line in re.findall(r"make (.*)", step.get("run", "")) for word in line.split()
    }
    assert called == {"env", "wheels", "sbom"} <= made
    assert every("timeout-minutes" in job for job in jobs.values())


def test_the_packages_of_all_images_are_checked_for_vulnerabilities_first() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    (audit,) = (step for step in jobs["test"]["steps"] if "pip-audit" in step.get("uses", ""))
    listed = re.findall(r"\$top/(requirements/\S+\.txt)\"", (CI / "sbom").read_text())
    assert {*audit["with"]["inputs"].split()} == {*listed} - {"requirements/release.txt"}
    assert every("needs" in job for name, job in jobs.items() if name != "test")


def test_the_check_of_the_tag_holds_for_the_checkout() -> None:
    (check,) = (step["run"] for step in steps() if "the tag" in step.get("name", ""))
    for tag, holds in (("v0.1.0", True), ("v0.1.1", False)):
        done = run("bash", "-e", "-c", check, cwd=peers.ROOT, env={"PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": tag})
        assert (done.returncode == 0) is holds, tag


def test_kind_says_what_is_missing(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "git"):
        (tmp_path / tool).symlink_to(Path("/usr/bin") / tool)
    done = run("/usr/bin/bash", CI / "kind", env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("make kind needs docker kind kubectl helm on PATH; without Docker")
    for tool in ("kind", "kubectl", "helm", "docker"):
        (tmp_path / tool).write_text("#!/usr/bin/bash\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    assert "needs a running Docker daemon" in run("/usr/bin/bash", CI / "kind", env={"PATH": str(tmp_path)}).stderr
