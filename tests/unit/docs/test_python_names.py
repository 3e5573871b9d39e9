"""The page of Python names is that of the library as it is, and names what the library exports."""

from __future__ import annotations

import importlib
import types

import pytest
from tests import python_names
from tests.unit.docs.pages import page

import elastipod


def test_the_page_is_current() -> None:
    assert page("docs/reference/python.md").text == python_names.render(), "run `make generate`"


def test_it_has_every_public_name() -> None:
    _, *rows = page("docs/reference/python.md").table_rows("## elastipod")
    assert {name.strip("`") for name, _ in rows} == set(elastipod.__all__)
    assert len(rows) > 50


def test_a_name_that_says_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = types.SimpleNamespace(__all__=["mute"], mute=type("mute", (), {}))
    monkeypatch.setattr(importlib, "import_module", lambda name: silent)
    with pytest.raises(ValueError, match=r"elastipod.audit.mute has no docstring"):
        list(python_names.described("elastipod.audit"))
