"""Reporting the newest durable checkpoint to the agent, and through it to the operator."""

from __future__ import annotations

import logging
import os

from elastipod.ipc.clients import CheckpointDiscoverySocketClient
from elastipod.ipc.connections import HyperPodIPCException
from elastipod.ipc.protocol import SOCKET_ENV, CheckpointType
from elastipod.local_worker import LOCAL_RANK_ENV

log = logging.getLogger(__name__)

SERIES = "elastipod"


def report_checkpoint(step: int, path: str) -> None:
    """Report that the checkpoint of a step is complete and durable. One rank of each pod does; errors are only logged."""
    local_rank = os.environ.get(LOCAL_RANK_ENV) or os.environ.get("LOCAL_RANK") or "0"
    if local_rank != "0" or not os.environ.get(SOCKET_ENV):
        return
    try:
        client = CheckpointDiscoverySocketClient(SERIES, num_model_checkpoints=1)
        try:
            client.update(step, path, CheckpointType.MODEL_CHECKPOINT)
        finally:
            client.close()
    except HyperPodIPCException as error:
        log.warning("the checkpoint of step %d was not reported to the agent: %s", step, error)
