"""The training script's side of the agent's socket: in-process restart, faults, data for other ranks, checkpoints.

Everything that a rank waits for (a start, a fault, its rank) is a level with a number that the agent keeps: a client says
which one it has seen and gets the newest beyond that. So a lost connection or a repeated call never loses one.
Objects may be used by several threads at once. Standard library only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from elastipod.ipc.connections import Connections, HyperPodIPCException
from elastipod.ipc.protocol import MAX_WAIT_S, CheckpointType, RestartMode

_OUR_VARIABLES = ("ELASTIPOD_GENERATION", "ELASTIPOD_PROGRESS")

Message = tuple[str, dict[str, Any]]


class HyperPodPLRException(RuntimeError):
    """For scripts to raise when only new processes help; the agent treats it as any other end of a worker."""


class InProcessRestartSocketMessageType(str, Enum):
    """The names of what is exchanged; those that calls return are plain strings of these values."""

    AT_RCB_BARRIER = "at_rcb_barrier"
    PAST_RCB_BARRIER = "past_rcb_barrier"
    JOB_START = "job_start"
    JOB_FAULT = "job_fault"
    JOB_DATA = "job_data"
    JOB_RANK_INFO = "job_rank_info"
    JOB_FAILED_RANKS = "job_failed_ranks"
    RANK_LABELS = "rank_labels"


class InProcessRestartSocketClient:
    """A rank that lives over several runs. Every call raises HyperPodIPCException when the agent cannot be reached.

    Making one connects; raises ValueError outside a pod that hyperpodrun started.
    """

    def __init__(self) -> None:
        self._connections = Connections.from_env()
        self._run = 0  # the number of the last run that this rank was released into
        self._fault = 0  # of the last run whose fault was told
        self._rank_info = 0
        self._created_in_run = 0  # the run in which this client was made
        self.connect()

    def connect(self) -> None:
        """Learn where this rank is; a client made in the middle of a run belongs to that run."""
        answer = self._connections.call("hello")
        self._run = max(self._run, int(answer["run"]))
        self._created_in_run = int(answer["now"])

    def hyperpod_barrier(self, timeout: float | None = None) -> Message:
        """Report that this rank is at the barrier and wait for the next start, ``timeout`` seconds or for ever.

        Gives ("job_start", {"worker_envs": {name: value}, "aggregate_worker_data": {...}}). What it says about the rank
        is for the caller to put into os.environ; ELASTIPOD_* variables are there already. Raises HyperPodIPCException
        when the time is up. After one rank of a job failed, every living rank comes back here.
        """
        _reset_elastic_event()
        answer = self._wait("barrier", timeout, after=lambda: self._run)
        self._run = int(answer["run"])
        start: dict[str, Any] = answer["start"]
        _export_own_variables(start["worker_envs"])
        self._connections.call("began", run=self._run)
        return InProcessRestartSocketMessageType.JOB_START.value, start

    def hyperpod_past_rcb_barrier(self) -> None:
        """Report that this rank has entered the code that a restart runs again."""
        self._connections.call("past_barrier", run=self._run)

    def hyperpod_wait_fault(self, timeout: float | None = None) -> Message:
        """Wait until this rank's run is to be left; gives ("job_fault", {"restart_count": of that run}), once per run.

        Raises HyperPodIPCException when the time (seconds, None = no limit) is up.
        """
        answer = self._wait("fault", timeout, after=lambda: max(self._fault, self._run - 1))
        self._fault = int(answer["run"])
        return InProcessRestartSocketMessageType.JOB_FAULT.value, {"restart_count": answer["restart_count"]}

    def hyperpod_wait_rank_info(self, timeout: float | None = None) -> Message:
        """Wait for news about this rank, before it comes to the barrier; gives ("job_rank_info", as of a start).

        The latest that is still unseen comes at once. Raises HyperPodIPCException when the time is up.
        """
        answer = self._wait("rank_info", timeout, after=lambda: self._rank_info)
        self._rank_info = int(answer["number"])
        info: dict[str, Any] = answer["info"]
        return InProcessRestartSocketMessageType.JOB_RANK_INFO.value, info

    def hyperpod_send_data(self, rank: int, data: str) -> None:
        """Leave this rank's data for the others: it comes to all of them with the next start."""
        self._connections.call("data", run=self._current_run, global_rank=int(rank), data=data)

    def hyperpod_send_fault(
        self,
        rank: int,
        restart_mode: RestartMode = RestartMode.IN_PROCESS_RESTART,
        reason: str | None = None,
        message: str | None = None,
    ) -> None:
        """Report that this rank cannot go on, and what would help. One that belongs to an earlier run does nothing."""
        mode = RestartMode(restart_mode).value
        self._connections.call(
            "send_fault",
            run=self._current_run,
            global_rank=int(rank),
            restart_mode=mode,
            reason=reason,
            message=message,
        )

    def hyperpod_notify_labels(self, labels: Mapping[str, str]) -> None:
        """Tell the operator what this rank does in the model's parallelism."""
        self._connections.call("labels", labels=dict(labels))

    def close(self) -> None:
        """Let the connections go; a later call makes new ones."""
        self._connections.close()

    @property
    def _current_run(self) -> int:
        """The run to which what this rank says belongs; a script that never goes to the barrier has but one."""
        return max(self._run, self._created_in_run)

    def _wait(self, call: str, timeout: float | None, *, after: Callable[[], int]) -> dict[str, Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = MAX_WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
            answer = self._connections.call(call, wait_s=min(left, MAX_WAIT_S), after=after())
            if not answer.get("is_late"):
                return answer
            if deadline is not None and time.monotonic() >= deadline:
                raise HyperPodIPCException(f"nothing came from the agent within {timeout:g} seconds ({call})")


class CheckpointDiscoverySocketClient:
    """Tells the agent which checkpoints exist, and learns which one the whole job resumes from.

    prefix: names the series. num_model_checkpoints, num_data_checkpoints: how many ranks of this pod write each part; a
    step is complete here when that many have reported it, and never while both are 0.
    """

    def __init__(self, prefix: str, num_model_checkpoints: int = 0, num_data_checkpoints: int = 0) -> None:
        self.prefix = prefix
        self.num_model_checkpoints = num_model_checkpoints
        self.num_data_checkpoints = num_data_checkpoints
        self._connections = Connections.from_env()
        self.connect()

    def connect(self) -> None:
        """Announce the series."""
        self._connections.call("series", prefix=self.prefix, expected=self._expected())

    def update(self, step: int, path: str | None, checkpoint_type: CheckpointType) -> None:
        """Report that this rank has written its part of the checkpoint of a step, to be found at ``path``."""
        kind = CheckpointType(checkpoint_type).value
        self._connections.call(
            "checkpoint", prefix=self.prefix, expected=self._expected(), step=int(step), path=path, type=kind
        )

    def get_latest_checkpoint_path(self) -> str | None:
        """Give the path of the newest complete checkpoint: of this pod's ranks, or what the last start named."""
        path = self._connections.call("latest", prefix=self.prefix)["path"]
        return None if path is None else str(path)

    def close(self) -> None:
        """Let the connection go; a later call makes a new one."""
        self._connections.close()

    def _expected(self) -> dict[str, int]:
        return {
            CheckpointType.MODEL_CHECKPOINT.value: int(self.num_model_checkpoints),
            CheckpointType.DATA_CHECKPOINT.value: int(self.num_data_checkpoints),
        }


class TrainingManager:
    """Both clients in one place, as existing scripts expect them."""

    def __init__(self) -> None:
        self.InProcessRestart = InProcessRestartSocketClient()

    @staticmethod
    def get_checkpoint_discovery_client(
        prefix: str, num_model_checkpoints: int = 0, num_data_checkpoints: int = 0
    ) -> CheckpointDiscoverySocketClient:
        """Give a client for one series of checkpoints."""
        return CheckpointDiscoverySocketClient(prefix, num_model_checkpoints, num_data_checkpoints)


def _reset_elastic_event() -> None:
    """Forget the elastic event of the run that ended, if the script has ever asked for it."""
    elastic = sys.modules.get("elastipod.elastic_event")
    if elastic is not None:
        elastic.reset_elastic_event()


def _export_own_variables(worker_envs: Mapping[str, str]) -> None:
    """Take over our own variables of a new run; the others are for the script to adopt."""
    for name in _OUR_VARIABLES:
        if name in worker_envs:
            os.environ[name] = worker_envs[name]
        else:
            os.environ.pop(name, None)
