"""A framework that is missing or too old is named in one sentence, with the extra that brings it."""

from __future__ import annotations

import importlib

import pytest

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
        f"in a checkout of elastipod, run: pip install '.[{extra}]'"
    )


@pytest.mark.parametrize(
    ("found", "is_enough"),
    [("4.57.1", False), ("5.9", False), ("5.22.9", False), ("5.23", True), ("5.23.0.dev0", True), ("10.1", True)],
)
def test_versions_are_compared_by_number(monkeypatch: pytest.MonkeyPatch, found: str, is_enough: bool) -> None:
    monkeypatch.setattr(packages, "installed_version", lambda name: found)
    if is_enough:
        packages.require("transformers")
        return
    with pytest.raises(FrameworkError) as caught:
        packages.require("transformers")
    assert str(caught.value) == (
        f"elastipod.integrations.transformers needs transformers 5.23 or newer, but {found} is installed; "
        "in a checkout of elastipod, run: pip install '.[transformers]'"
    )


def test_another_package_with_the_same_modules_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"mlflow-skinny": "3.14.0"}
    monkeypatch.setattr(packages, "installed_version", installed.get)
    packages.require("mlflow")
    installed["mlflow-skinny"] = "3.13.9"
    with pytest.raises(FrameworkError, match=r"needs mlflow 3\.14 or newer, but 3\.13\.9 is installed"):
        packages.require("mlflow")
