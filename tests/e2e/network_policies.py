"""An engine that enforces NetworkPolicies on the nodes of a local cluster: that of kube-network-policies, one for each node.

It tells the kernel by nftables which packets it wants to judge. Where the kernel has no `queue` for nftables, that fails as a
whole, is logged, and the engine judges what it is given; the same rules are written with iptables here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.go_programs import program
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster

# As the engine's own: connections that exist go on, the node itself may always, every other packet waits for its verdict.
RULES = (
    ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"),
    ("-m", "owner", "--uid-owner", "0", "-j", "ACCEPT"),
    ("-j", "NFQUEUE", "--queue-num", "100"),
)


@contextmanager
def enforced(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Enforce the policies of a cluster on all nodes that it has now."""
    engine, environment = program("network-policies"), {**os.environ, **cluster.environment()}
    with ExitStack() as stack:
        for name, record in cluster.state().nodes.items():
            assert record.inner is not None
            enter = ("nsenter", f"--net=/proc/{record.inner.pid}/ns/net")
            process = stack.enter_context(_running([*enter, str(engine), name], folder / f"{name}.log", environment))
            for rule in RULES:
                chain = (*enter, "iptables", "--wait", "-t", "mangle")
                subprocess.run([*chain, "-A", "POSTROUTING", *rule], check=True, timeout=PATIENCE_S)
                stack.callback(subprocess.run, [*chain, "-D", "POSTROUTING", *rule], check=True, timeout=PATIENCE_S)
            assert process.poll() is None, (folder / f"{name}.log").read_text()[-2000:]
        yield


@contextmanager
def _running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
