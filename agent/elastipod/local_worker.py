"""This process as the agent sees it: the worker file of its pod, its local rank and its generation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from elastipod.worker_file import ENV_NAME, WorkerFile


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """One worker of a `hyperpodrun` pod: the page it shares with its agent, and the slot there that is its own."""

    file: WorkerFile
    local_rank: int


def local_worker() -> LocalWorker | None:
    """Give this process's place in its pod, or None outside a pod that `hyperpodrun` started.

    Raises WorkerFileError when the environment names a file that cannot be used. The file stays open with the process.
    """
    path = os.environ.get(ENV_NAME)
    return _opened(path, int(os.environ.get("LOCAL_RANK", "0"))) if path else None


@lru_cache(maxsize=1)
def _opened(path: str, local_rank: int) -> LocalWorker:
    return LocalWorker(WorkerFile.open(path), local_rank)


def generation_from_env() -> int | None:
    """Give the generation that the launcher states: ours by name, another launcher's as restarts + 1, else None."""
    stated = os.environ.get("ELASTIPOD_GENERATION")
    if stated:
        return int(stated)
    restarts = os.environ.get("JOB_RESTART_COUNT")
    return int(restarts) + 1 if restarts else None


def run_from_env() -> str:
    """Give the identity of the job that this worker belongs to, the same over all its generations; empty outside of a pod."""
    return os.environ.get("ELASTIPOD_RUN_ID", "")
