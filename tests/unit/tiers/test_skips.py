"""Tests that this machine cannot run are skipped with its reason, and the others run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from tests import conftest, preparation
from tests.conftest import TESTS, why_skipped

from elastipod_local import machine
from elastipod_local.errors import LocalClusterError, UnsupportedError


@dataclass
class Test:
    """What is looked at of a test."""

    __test__ = False

    path: Path
    fixturenames: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


PURE = Test(TESTS / "unit" / "core" / "test_one.py")
MOUNTING = Test(TESTS / "unit" / "local" / "test_one.py", markers=("needs_root",))
SERVER = Test(TESTS / "api" / "test_one.py", ("bare_api_server",))
AGENTS = Test(TESTS / "e2e" / "test_one.py", ("tmp_path",))
NODES = Test(TESTS / "e2e" / "test_one.py", ("cluster",))


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine whose root can have nodes."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "require_namespaces", lambda: None)
    monkeypatch.setattr(preparation, "require_nodes_possible", lambda: None)
    forget()
    yield monkeypatch
    forget()


def forget() -> None:
    conftest.why_no_cluster.cache_clear()
    conftest.why_no_namespaces.cache_clear()
    preparation.why_no_nodes.cache_clear()


def skipped(*tests: Test) -> list[str | None]:
    return [why_skipped(cast(pytest.Item, test)) for test in tests]


def test_a_machine_that_can_have_nodes_skips_nothing(root: pytest.MonkeyPatch) -> None:
    assert skipped(PURE, MOUNTING, SERVER, AGENTS, NODES) == [None] * 5


def test_a_plain_user_skips_what_needs_root(root: pytest.MonkeyPatch) -> None:
    root.setattr(os, "geteuid", lambda: 1000)
    pure, *others = skipped(PURE, MOUNTING, SERVER, AGENTS, NODES)
    assert pure is None
    assert others == ["needs root (network namespaces, mounts); run it as root to include it"] * 4


def test_a_container_without_namespaces_skips_what_needs_root(root: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedError("even root gets none")

    root.setattr(machine, "require_namespaces", refuse)
    root.setattr(preparation, "require_nodes_possible", refuse)
    none = "even root gets none"
    assert skipped(PURE, SERVER, AGENTS) == [None] * 3
    assert skipped(MOUNTING, NODES) == [none, f"needs nodes: {none}"]


def test_a_machine_without_nodes_skips_only_what_has_nodes(root: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedError("this machine has no apt-get")

    root.setattr(preparation, "require_nodes_possible", refuse)
    assert skipped(PURE, MOUNTING, SERVER, AGENTS) == [None] * 4
    assert skipped(NODES) == ["needs nodes: this machine has no apt-get"]
    assert preparation.possible_fixtures("e2e") == ["server"]
    assert preparation.possible_fixtures("chart") == ["cluster", ""]


def test_a_setting_that_keeps_nodes_away_is_no_reason_to_skip(root: pytest.MonkeyPatch) -> None:
    """It fails the tier, with the sentence that names it."""

    def refuse() -> None:
        raise LocalClusterError("set XDG_CACHE_HOME to another folder")

    root.setattr(preparation, "require_nodes_possible", refuse)
    assert skipped(NODES) == [None]
    assert preparation.possible_fixtures("e2e") == ["cluster", "cut_short", "server"]
