"""Objects of a cluster, read without a process for each look: kubectl costs 50 ms of processor time, and waits look often."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from typing import Any

from tests.patience import PATIENCE_S

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


def look(cluster: Cluster, path: str) -> Body | None:
    """Give what the API server has at a path, None for nothing. Raises OSError when it does not answer, RuntimeError when it refuses.

    While the server begins to serve a kind it answers "too many requests" ("storage is (re)initializing"): asks again until
    PATIENCE_S, as kubectl does.
    """
    end = time.monotonic() + PATIENCE_S
    status, content = _get(cluster, path)
    while status == http.client.TOO_MANY_REQUESTS and time.monotonic() < end:
        time.sleep(0.2)
        status, content = _get(cluster, path)
    if status == http.client.NOT_FOUND:
        return None
    if status != http.client.OK:
        raise RuntimeError(f"{path}: {status} {content.decode(errors='replace')[:500]}")
    found: Body = json.loads(content)
    return found


def _get(cluster: Cluster, path: str) -> tuple[int, bytes]:
    server = cluster.api_server
    context = ssl.create_default_context(cafile=str(server.authority))
    context.load_cert_chain(server.certificate, server.key)
    connection = http.client.HTTPSConnection(server.host, server.port, timeout=PATIENCE_S, context=context)
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _path(kind: str, namespace: str) -> str:
    has_namespace = namespace and kind not in WITHOUT_NAMESPACE
    return "/".join([FOLDERS[kind], *(["namespaces", namespace] if has_namespace else []), kind])
