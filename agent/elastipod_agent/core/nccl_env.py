"""What torch's NCCL watchdog does when a collective fails: end the process, or leave it to an in-process restart.

torch documents for TORCH_NCCL_ASYNC_ERROR_HANDLING: 0 nothing; 1 abort the communicators and end the process; 2 abort them
only; 3 end the process only. Workers that are replaced after a fault shall end (1, as torchrun sets it). Workers that are kept
must live on when another one dies: neither may an error end them, nor may the watchdog abort communicators behind the script's
back (2), for what is queued behind an aborted collective computes with data that never arrived. Their script aborts all groups
itself when the agent tells it of the fault. TORCH_NCCL_RETHROW_CUDA_ERRORS=0 keeps the watchdog's thread from ending the process
with an exception that nobody can catch.
"""

from __future__ import annotations

from collections.abc import Mapping

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"

_FORMER_NAME = "NCCL_ASYNC_ERROR_HANDLING"  # torch still reads it where the new name is not set
_LIVES = ("0", "2")  # values of HANDLING with which the process survives an error
_FALSE = ("0", "n", "no", "f", "false")  # as torch reads them


def nccl_env(base: Mapping[str, str], *, keeps_processes: bool) -> dict[str, str]:
    """Give what to add to a worker's environment; what ``base`` sets stays."""
    wanted = {HANDLING: "0", RETHROW: "0"} if keeps_processes else {HANDLING: "1"}
    if HANDLING not in base and _FORMER_NAME in base:
        del wanted[HANDLING]
    return {name: base.get(name, value) for name, value in wanted.items()}


def nccl_warnings(base: Mapping[str, str], *, keeps_processes: bool) -> list[str]:
    """Name what the user set that lets an error of NCCL end the processes that an in-process restart would keep."""
    if not keeps_processes:
        return []
    warnings: list[str] = []
    name = HANDLING if HANDLING in base else _FORMER_NAME
    if (value := base.get(name)) is not None and value not in _LIVES:
        warnings.append(
            f"{name}={value} ends worker processes when a collective fails, so that --inprocess-restart cannot keep them; "
            "remove it, or set it to 0"
        )
    if (value := base.get(RETHROW)) is not None and value.lower() not in _FALSE:
        warnings.append(
            f"{RETHROW}={value} ends worker processes when CUDA reports an error, so that --inprocess-restart cannot keep them; "
            "remove it, or set it to 0"
        )
    return warnings
