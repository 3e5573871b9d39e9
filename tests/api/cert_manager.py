"""cert-manager's own controllers, built from the module that it publishes, and what kubelets do with a certificate's Secret."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chart.foreign_kinds import CERT_MANAGER, definitions
from tests.go_programs import program
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster

KINDS = ("certificates", "issuers", "clusterissuers", "certificaterequests")


@contextmanager
def cert_manager(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Serve cert-manager's kinds and run its controllers beside a cluster; gives their log."""
    files = [path.with_name(f"cert-manager.io_{kind}.yaml") for path in definitions(CERT_MANAGER)[:1] for kind in KINDS]
    cluster.kubectl("apply", "--server-side", *(f"--filename={path}" for path in files))
    names = [f"crd/{kind}.cert-manager.io" for kind in KINDS]
    cluster.kubectl("wait", "--for=condition=Established", f"--timeout={PATIENCE_S:.0f}s", *names)
    log = folder / "cert-manager.log"
    with log.open("wb") as output:
        environment = {**os.environ, **cluster.environment()}
        process = subprocess.Popen(
            [program("cert-manager")], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield log
        assert process.poll() is None, f"cert-manager ended by itself: {log.read_text()[-3000:]}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def data_of(cluster: Cluster, namespace: str, secret: str) -> dict[str, bytes]:
    """Give the entries of a Secret; none of one that is not there."""
    found = cluster.api_server.get(f"/api/v1/namespaces/{namespace}/secrets/{secret}") or {}
    return {name: base64.b64decode(text) for name, text in (found.get("data") or {}).items()}


@contextmanager
def mounted(cluster: Cluster, namespace: str, secret: str, folder: Path) -> Iterator[None]:
    """Keep the files of a Secret in a folder, as a kubelet does for a volume."""
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(0.5):
            for name, content in data_of(cluster, namespace, secret).items():
                draft = folder / f"{name}.new"
                draft.write_bytes(content)
                draft.rename(folder / name)

    thread = threading.Thread(target=follow, name=f"kubelet of Secret {secret}")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(PATIENCE_S)
