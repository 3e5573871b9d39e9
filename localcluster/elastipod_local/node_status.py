"""Keeps the fake extended resource of a node in its status, with the node's own rights, as a device plugin would."""

import time
from pathlib import Path
from typing import Any

from elastipod_local.api import ApiServer
from elastipod_local.node_config import ETC, SLOT_RESOURCE, InitConfig

FIRST_CHECK_S = 0.25
CHECK_EVERY_S = 10.0


def keep_slots(config: InitConfig) -> None:
    """Look at the node's status for ever and put the resource back whenever kubelet has dropped it, as at its start."""
    etc = Path(ETC)
    client = (etc / "kubelet-client.crt", etc / "kubelet-client.key")
    server = ApiServer(config.api_host, config.api_port, etc / "ca.crt", *client)
    interval_s = FIRST_CHECK_S
    while True:
        # Around kubelet's start its own reports undo ours, so calm is believed only little by little.
        settled = _ensure_slots(config, server)
        interval_s = min(2 * interval_s, CHECK_EVERY_S) if settled else FIRST_CHECK_S
        time.sleep(interval_s)


def _ensure_slots(config: InitConfig, server: ApiServer) -> bool:
    """Give True when the status already holds the resource; otherwise write it, if the node is registered."""
    path = f"/api/v1/nodes/{config.node}"
    node = server.get(path)
    if node is None:
        return False
    patch = missing_slots(node, config.slots)
    if patch is not None:
        server.patch(f"{path}/status", patch)
    return patch is None


def missing_slots(node: dict[str, Any], slots: int) -> dict[str, Any] | None:
    """Give the merge patch that the node's status lacks, None when it lacks nothing."""
    wanted = {SLOT_RESOURCE: str(slots)}
    status = node.get("status", {})
    parts = ("capacity", "allocatable")
    if all(status.get(part, {}).get(SLOT_RESOURCE) == str(slots) for part in parts):
        return None
    return {"status": {part: wanted for part in parts}}
