"""Objects of a cluster, read without a process for each look: kubectl costs 50 ms of processor time, and waits look often.

Connections stay open for the next look: a new one costs both sides as much as ten looks.
"""

from __future__ import annotations

import atexit
import http.client
import json
import threading
import time
from collections import defaultdict
from typing import Any

from tests.patience import PATIENCE_S

from elastipod_local.api import ApiServer
from elastipod_local.cluster import Cluster

Body = dict[str, Any]
CORE = ("configmaps", "events", "nodes", "persistentvolumeclaims", "pods", "secrets")
FOLDERS = {
    "hyperpodpytorchjobs": "/apis/sagemaker.amazonaws.com/v1",
    "workloads": "/apis/kueue.x-k8s.io/v1beta2",
    "clusterqueues": "/apis/kueue.x-k8s.io/v1beta2",
    "localqueues": "/apis/kueue.x-k8s.io/v1beta2",
    "jobs": "/apis/batch/v1",
    "deployments": "/apis/apps/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    **dict.fromkeys(CORE, "/api/v1"),
}

WITHOUT_NAMESPACE = ("clusterqueues", "nodes")


def get_object(cluster: Cluster, kind: str, name: str, namespace: str = "") -> Body:
    """Give an object by its kind's plural and its name; namespace means nothing to kinds without one.

    Raises KeyError when it is not there.
    """
    path = f"{_path(kind, namespace)}/{name}"
    if (found := look(cluster, path)) is None:
        raise KeyError(f"{path} is not there")
    return found


def list_objects(cluster: Cluster, kind: str, namespace: str = "", **selectors: str) -> list[Body]:
    """Give the objects of a kind by its plural, of all namespaces unless one is named.

    selectors: labelSelector and fieldSelector, with "=" and "," quoted as in addresses. The list is empty also while the kind
    is not served.
    """
    query = "&".join(f"{key}={value}" for key, value in selectors.items())
    found = look(cluster, f"{_path(kind, namespace)}?{query}") or {"items": []}
    items: list[Body] = found["items"]
    return items


def is_served(cluster: Cluster, kind: str) -> bool:
    """Whether a kind is served by its plural, and kubectl knows it too; kubectl is asked once the API server has it."""
    if look(cluster, _path(kind, "")) is None:
        return False
    return cluster.kubectl("get", kind, "--all-namespaces", "-o", "json", check=False) != ""


def look(cluster: Cluster, path: str, timeout_s: float = PATIENCE_S) -> Body | None:
    """Give what the API server has at a path, None for nothing. Raises OSError when it does not answer, RuntimeError when it refuses.

    timeout_s: for how long the server may say nothing. While it begins to serve a kind it answers "too many requests" ("storage is
    (re)initializing"): asks again until PATIENCE_S, as kubectl does.
    """
    end = time.monotonic() + PATIENCE_S
    status, content = _CONNECTIONS.get(cluster.api_server, path, timeout_s)
    while status == http.client.TOO_MANY_REQUESTS and time.monotonic() < end:
        time.sleep(0.2)
        status, content = _CONNECTIONS.get(cluster.api_server, path, timeout_s)
    if status == http.client.NOT_FOUND:
        return None
    if status != http.client.OK:
        raise RuntimeError(f"{path}: {status} {content.decode(errors='replace')[:500]}")
    found: Body = json.loads(content)
    return found


class _Connections:
    """Open connections that nobody uses at the moment, by API server; for any thread."""

    def __init__(self) -> None:
        self._idle: dict[ApiServer, list[http.client.HTTPSConnection]] = defaultdict(list)
        self._changing = threading.Lock()
        atexit.register(self._close)

    def get(self, server: ApiServer, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Give status and content of what is at a path. Raises OSError when the server does not answer."""
        with self._changing:
            kept = self._idle[server].pop() if self._idle[server] else None
        if kept is not None:
            try:
                return self._ask(server, kept, path, timeout_s)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                pass  # the server has closed it meanwhile, or is another one by now
        return self._ask(server, server.connection(timeout_s), path, timeout_s)

    def _ask(
        self, server: ApiServer, connection: http.client.HTTPSConnection, path: str, timeout_s: float
    ) -> tuple[int, bytes]:
        try:
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            connection.request("GET", path, headers={"Accept": "application/json"})
            answer = connection.getresponse()
            found = answer.status, answer.read()
        except BaseException:
            connection.close()
            raise
        with self._changing:
            self._idle[server].append(connection)
        return found

    def _close(self) -> None:
        for connection in (each for idle in self._idle.values() for each in idle):
            connection.close()


_CONNECTIONS = _Connections()


def _path(kind: str, namespace: str) -> str:
    has_namespace = namespace and kind not in WITHOUT_NAMESPACE
    return "/".join([FOLDERS[kind], *(["namespaces", namespace] if has_namespace else []), kind])
