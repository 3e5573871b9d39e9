"""This process as the agent sees it: the worker file of its pod, its local rank and its generation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from elastipod.stack_signal import enable_stack_signal
from elastipod.worker_file import WORKER_FILE_ENV, WorkerFile

LOCAL_RANK_ENV = "ELASTIPOD_LOCAL_RANK"  # LOCAL_RANK is 0 everywhere with --virtual-local-rank


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """One worker of a `hyperpodrun` pod: the page it shares with its agent, and the slot there that is its own."""

    file: WorkerFile
    local_rank: int


def local_worker() -> LocalWorker | None:
    """Give this process's place in its pod, or None outside a pod that `hyperpodrun` started.

    The first call also lets the agent ask for this process's stacks. Raises WorkerFileError when the environment names a
    file that cannot be used. The file stays open with the process.
    """
    path = os.environ.get(WORKER_FILE_ENV)
    return _opened(path) if path else None


@lru_cache(maxsize=1)
def _opened(path: str) -> LocalWorker:
    local_rank = int(os.environ.get(LOCAL_RANK_ENV) or os.environ.get("LOCAL_RANK") or "0")
    worker = LocalWorker(WorkerFile.open(path), local_rank)
    enable_stack_signal(worker.file, local_rank)
    return worker


def generation_from_env() -> int | None:
    """Give the generation that the launcher states: ours by name, another launcher's as restarts + 1, else None."""
    stated = os.environ.get("ELASTIPOD_GENERATION")
    if stated:
        return int(stated)
    restarts = os.environ.get("JOB_RESTART_COUNT")
    return int(restarts) + 1 if restarts else None


def store_generation() -> int:
    """Give a number that grows with every start on one store: torchrun's store outlives its restarts."""
    return generation_from_env() or 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def run_id_from_env() -> str:
    """Give the identity of the job that this worker belongs to, the same over all its generations; empty outside of a pod."""
    return os.environ.get("ELASTIPOD_RUN_ID", "")


def job_from_env() -> str:
    """Give the job's name, ``<namespace>/<name>``; empty outside of a pod."""
    return os.environ.get("ELASTIPOD_JOB", "")
