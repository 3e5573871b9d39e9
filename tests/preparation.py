"""What the tiers need on this machine: fetched and built before the first test, whose time limit it would break."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import pytest

from elastipod_local import binaries
from elastipod_local.errors import LocalClusterError, UnsupportedError, what_the_machine_refused
from elastipod_local.host import Progress, quiet
from elastipod_local.machine import require_nodes_possible
from elastipod_local.prepare import announce, prepare

_SERVER = binaries.CONTROL_PLANE
_KUEUE = (*binaries.CONTROL_PLANE, *binaries.KUEUE)
_NODES = (*binaries.CONTROL_PLANE, *binaries.NODE, *binaries.KUEUE)
# Tier -> fixture -> programs. Those of nodes need images as well.
PROGRAMS: dict[str, dict[str, tuple[str, ...]]] = {
    "api": {"bare_api_server": _SERVER, "kueue_server": _KUEUE, "fair_kueue_server": _KUEUE},
    "e2e": {"cluster": _NODES, "cut_short": _NODES, "server": ("versitygw",)},
    "chart": {"cluster": (*_SERVER, "helm"), "": ("helm",)},  # every test there renders the chart
}


def programs_for(tier: str, fixtures: Iterable[str]) -> list[str]:
    """Give the programs that tests of a tier need which use these fixtures."""
    found = PROGRAMS.get(tier, {})
    return list(dict.fromkeys(name for fixture in ("", *fixtures) for name in found.get(fixture, ())))


def possible_fixtures(tier: str) -> list[str]:
    """Give the fixtures of a tier that this machine can have."""
    return [name for name in PROGRAMS.get(tier, ()) if not with_nodes(tier, [name]) or why_no_nodes() is None]


def with_nodes(tier: str, fixtures: Iterable[str]) -> bool:
    """Tell whether a test of a tier that uses these fixtures has a cluster with nodes."""
    return needs_images(programs_for(tier, fixtures))


@cache
def why_no_nodes() -> str | None:
    """Say why no node can be created here, or None when one can."""
    try:
        require_nodes_possible()
    except UnsupportedError as reason:
        return f"needs nodes: {reason}"
    except LocalClusterError:  # a setting: whoever prepares the nodes fails with it
        return None
    return None


def needs_images(names: Iterable[str]) -> bool:
    return bool(set(names) & set(binaries.NODE))


def announce_tiers(tiers: Iterable[str], progress: Progress) -> None:
    """Say once what all tests of these tiers need and this machine lacks; what cannot be had fails its tier later."""
    names = list(dict.fromkeys(name for tier in tiers for name in programs_for(tier, possible_fixtures(tier))))
    with suppress(LocalClusterError):
        announce(names, with_images=needs_images(names), progress=progress)


def prepare_tier(tier: str, fixtures: Iterable[str] | None = None, progress: Progress = quiet) -> None:
    """Have there what tests of a tier need which use these fixtures, all possible ones by default. Raises LocalClusterError."""
    names = programs_for(tier, possible_fixtures(tier) if fixtures is None else fixtures)
    if names:
        prepare(names, with_images=needs_images(names), progress=progress)


def prepare_session(session: pytest.Session) -> None:
    """Do that for the tests that this session is going to run. Raises pytest.UsageError where it fails."""
    if session.config.option.collectonly:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    used: dict[str, set[str]] = {}
    for item in session.items:
        if not item.get_closest_marker("skip"):
            tier = item.path.relative_to(session.config.rootpath / "tests").parts[0]
            used.setdefault(tier, set()).update(getattr(item, "fixturenames", ()))
    try:
        for tier, fixtures in used.items():
            prepare_tier(tier, sorted(fixtures), reporter.write_line if reporter else quiet)
    except LocalClusterError as failed:
        raise pytest.UsageError(str(failed)) from failed
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise pytest.UsageError(what_the_machine_refused(failed)) from failed
