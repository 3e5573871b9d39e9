"""Clusters that cannot be started, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_local import cluster, network
from elastipod_local.cluster import DEFAULT_OPTIONS, Cluster
from elastipod_local.errors import LocalClusterError


def test_where_a_route_covers_all_addresses_the_route_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some VPNs route the whole range to themselves, and then no cluster is there that could be taken down."""
    monkeypatch.setattr(cluster, "is_root", lambda: True)
    monkeypatch.setattr(network, "ALLOCATION_LOCK", tmp_path / "lock")
    monkeypatch.setattr(network, "free_addressing", list)
    with pytest.raises(
        LocalClusterError, match=r"in use \(198\.18\.0\.0/15\); .*another cluster.*or delete the route .*VPN"
    ):
        Cluster("one", tmp_path / "one")._take_addresses(DEFAULT_OPTIONS)
