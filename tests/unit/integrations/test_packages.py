"""A framework that is missing or too old is named in one sentence, with the extra that brings it."""

from __future__ import annotations

import importlib

import pytest
import tomllib
from tests.e2e.training_run import REPOSITORY

from elastipod.errors import FrameworkError
from elastipod.integrations import packages
from elastipod.integrations.packages import TESTED

FRAMEWORKS = pytest.mark.parametrize("name", sorted(TESTED))


@FRAMEWORKS
def test_a_missing_package_is_one_sentence(name: str) -> None:
    """The development environment has none of them."""
    with pytest.raises(FrameworkError) as caught:
        importlib.import_module(f"elastipod.integrations.{name}")
    oldest, _, extra, _ = TESTED[name]
    assert str(caught.value) == (
        f"elastipod.integrations.{name} needs the package {name} {oldest} or newer, which is not installed; "
        f"pip install 'elastipod[{extra}]'"
    )


@pytest.mark.parametrize(
    ("found", "is_enough"), [("4.57.1", False), ("5.22.9", False), ("5.23.0.dev0", True), ("10.1", True)]
)
def test_versions_are_compared_by_number(monkeypatch: pytest.MonkeyPatch, found: str, is_enough: bool) -> None:
    monkeypatch.setattr(packages, "installed_version", lambda name: found)
    if is_enough:
        packages.require("transformers")
        return
    with pytest.raises(FrameworkError, match=f"5.23 or newer, but {found} is installed"):
        packages.require("transformers")


@FRAMEWORKS
def test_the_tested_versions_are_those_that_the_tests_install_and_the_docs_list(name: str) -> None:
    framework = TESTED[name]
    package = framework.also or name
    files = ("peer-frameworks.txt", "peer-trackers.txt")
    pins = "".join((REPOSITORY / "requirements" / file).read_text() for file in files)
    assert f"\n{package}=={framework.tested}." in pins
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"{package}>={framework.oldest}" in extras[framework.extra]
    page = (REPOSITORY / "docs" / "frameworks.md").read_text()
    assert f"| `elastipod[{framework.extra}]` | {name} {framework.oldest} or newer | {framework.tested} |" in page
