"""The protocol between workers and their agent on the Unix socket of a pod (docs/design/contracts.md, 11).

One JSON object per line, UTF-8, in both directions. A worker sends a call and the agent answers, one call at a time on each
connection. Nothing is pickled. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from elastipod.json_values import parse_finite_json
from elastipod.string_enum import StringEnum

SOCKET_ENV: Final = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"
# What a worker that can be kept is told beside the variables that torch needs: the key under which workers of its job know each other,
# and, where others train already, the host:port of the store at which they have met, after SERVED_BY_AGENT if an agent serves it.
WORKER_KEY_ENV: Final = "ELASTIPOD_WORKER_KEY"
FOLLOWED_STORE_ENV: Final = "ELASTIPOD_FOLLOWED_STORE"
SERVED_BY_AGENT: Final = "agent://"
# "1": the ranks that train still drain, and the new rank may follow them to their end
EARLY_START_ENV: Final = "ELASTIPOD_EARLY_START"
STORE_ENV: Final = "ELASTIPOD_STORE"  # host:port of the agent that serves the store of the generation, where one does
PROTOCOL: Final = 1
MAX_CALL_BYTES: Final = 256 * 1024  # one line from a worker
MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024  # one line from the agent; a start carries the data of all ranks
MAX_WAIT_S: Final = 60.0  # the longest wait of one call; the worker then calls again


class RestartMode(StringEnum):
    """How much is restarted after a fault. The values are used on the wire and in /status."""

    IN_PROCESS_RESTART = "in_process_restart"
    PROCESS_LEVEL_RESTART = "process_level_restart"
    LOCAL_PRL = "local_process_level_restart"  # the name that existing code uses
    LOCAL_PROCESS_LEVEL_RESTART = "local_process_level_restart"
    JOB_LEVEL_RESTART = "job_level_restart"


class CheckpointType(StringEnum):
    """The part of the training state that a checkpoint holds."""

    MODEL_CHECKPOINT = "model_checkpoint"
    DATA_CHECKPOINT = "data_checkpoint"


class MalformedMessage(ValueError):
    """A line that does not belong to this protocol; the text says why."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Give a message as one line. Raises MalformedMessage when it cannot be written as JSON."""
    try:
        return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedMessage(f"the message cannot be written as JSON: {error}") from error


def decode(line: bytes) -> dict[str, Any]:
    """Give the message in one line. Raises MalformedMessage."""
    try:
        message = parse_finite_json(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the line is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessage("the line is no JSON object")
    return message
