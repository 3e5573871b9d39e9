"""A machine that cannot have nodes is told so at once, in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastipod_local import host, machine
from elastipod_local.errors import LocalClusterError, UnsupportedError
from elastipod_local.machine import require_namespaces, require_nodes_possible

REFUSING = """#!/bin/sh
echo "unshare: unshare failed: Operation not permitted" >&2
exit 1
"""


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine that lacks nothing."""
    monkeypatch.setattr(host, "is_root", lambda: True)
    monkeypatch.setattr(machine, "require_namespaces", lambda: None)
    monkeypatch.setattr(machine, "missing_packages", list)
    monkeypatch.setattr(machine, "cache_dir", lambda: Path("/var/cache/elastipod"))
    return monkeypatch


def test_a_machine_that_lacks_nothing_can_have_nodes(able: pytest.MonkeyPatch) -> None:
    require_nodes_possible()


def test_a_plain_user_cannot(able: pytest.MonkeyPatch) -> None:
    able.setattr(host, "is_root", lambda: False)
    with pytest.raises(UnsupportedError, match="creating nodes needs root"):
        require_nodes_possible()


def test_a_cache_that_nodes_cannot_see_is_told(able: pytest.MonkeyPatch) -> None:
    able.setattr(machine, "cache_dir", lambda: Path("/tmp/cache"))
    with pytest.raises(LocalClusterError, match="set XDG_CACHE_HOME to another folder"):
        require_nodes_possible()


def test_missing_packages_without_apt_are_told_by_their_names(able: pytest.MonkeyPatch) -> None:
    able.setattr(machine, "missing_packages", lambda: ["containerd", "runc"])
    able.setattr("shutil.which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"nodes need containerd, runc .* has no apt-get"):
        require_nodes_possible()


def test_missing_packages_that_apt_can_bring_are_no_reason(able: pytest.MonkeyPatch) -> None:
    able.setattr(machine, "missing_packages", lambda: ["containerd", "runc"])
    able.setattr("shutil.which", lambda name: "/usr/bin/apt-get")
    require_nodes_possible()


def test_a_container_without_namespaces_is_told_how_to_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "unshare").write_text(REFUSING)
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UnsupportedError, match=r"even root gets none \(.*Operation not permitted\); .* --privileged"):
        require_namespaces()


@pytest.mark.needs_root
def test_a_machine_whose_root_gets_namespaces_passes() -> None:
    require_namespaces()
