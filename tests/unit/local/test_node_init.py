"""How a node gets a root of its own: the mounts in their order."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from elastipod_local import node_init
from elastipod_local.node_config import InitConfig

HIDDEN = ("/run/user/0/cache", "/tmp/clone/.venv")


def test_nothing_is_mounted_over_what_a_node_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of a checkout below /tmp or /run are there in the node, which has both for itself."""
    targets: list[PurePosixPath] = []

    def record(source: str | Path, target: str | Path, *options: str) -> None:
        targets.append(PurePosixPath(target))

    monkeypatch.setattr(node_init, "mount", record)
    monkeypatch.setattr(node_init, "run", lambda command: None)
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    monkeypatch.setattr(Path, "rmdir", lambda self: None)
    monkeypatch.setattr(Path, "mkdir", lambda self, **options: None)
    node_init.enter_own_root(
        InitConfig(
            "node-1", str(tmp_path), "/logs", "/shared", visible=("/opt/cache", *HIDDEN), cgroups=(), commands={}
        )
    )
    root = PurePosixPath(tmp_path / "root" / "merged")
    for folder in HIDDEN:
        place = root / folder.lstrip("/")
        assert [target for target in targets[targets.index(place) :] if place.is_relative_to(target)] == [place]


def test_a_folder_behind_a_link_is_shown_where_it_is_and_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment on another disk, say: what is mounted over a link lands where the link leads, outside the node's root."""
    mounted: list[tuple[str, str]] = []
    root, disk, link = tmp_path / "root", tmp_path / "disk", tmp_path / "link"
    (disk / "venv").mkdir(parents=True)
    link.symlink_to(disk / "venv")
    monkeypatch.setattr(node_init, "mount", lambda source, target, *_: mounted.append((str(source), str(target))))
    node_init.show(str(link), root)
    assert mounted == [(f"{disk}/venv", f"{root}{disk}/venv")]
    assert Path(f"{root}{link}").readlink() == disk / "venv"
    node_init.show(str(link), root)  # the machine's root may hold the link already
