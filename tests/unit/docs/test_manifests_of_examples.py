"""The manifests of the examples give their scripts what these require, and nothing that they do not know."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
IN_IMAGE = "/opt/elastipod/examples/"


def containers_of(manifest: Any) -> Iterator[dict[str, Any]]:
    """Give everything in a manifest that has a command line."""
    if isinstance(manifest, dict):
        if "command" in manifest and "image" in manifest:
            yield manifest
        for value in manifest.values():
            yield from containers_of(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from containers_of(value)


def commands() -> list[tuple[str, Path, list[str]]]:
    """Give file, script and the script's arguments of every example that runs one of ours."""
    found = []
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        for container in (c for body in yaml.safe_load_all(file.read_text()) for c in containers_of(body)):
            line = [*container["command"], *container.get("args", ())]
            at = next((number for number, word in enumerate(line) if word.startswith(IN_IMAGE)), None)
            if at is not None:
                script = EXAMPLES / line[at].removeprefix(IN_IMAGE)
                found.append((str(file.relative_to(EXAMPLES)), script, line[at + 1 :]))
    return found


def options_of(script: Path) -> dict[str, bool]:
    """Give the options that a script and what lies beside it define, and whether they are required."""
    shared = [path for path in script.parent.glob("*.py") if path.name == "settings.py" or path == script]
    text = "\n".join(path.read_text() for path in shared)
    calls = re.findall(r'add_argument\(\s*"(--[a-z-]+)"(.*?)\n?\s*\)\n', text, re.DOTALL)
    return {name: "required=True" in rest for name, rest in calls}


@pytest.mark.parametrize(
    ("file", "script", "arguments"), commands(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_manifest_gives_its_script_what_it_requires(file: str, script: Path, arguments: list[str]) -> None:
    options = options_of(script)
    assert options, f"{script} defines no options"
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert given <= options.keys(), f"{file}: {script.name} does not know {given - options.keys()}"
    required = {name for name, is_required in options.items() if is_required}
    assert required <= given, f"{file}: {script.name} requires {required - given}"


def test_there_are_such_manifests() -> None:
    assert {"lm/job.yaml", "lm/job-fsdp2.yaml", "digits/job.yaml", "kueue/job.yaml"} <= {
        file for file, _, _ in commands()
    }


DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "pyyaml"}  # whose import name is another


def scripts_in_our_image() -> list[Path]:
    """Give the scripts that the manifests run in the training image as it is."""
    found = set()
    for file in EXAMPLES.rglob("*.yaml"):
        for container in (c for body in yaml.safe_load_all(file.read_text()) for c in containers_of(body)):
            if container["image"] == "docker.io/elastipod/train:dev":
                words = [*container["command"], *container.get("args", ())]
                found |= {EXAMPLES / word.removeprefix(IN_IMAGE) for word in words if word.startswith(IN_IMAGE)}
    return sorted(found)


@pytest.mark.parametrize("script", scripts_in_our_image(), ids=lambda script: script.parent.name)
def test_the_training_image_has_what_a_script_imports(script: Path) -> None:
    pins = (EXAMPLES.parent / "requirements" / "train.txt").read_text()
    beside = {path.stem for path in script.parent.glob("*.py")}
    imported = set()
    for path in (script, *(script.parent / f"{name}.py" for name in beside)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    foreign = imported - sys.stdlib_module_names - beside - {"elastipod"}
    assert "torch" in foreign
    lacking = [name for name in foreign if f"\n{DISTRIBUTIONS.get(name, name)}==" not in pins]
    assert not lacking, f"add them to the extra `examples` and run `make requirements`: {lacking}"


def user_of(stage: str) -> str:
    """Give the user of an image of the Dockerfile; "" is root."""
    stages, users = {}, {}
    for line in (EXAMPLES.parent / "Dockerfile").read_text().splitlines():
        if found := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            below, name = found.groups()
            stages[name] = below
        elif line.startswith("USER "):
            users[name] = line.removeprefix("USER ")
    while stage in stages:
        if stage in users:
            return users[stage]
        stage = stages[stage]
    return ""


@pytest.mark.parametrize("readme", sorted(EXAMPLES.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_the_image_that_a_page_builds_can_write_to_a_volume_of_root(readme: Path) -> None:
    assert user_of("training") == "65532:65532"
    targets = re.findall(r"docker build --target (\S+)", readme.read_text())
    assert [target for target in targets if user_of(target)] == []
