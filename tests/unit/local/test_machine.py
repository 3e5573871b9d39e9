"""A machine that cannot have nodes is told so at once, in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

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
    for check in ("require_namespaces", "require_control_groups"):
        monkeypatch.setattr(machine, check, lambda: None)
    monkeypatch.setattr(machine, "require_overlay", lambda folder: None)
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


def test_both_folders_are_tried_in_which_nodes_need_overlays(able: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[Path] = []
    able.setattr(machine, "require_overlay", tried.append)
    require_nodes_possible(tmp_path)
    assert tried == [Path("/var/cache/elastipod"), tmp_path]


ON_AN_OVERLAY = """
import sys
from pathlib import Path
from elastipod_local.errors import UnsupportedError
from elastipod_local.machine import require_overlay
for folder in map(Path, sys.argv[1:]):
    try:
        require_overlay(folder)
        print("possible")
    except UnsupportedError as told:
        print(told)
"""


@pytest.mark.needs_root
def test_a_container_whose_root_is_an_overlay_is_told_where_to_mount_a_volume(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "root", "volume"):
        (tmp_path / name).mkdir()
    overlay = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    inside = f'mount -t overlay -o {overlay} container {tmp_path}/root && exec "$0" "$@"'
    folders = (tmp_path / "root" / ".run" / "cluster", tmp_path / "volume" / "cache")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside, sys.executable, "-c", ON_AN_OVERLAY, *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    refused, possible = done.stdout.splitlines()
    assert f"{folders[0]} is on a file system that takes no overlay (mount: " in refused
    assert f"mount a volume there (docker run --volume NAME:{folders[0]} ...)" in refused
    assert possible == "possible", done.stderr
    assert [entry.name for entry in (tmp_path / "upper").iterdir()] == []
    assert [entry.name for entry in (tmp_path / "volume").iterdir()] == []
