"""Folders: what nodes can see."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_local.errors import LocalClusterError
from elastipod_local.paths import cache_dir, require_visible_to_nodes


def test_a_cache_that_nodes_cannot_see_is_refused_with_what_to_do() -> None:
    with pytest.raises(LocalClusterError, match=r"below /tmp.*set XDG_CACHE_HOME to another folder"):
        require_visible_to_nodes(Path("/tmp/cache/elastipod"))


def test_another_folder_is_fine() -> None:
    require_visible_to_nodes(Path("/var/cache/elastipod"))


def test_a_cache_that_cannot_be_made_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(LocalClusterError, match=r"file/elastipod cannot be made .*; set XDG_CACHE_HOME to a folder"):
        cache_dir()


def test_a_cache_behind_a_link_is_named_by_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A node follows no link to another disk: it has that disk only where it is mounted."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert cache_dir() == tmp_path / "disk" / "elastipod"


def test_a_relative_cache_is_ignored_as_the_specification_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would be another one in each folder, and none at all inside a node."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert cache_dir() == tmp_path / "home" / ".cache" / "elastipod"
