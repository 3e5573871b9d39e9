"""What torch's NCCL watchdog does when a collective fails: end the process, or leave it to an in-process restart.

torch documents these values of TORCH_NCCL_ASYNC_ERROR_HANDLING: 0 nothing; 1 abort the communicators and end the process; 2 only
abort them; 3 only end the process. Workers that are replaced after a fault must end (1, which torchrun sets too). Workers that are kept
must survive the death of another worker. An error must not end them, and the watchdog must not abort communicators on its own (2),
because kernels queued behind an aborted collective would compute with data that never arrived. The script aborts all groups itself
when the agent reports the fault. TORCH_NCCL_RETHROW_CUDA_ERRORS=0 keeps the watchdog's thread from ending the process with an
exception that nobody can catch.

A watchdog that sees an error before the script aborts its groups writes its flight recorder and gives all ranks a minute for theirs; the
thread that polls for it waits for eight. A process group ends no sooner than both, and a worker that is kept has seconds for that. So
TORCH_NCCL_DUMP_ON_TIMEOUT=0 and TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=0.
"""

from __future__ import annotations

from collections.abc import Mapping

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"

_FORMER_NAME = "NCCL_ASYNC_ERROR_HANDLING"  # torch still reads it if the new name is not set
_FALSE = ("0", "n", "no", "f", "false")  # as torch reads them


def nccl_env(base: Mapping[str, str], *, keeps_processes: bool) -> dict[str, str]:
    """Give the variables to add to a worker's environment; values in ``base`` stay."""
    kept = {HANDLING: "0", RETHROW: "0", DUMP: "0", DUMP_WAIT: "0"}
    wanted = kept if keeps_processes else {HANDLING: "1"}
    if HANDLING not in base and _FORMER_NAME in base:
        del wanted[HANDLING]
    return {name: base.get(name, value) for name, value in wanted.items()}


def nccl_warnings(base: Mapping[str, str], *, keeps_processes: bool) -> list[str]:
    """Name the user's settings with which an NCCL error ends, or spoils, processes that an in-process restart would keep."""
    if not keeps_processes:
        return []
    warnings: list[str] = []
    name = HANDLING if HANDLING in base else _FORMER_NAME
    if (value := base.get(name)) is not None and value != "0":
        spoils = "lets steps count that a failed collective has spoilt"
        does = spoils if value == "2" else "ends worker processes when a collective fails"
        warnings.append(
            f"{name}={value} {does}, so that --inprocess-restart cannot keep them; remove it, or set it to 0"
        )
    if (value := base.get(RETHROW)) is not None and value.lower() not in _FALSE:
        warnings.append(
            f"{RETHROW}={value} ends worker processes when CUDA reports an error, so that --inprocess-restart cannot keep them; "
            "remove it, or set it to 0"
        )
    return warnings
