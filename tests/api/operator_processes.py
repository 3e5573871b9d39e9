"""Operators as processes beside an API server, several at a time, each with a name and a release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import ends_with_parent, wait_until

LEASE = "elastipod-operator"
REFUSED = "the operator cannot continue"


@dataclass
class Operators:
    """Operators by name. namespace: where jobs and leases are, unless an operator is started with another."""

    cluster: Cluster
    folder: Path
    namespace: str
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, **more: str) -> None:
        """Start an operator. more: further variables of its environment."""
        environ = {**os.environ, **self.cluster.environment(), "METRICS_PORT": "0", "WATCH_NAMESPACES": self.namespace}
        # The name of a pod is the name of a holder; marking its own pod fails here, which is only logged.
        environ |= {"POD_NAME": name, "POD_NAMESPACE": self.namespace, **more}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                ends_with_parent([sys.executable, "-m", "elastipod.cli", "operator"]),
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """End it with SIGKILL: nothing is released."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def refusal(self, name: str) -> str:
        """Wait until an operator ends because it must not run; give its sentence."""
        process = self.running.pop(name)
        assert process.wait(PATIENCE_S) == 1, self.log(name)
        sentences = [
            line["message"] for line in map(json.loads, self.log(name).splitlines()) if REFUSED in line["message"]
        ]
        assert len(sentences) == 1, self.log(name)
        return str(sentences[0])

    def leads(self, name: str, namespace: str = "") -> None:
        """Wait until an operator holds the lease, and has found that it may run its jobs."""

        def is_leader() -> bool:
            assert self.running[name].poll() is None, self.log(name)
            leases = list_objects(
                self.cluster, "leases", namespace or self.namespace, fieldSelector=f"metadata.name%3D{LEASE}"
            )
            return any(
                lease["spec"].get("holderIdentity") == name
                and '"leads":true' in lease["metadata"].get("annotations", {}).get("elastipod.io/scope", "")
                for lease in leases
            )

        wait_until(is_leader, deadline_s=PATIENCE_S, what=f"{name} to lead", every_s=0.1)

    def log(self, name: str) -> str:
        """Give what an operator has logged."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")


@contextmanager
def operators(cluster: Cluster, folder: Path, namespace: str) -> Iterator[Operators]:
    """Give a place to start operators; ends those that are left."""
    found = Operators(cluster, folder, namespace)
    try:
        yield found
    finally:
        for name in list(found.running):
            found.kill(name)
