"""Telling the agent, and through it the operator, which durable checkpoint is the newest."""

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
    """Say that the checkpoint of a step is complete and durable; one rank of each pod does. Never fails training."""
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
        log.warning("the agent was not told of the checkpoint of step %d: %s", step, error)
