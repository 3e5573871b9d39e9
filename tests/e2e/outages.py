"""Outages of a local cluster's control plane, each for a number of seconds; whatever happens, all of it runs afterwards."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from elastipod_local.addressing import API_PORT
from elastipod_local.cluster import Cluster

# etcd answers nothing for so long, again and again: calls of the API server take seconds, some of them time out.
PULSE_S, PAUSE_S = 2.0, 0.5
CUT_EVERY_S = 1.5


def frozen_api_server(cluster: Cluster, seconds: float) -> None:
    """The API server hangs: connections stay open, and nothing is answered until the end."""
    cluster.freeze_role("kube-apiserver")
    try:
        time.sleep(seconds)
    finally:
        cluster.thaw_role("kube-apiserver")


def dead_api_server(cluster: Cluster, seconds: float) -> None:
    """The API server is killed, and started again after that time; returns when it is ready."""
    cluster.kill_role("kube-apiserver")
    try:
        time.sleep(seconds)
    finally:
        cluster.start_role("kube-apiserver")


def slow_etcd(cluster: Cluster, seconds: float) -> None:
    """Etcd stands still most of the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cluster.freeze_role("etcd")
        try:
            time.sleep(PULSE_S)
        finally:
            cluster.thaw_role("etcd")
        time.sleep(PAUSE_S)


def cut_watches(cluster: Cluster, seconds: float) -> None:
    """Every connection to the API server is reset, again and again: no watch lasts, and calls break in the middle."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert reset_connections(cluster), "connections to the API server were found and reset"
        time.sleep(CUT_EVERY_S)


def reset_connections(cluster: Cluster) -> int:
    """Reset all connections that the API server has to its clients, and give their number."""
    address = cluster.state().addressing.api_address
    command = ["ss", "-K", "-H", "-t", "-n", "state", "established", "src", f"{address}", "sport", "=", f":{API_PORT}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return len(done.stdout.splitlines())


OUTAGES: dict[str, Callable[[Cluster, float], None]] = {
    "the API server hangs": frozen_api_server,
    "the API server is dead": dead_api_server,
    "etcd is slow": slow_etcd,
    "connections are reset": cut_watches,
}
