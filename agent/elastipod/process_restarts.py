"""Tells a script once that each resize and recovery restarts its processes, where `State` might keep them. Standard library only."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping

from elastipod.worker_file import WORKER_FILE_ENV

log = logging.getLogger(__name__)

_is_settled = False  # in this process: it was said, or need not be


def tell_of_process_restarts() -> None:
    """Log one sentence, at most once in a job, on its rank 0. What scripts without `State` use calls it, as often as it likes."""
    global _is_settled
    if _is_settled:
        return
    _is_settled = True
    if is_news(os.environ, sys.modules):
        log.warning(
            "each resize and recovery restarts the processes of this job; where the model is a plain one or uses DDP, FSDP2 or HSDP, "
            "elastipod.State can keep them, with their state in memory (docs/user-guide.md, Keeping the state in memory)"
        )


def need_not_tell() -> None:
    """Say nothing in this process: it keeps its state in memory, uses the original's calls, or leaves its loop to a framework."""
    global _is_settled
    _is_settled = True


def is_news(environ: Mapping[str, str], modules: Iterable[str]) -> bool:
    """Whether this process is where a job is told: rank 0 under `hyperpodrun`, right after the first change of the job.

    environ: of the process. modules: names of those that are imported. A script that imports the original's packages was written to be
    restarted.
    """
    if not environ.get(WORKER_FILE_ENV) or (environ.get("ELASTIPOD_GENERATION"), environ.get("RANK")) != ("2", "0"):
        return False
    return not any(name.startswith("hyperpod_") for name in modules)
