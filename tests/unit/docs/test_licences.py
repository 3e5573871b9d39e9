"""Licences of what the images contain: each package says its own, and it is one that the security page allows."""

from __future__ import annotations

import re
from email.message import Message
from email.parser import Parser
from importlib import metadata
from typing import cast

import pytest
from tests.nonempty import some
from tests.unit.docs.pages import ROOT, page

ALLOWED = frozenset(
    {
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "MIT", "MIT-0", "PSF-2.0", "Zlib"),
        *("LLVM-exception", "MPL-2.0"),
    }
)  # fmt: skip
# How packages of an older format say it in their classifiers.
CLASSIFIERS = {"BSD License": "BSD-3-Clause", "MIT License": "MIT", "Apache Software License": "Apache-2.0",
               "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "Python Software Foundation License": "PSF-2.0"}  # fmt: skip
OF_NVIDIA = ("nvidia-", "cuda-toolkit")
PIN = re.compile(r"^([a-z0-9._-]+)==([^ ]+)(?: ; (.*?))? \\$", re.MULTILINE)


def terms(found: Message) -> set[str]:
    """Give the licences that a package names; empty where it names none."""
    if expression := found.get("License-Expression"):
        return set(re.split(r" (?:AND|OR|WITH) ", expression.replace("(", "").replace(")", "")))
    last = {line.rpartition(" :: ")[2] for line in found.get_all("Classifier") or () if line.startswith("License ::")}
    return {CLASSIFIERS.get(one, one) for one in last} or {*filter(None, [found.get("License")])}


def licences(requirements: str) -> dict[str, set[str]]:
    """Give the licences of the pinned packages that this machine has; only those for other machines may be missing."""
    given = {}
    for name, _, condition in some(PIN.findall((ROOT / "requirements" / requirements).read_text())):
        try:
            given[name] = terms(cast(Message, metadata.metadata(name)))
        except metadata.PackageNotFoundError:
            assert condition, f"{name} is not installed"
    return given


@pytest.mark.parametrize("requirements", ["operator.txt", "train.txt"])
def test_every_package_has_a_licence_that_is_allowed(requirements: str) -> None:
    found = licences(requirements)
    ours = {name: names for name, names in found.items() if not name.startswith(OF_NVIDIA)}
    assert {name: names for name, names in ours.items() if not names or not names <= ALLOWED} == {}
    assert requirements == "train.txt" or ours == found, "nothing proprietary is in the operator's image"


def test_the_page_names_those_that_are_not_simply_permissive() -> None:
    text = page("docs/security.md").text
    assert [name for name, names in licences("operator.txt").items() if "MPL-2.0" in names] == ["certifi"]
    assert "certifi (MPL-2.0)" in text
    assert "NVIDIA's libraries, which are proprietary" in text


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("License-Expression: MIT AND (GPL-3.0-only OR ISC)", {"MIT", "GPL-3.0-only", "ISC"}),
        ("Classifier: License :: OSI Approved :: BSD License", {"BSD-3-Clause"}),
        ("Classifier: License :: Other/Proprietary License", {"Other/Proprietary License"}),
        ("License: whatever", {"whatever"}),
        ("Name: silent", set()),
    ],
)
def test_licences_are_read(header: str, names: set[str]) -> None:
    assert terms(Parser().parsestr(f"{header}\n")) == names
