"""What a worker and its agent say to one another over the Unix socket of a pod (docs/design/contracts.md, 11).

One JSON object a line, UTF-8, both ways; a worker asks and the agent answers, one call at a time on a connection.
Nothing is pickled. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

SOCKET_ENV: Final = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"
PROTOCOL: Final = 1
MAX_CALL_BYTES: Final = 256 * 1024  # one line of a worker
MAX_ANSWER_BYTES: Final = (
    32 * 1024 * 1024
)  # one line of the agent: a start carries what the operator sent for all ranks
MAX_WAIT_S: Final = 60.0  # the longest that the agent holds a call back; the worker then asks again


class RestartMode(str, Enum):
    """How much is started anew after a fault; the value is what goes over the wire and stands in /status."""

    IN_PROCESS_RESTART = "in_process_restart"
    PROCESS_LEVEL_RESTART = "process_level_restart"
    LOCAL_PRL = "local_process_level_restart"  # the name that existing code uses
    LOCAL_PROCESS_LEVEL_RESTART = "local_process_level_restart"
    JOB_LEVEL_RESTART = "job_level_restart"


class CheckpointType(str, Enum):
    """Which part of a training state a checkpoint holds."""

    MODEL_CHECKPOINT = "model_checkpoint"
    DATA_CHECKPOINT = "data_checkpoint"


class MalformedMessage(ValueError):
    """A line that is none of this protocol; the text is one sentence."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Give the line of one message. Raises MalformedMessage when it holds what JSON has no form for."""
    try:
        return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedMessage(f"the message cannot be written as JSON: {error}") from error


def decode(line: bytes) -> dict[str, Any]:
    """Read one line. Raises MalformedMessage."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the line is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessage("the line is no JSON object")
    return message
