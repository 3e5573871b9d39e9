"""Operators as processes of this machine, with the rights of the chart's service account, to be killed as often as one likes.

A container that ends every ten seconds is held back by kubelet for up to five minutes; these are started again at once.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.conftest import OPERATOR_NAMESPACE

from elastipod_local.api import ApiServer
from elastipod_local.cluster import Cluster
from elastipod_local.host import ends_with_parent

# What an operator says when the API server kept it waiting for too long.
OTHERS_DOING = ("the lease was lost", "Request attempt")
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/elastipod-operator"


@dataclass
class Operators:
    """Operators by the name under which they hold the lease, as a container that is started again keeps its pod's name."""

    api: ApiServer
    folder: Path
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start the operator of this name; its log goes on in <name>.log."""
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                ends_with_parent([sys.executable, "-m", "elastipod.cli", "operator"]),
                env={**self.environment, "POD_NAME": name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """End it with SIGKILL."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def ended(self) -> list[str]:
        """Give those that ended by themselves, and forget them: who cannot renew its lease in time must do so."""
        found = [name for name, process in self.running.items() if process.poll() is not None]
        for name in found:
            del self.running[name]
        return found

    def leader(self) -> str | None:
        """Give the name of the operator that holds the lease and runs; None where that is none of ours at the moment."""
        lease = self.api.get(LEASE) or {}
        holder: str | None = lease.get("spec", {}).get("holderIdentity")
        return holder if holder in self.running else None

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def complaints(self) -> list[str]:
        """Give what the operators logged as an error, or died of: a line each. An API server that is slow is none of theirs."""
        lines = (line for path in sorted(self.folder.glob("*.log")) for line in path.read_text().splitlines() if line)
        return [line[:2000] for line in lines if _is_complaint(line)]

    def end(self) -> None:
        """End all of them in good order, or else at once."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


def _is_complaint(line: str) -> bool:
    if not line.startswith("{"):
        return True
    try:
        said = json.loads(line)
    except ValueError:
        return False  # cut short by a SIGKILL
    return bool(said["level"] == "error" and not said["message"].startswith(OTHERS_DOING))


@contextmanager
def operators_outside(cluster: Cluster, folder: Path) -> Iterator[Operators]:
    """Have the operators run on this machine instead of in the chart's pods; those come back at the end."""
    here = ("-n", OPERATOR_NAMESPACE)
    deployment = json.loads(cluster.kubectl(*here, "get", "deploy", "elastipod", "-o", "json"))
    pod = deployment["spec"]["template"]["spec"]
    key_secret = next(v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "install-key")
    key = json.loads(cluster.kubectl(*here, "get", "secret", key_secret, "-o", "json"))["data"]["install-key"]
    (folder / "install-key").write_bytes(base64.b64decode(key))
    token = cluster.kubectl(*here, "create", "token", pod["serviceAccountName"], "--duration=3h").strip()
    access = json.loads(cluster.kubectl("config", "view", "--raw", "--flatten", "-o", "json"))
    for user in access["users"]:
        user["user"] = {"token": token}
    (folder / "kubeconfig").write_text(json.dumps(access))
    environment = {
        "PATH": os.environ["PATH"],
        "KUBECONFIG": str(folder / "kubeconfig"),
        "POD_NAMESPACE": OPERATOR_NAMESPACE,
        "METRICS_PORT": "0",
        "ELASTIPOD_INSTALL_KEY_FILE": str(folder / "install-key"),
    }
    cluster.kubectl(*here, "scale", "deploy/elastipod", "--replicas=0")
    cluster.kubectl(
        *here, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=elastipod", "--timeout=240s", check=False
    )
    operators = Operators(cluster.api_server, folder, environment)
    try:
        yield operators
    finally:
        operators.end()
        for name in ("install-key", "kubeconfig"):
            (folder / name).unlink()  # the logs are kept
        cluster.kubectl(*here, "scale", "deploy/elastipod", f"--replicas={deployment['spec']['replicas']}")
        cluster.kubectl(*here, "rollout", "status", "deploy/elastipod", "--timeout=240s")
