"""Debian packages that this machine lacks: what of apt's troubles keeps them from being installed, and what does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastipod_local import packages
from elastipod_local.errors import LocalClusterError
from elastipod_local.packages import ensure_packages

LOCKED = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (unattended-upgr)"


class Apt:
    """An apt-get that fails as it is told to; `runs` are the words of its calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = folder / "apt-get"
        self.fails("")

    def fails(self, body: str) -> None:
        self._program.write_text(
            f'#!/bin/sh\ncd {self._folder}\necho "$1" >> runs\n{body}\n[ "$1" != install ] || touch done\n'
        )
        self._program.chmod(0o755)

    @property
    def runs(self) -> list[str]:
        return (self._folder / "runs").read_text().split()


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apt:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packages, "missing_packages", lambda: [] if (tmp_path / "done").exists() else ["runc"])
    monkeypatch.setattr(packages, "LOCK_POLL_S", 0.01)
    return Apt(tmp_path)


def test_a_source_that_cannot_be_refreshed_is_no_obstacle(apt: Apt) -> None:
    apt.fails('[ "$1" != update ] || { echo "E: the key of a third party has expired" >&2; exit 100; }')
    ensure_packages()
    assert apt.runs == ["update", "install"]


def test_an_installation_that_fails_tells_of_the_lists_that_were_not_refreshed(apt: Apt) -> None:
    apt.fails('echo "E: $1: no" >&2; exit 100')
    with pytest.raises(LocalClusterError) as told:
        ensure_packages()
    assert str(told.value) == (
        "`apt-get install` failed: E: install: no; `apt-get update` had failed before: E: update: no"
    )


def test_another_apt_is_waited_for(apt: Apt) -> None:
    apt.fails(f'[ $(wc -l < runs) -gt 4 ] || {{ echo "{LOCKED}" >&2; exit 100; }}')
    told: list[str] = []
    ensure_packages(told.append)
    assert apt.runs == ["update"] * 5 + ["install"]
    assert told[1:] == ["  waiting for another program that uses apt, 0 s"]


def test_another_apt_is_not_waited_for_for_ever(apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LOCK_WAIT_S", 0.1)
    apt.fails(f'echo "{LOCKED}" >&2; exit 100')
    with pytest.raises(LocalClusterError, match="held by process 7"):
        ensure_packages()
