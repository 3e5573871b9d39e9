"""The ports of a cluster: its addresses are its own, but who listens on all addresses of the machine has the port of each."""

import errno
import re
import socket
from collections.abc import Mapping

from elastipod_local.addressing import (
    API_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    KUEUE_HEALTH_PORT,
    KUEUE_WEBHOOK_PORT,
    UNUSED_LOOPBACK,
)
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import find_program, run


def of_cluster(*, with_kueue: bool) -> dict[int, str]:
    """Give the ports on which a cluster's processes listen on this machine, and whose each is."""
    control_plane = {API_PORT: "kube-apiserver", ETCD_PORT: "etcd", ETCD_PEER_PORT: "etcd"}
    kueue = {KUEUE_WEBHOOK_PORT: "kueue", KUEUE_HEALTH_PORT: "kueue"}
    return {**control_plane, **(kueue if with_kueue else {})}


def require_free(ports: Mapping[int, str]) -> None:
    """Raise LocalClusterError naming the first port that another program has on all addresses, and that program."""
    for port, role in ports.items():
        if _is_taken(port):
            raise LocalClusterError(
                f"port {port}, on which the cluster's {role} listens, is taken on all addresses of this machine by "
                f"{_holder(port)}; end it, or let it listen on one address such as 127.0.0.1"
            )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # As the cluster's own servers do: connections that ended just now are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(UNUSED_LOOPBACK), port))
        except OSError as refused:
            return refused.errno == errno.EADDRINUSE
    return False


def _holder(port: int) -> str:
    """Name the program that listens on a port, as far as it can be known: it may run in another container."""
    if find_program("ss") is None:
        return "another program"
    said = run(["ss", "-Hltnp", f"sport = :{port}"], check=False).stdout
    found = re.search(r'users:\(\("([^"]+)",pid=(\d+)', said)
    return f"{found[1]} (pid {found[2]})" if found else "another program"
