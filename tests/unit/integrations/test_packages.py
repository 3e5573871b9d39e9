"""The versions of frameworks that the integrations name are those of the extras, of the tests and of the documentation."""

from __future__ import annotations

import pytest
import tomllib
from tests.e2e.training_run import REPOSITORY

from elastipod.integrations.packages import TESTED


@pytest.mark.parametrize("name", sorted(TESTED))
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
