"""This process as the agent sees it: the worker file of its pod, its local rank and its generation."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache

from elastipod.stack_signal import enable_stack_signal
from elastipod.worker_file import WORKER_FILE_ENV, WorkerFile

log = logging.getLogger(__name__)

LOCAL_RANK_ENV = "ELASTIPOD_LOCAL_RANK"  # LOCAL_RANK is 0 everywhere with --virtual-local-rank


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker in a `hyperpodrun` pod. file: shared with the agent. local_rank: the worker's slot in that file."""

    file: WorkerFile
    local_rank: int


def local_worker() -> LocalWorker | None:
    """Give this process's worker file and local rank, or None outside a pod that `hyperpodrun` started.

    None also for a local rank that the agent has not started, such as one of a launcher inside a worker: it has no slot in the file.
    It learns of events from the ranks that have one.

    The first call also enables stack dumps for the agent. Raises WorkerFileError when the environment names a file that cannot be
    used. The file stays open until the process ends.
    """
    path = os.environ.get(WORKER_FILE_ENV)
    return _opened(path) if path else None


@lru_cache(maxsize=1)
def _opened(path: str) -> LocalWorker | None:
    local_rank = int(os.environ.get(LOCAL_RANK_ENV) or os.environ.get("LOCAL_RANK") or "0")
    file = WorkerFile.open(path)
    if local_rank >= file.local_ranks:
        log.warning(
            "the agent has started %d workers in this pod and knows no local rank %d, so it does not see what this process does; start all "
            "ranks with hyperpodrun --nproc-per-node rather than with a launcher inside a worker",
            *(file.local_ranks, local_rank),
        )
        return None
    worker = LocalWorker(file, local_rank)
    enable_stack_signal(worker.file, local_rank)
    return worker


def generation_from_env() -> int | None:
    """Give the generation that the launcher set: ELASTIPOD_GENERATION, else JOB_RESTART_COUNT + 1, else None."""
    stated = os.environ.get("ELASTIPOD_GENERATION")
    if stated:
        return int(stated)
    restarts = os.environ.get("JOB_RESTART_COUNT")
    return int(restarts) + 1 if restarts else None


def store_generation() -> int:
    """Give a number that grows with every start that uses the same store; torchrun's store outlives its restarts."""
    return generation_from_env() or 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def run_id_from_env() -> str:
    """Give the UID of the job that this worker belongs to, the same for all its generations; empty outside a pod."""
    return os.environ.get("ELASTIPOD_RUN_ID", "")


def job_from_env() -> str:
    """Give the job's name as ``<namespace>/<name>``; empty outside a pod."""
    return os.environ.get("ELASTIPOD_JOB", "")
