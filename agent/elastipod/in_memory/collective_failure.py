"""Tells a failed collective, from which a rank recovers in memory, from a failure of the script, from which it does not.

gloo raises a plain RuntimeError, as do many mistakes of a script. So three things are asked, the cheap ones first: can the error
come from a collective at all, does its text come from a transport, and does the agent say that the generation is over?
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from elastipod.torch_compat import device_errors

ASK_AGENT_S = 5.0  # for the agents to see that a process died and for the operator to call the others back
# Not ProcessGroupGloo: with that name begin torch's sentences on wrong arguments.
_TRANSPORT = re.compile(
    r"gloo/|gloo::|\bNCCL\b|ncclComm|ProcessGroupNCCL|Connection (?:closed|reset) by peer|Application timeout caused pair closure"
)
_MISUSE = re.compile(r"ncclInvalid(?:Usage|Argument)")  # NCCL refuses the call, also where no peer is gone
_COLLECTIVE_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
_ENGINE_FILE = "/torch/autograd/graph.py"


def is_collective_failure(error: BaseException, is_generation_over: Callable[[float], bool]) -> bool:
    """Tell whether an exception is that of a collective whose peer is gone.

    is_generation_over: waits up to a number of seconds for the agent to say so; asked only where the error itself does not tell.
    """
    if not isinstance(error, RuntimeError) or isinstance(
        error, (NotImplementedError, RecursionError, *device_errors())
    ):
        return False
    is_of_torch = isinstance(error, dist.DistError)
    if not is_of_torch and not can_come_from_collective(error.__traceback__):
        return False
    text = str(error)
    tells_itself = (is_of_torch or _TRANSPORT.search(text)) and not _MISUSE.search(text)
    return bool(tells_itself) or is_generation_over(ASK_AGENT_S)


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames hold that an exception and its causes came through, such as the process group of a collective.

    A group's connections close with the last reference to it, and a peer in a collective with this rank waits for that.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def can_come_from_collective(raised: TracebackType | None) -> bool:
    """Tell whether code of torch.distributed was running, or autograd's engine, from which DDP and FSDP reduce gradients."""
    files = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(raised)]
    return any(each in file for file in files for each in _COLLECTIVE_FILES) or bool(
        files and files[-1].endswith(_ENGINE_FILE)
    )
