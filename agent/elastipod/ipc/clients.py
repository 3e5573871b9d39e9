"""Clients of the agent's socket for training scripts: in-process restart, faults, data for other ranks, checkpoints.

Everything that a rank waits for (a start, a fault, its rank) has a number at the agent. A client sends the number it has seen
and gets the newest state after it, so a lost connection or a repeated call loses nothing. Clients may be used by several threads
at once. Standard library only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from elastipod.ipc.connections import AnswerIsLate, Connections, HyperPodIPCException
from elastipod.ipc.protocol import EARLY_START_ENV, MAX_WAIT_S, STORE_ENV, CheckpointType, RestartMode
from elastipod.process_restarts import need_not_tell

_OUR_VARIABLES = ("ELASTIPOD_GENERATION", "ELASTIPOD_PROGRESS", STORE_ENV, EARLY_START_ENV)

_UNKNOWN_CALL = "there is no call"  # how an agent refuses what it does not know

Message = tuple[str, dict[str, Any]]


class HyperPodPLRException(RuntimeError):
    """Scripts raise it when only new processes help. The agent treats it like any other failure of a worker."""


class InProcessRestartSocketMessageType(str, Enum):
    """Message types. Calls return their values as plain strings."""

    AT_RCB_BARRIER = "at_rcb_barrier"
    PAST_RCB_BARRIER = "past_rcb_barrier"
    JOB_START = "job_start"
    JOB_FAULT = "job_fault"
    JOB_DATA = "job_data"
    JOB_RANK_INFO = "job_rank_info"
    JOB_FAILED_RANKS = "job_failed_ranks"
    RANK_LABELS = "rank_labels"


class InProcessRestartSocketClient:
    """The in-process restart protocol for one rank, whose process lives through several runs.

    The constructor connects; it raises ValueError outside a pod that hyperpodrun started. Every call raises HyperPodIPCException
    when the agent cannot be reached or refuses the call.
    """

    def __init__(self) -> None:
        self._connections = Connections.from_env()
        self._run = 0  # the last run that this rank was released into
        self._fault = 0  # the last run whose fault was reported to the caller
        self._rank_info = 0
        self._created_in_run = 0  # the run in which this client was created
        need_not_tell()
        self.connect()

    def connect(self) -> None:
        """Get the current run from the agent. A client that is created during a run belongs to that run."""
        answer = self._connections.call("hello")
        self._run = max(self._run, int(answer["run"]))
        self._created_in_run = int(answer["now"])

    def hyperpod_barrier(self, timeout: float | None = None) -> Message:
        """Report that this rank is at the barrier, and wait for the next start.

        timeout: seconds, None for no limit. Gives ("job_start", {"worker_envs": {name: value}, "aggregate_worker_data": {...}}).
        The caller must put ``worker_envs`` into os.environ; the ELASTIPOD_* variables are set already. Raises
        HyperPodIPCException after the timeout. After a failure every surviving rank must come back to this barrier.
        """
        return self._await_start(timeout, "began")

    def enter_next_run(self, timeout: float | None = None, *, has_left: bool = False) -> Message:
        """As `hyperpod_barrier`, and report `hyperpod_past_rcb_barrier` too, in the same call to the agent.

        has_left: this rank has left its last run together with all others, as planned. Only then may its agent begin a run by itself.
        """
        return self._await_start(timeout, "past_barrier", has_left=has_left)

    def _await_start(self, timeout: float | None, then: str, **said: Any) -> Message:
        """Wait at the barrier, and report with the call `then` that this rank has its start. said: what it tells at the barrier."""
        _reset_elastic_event()
        answer = self._wait("barrier", timeout, after=lambda: self._run, **said)
        self._run = int(answer["run"])
        start: dict[str, Any] = answer["start"]
        _export_own_variables(start["worker_envs"])
        self._connections.call(then, run=self._run)
        return InProcessRestartSocketMessageType.JOB_START.value, start

    def hyperpod_past_rcb_barrier(self) -> None:
        """Report that this rank has entered the code that an in-process restart runs again."""
        self._connections.call("past_barrier", run=self._run)

    def hyperpod_wait_fault(self, timeout: float | None = None) -> Message:
        """Wait until this rank must leave its run; gives ("job_fault", {"restart_count": of that run}), once per run.

        timeout: seconds, None for no limit. Raises HyperPodIPCException after the timeout.
        """
        answer = self._wait("fault", timeout, after=lambda: max(self._fault, self._run - 1))
        self._fault = int(answer["run"])
        return InProcessRestartSocketMessageType.JOB_FAULT.value, {"restart_count": answer["restart_count"]}

    @property
    def run(self) -> int:
        """The run that this rank was last released into."""
        return self._run

    def wait_end(self, run: int, timeout: float) -> None:
        """Wait until a run is over for this rank, in any number of threads and as often as they ask.

        timeout: seconds. Raises HyperPodIPCException after it.
        """
        self._wait("fault", timeout, after=lambda: run - 1)

    def hyperpod_wait_rank_info(self, timeout: float | None = None) -> Message:
        """Wait for a change of this rank's place in the job before the barrier; gives ("job_rank_info", content as in a start).

        Returns at once if there is a change that was not returned yet. Raises HyperPodIPCException after the timeout (seconds).
        """
        answer = self._wait("rank_info", timeout, after=lambda: self._rank_info)
        self._rank_info = int(answer["number"])
        info: dict[str, Any] = answer["info"]
        return InProcessRestartSocketMessageType.JOB_RANK_INFO.value, info

    def hyperpod_send_data(self, rank: int, data: str) -> None:
        """Publish this rank's data. All ranks get it with the next start, in ``aggregate_worker_data``."""
        self._connections.call("data", run=self._current_run, global_rank=int(rank), data=data)

    def hyperpod_send_fault(
        self,
        rank: int,
        restart_mode: RestartMode = RestartMode.IN_PROCESS_RESTART,
        reason: str | None = None,
        message: str | None = None,
    ) -> None:
        """Report that this rank cannot continue, and which restart would help. Ignored if it belongs to an earlier run."""
        self.send_fault_of(self._current_run, rank, RestartMode(restart_mode), reason, message)

    def send_fault_of(
        self, run: int, rank: int, restart_mode: RestartMode, reason: str | None, message: str | None
    ) -> None:
        """Report the same of a certain run, as `run` gives it. Ignored if it is not the present one."""
        self._connections.call(
            "send_fault",
            run=run,
            global_rank=int(rank),
            restart_mode=restart_mode.value,
            reason=reason,
            message=message,
        )

    def hyperpod_notify_labels(self, labels: Mapping[str, str]) -> None:
        """Publish labels of this rank for the operator, such as its role in the model's parallelism."""
        self._connections.call("labels", labels=dict(labels))

    def keep(self, kind: str) -> bool:
        """Announce that this rank's process can live on when its run ends; False from an agent that cannot keep it.

        kind: "replicated" when every rank holds the whole state, "sharded" when it holds a part. Call it before a process group is
        built: it sets the variables with which torch leaves this process alone when a peer dies. Raises HyperPodIPCException when
        the agent cannot be reached.
        """
        try:
            answer = self._connections.call("keep", kind=kind)
        except HyperPodIPCException as error:
            if _UNKNOWN_CALL in str(error):
                return False
            raise
        os.environ.update({str(name): str(value) for name, value in answer.get("env", {}).items()})
        return True

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._connections.close()

    @property
    def _current_run(self) -> int:
        """The run that this rank's reports belong to. A script that never calls the barrier has only one."""
        return max(self._run, self._created_in_run)

    def _wait(self, call: str, timeout: float | None, *, after: Callable[[], int], **said: Any) -> dict[str, Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = MAX_WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
            answer = self._connections.call(call, wait_s=min(left, MAX_WAIT_S), after=after(), **said)
            if not answer.get("is_late"):
                return answer
            if deadline is not None and time.monotonic() >= deadline:
                raise AnswerIsLate(f"no answer from the agent within {timeout:g} seconds ({call})")


class CheckpointDiscoverySocketClient:
    """Reports checkpoints to the agent, and gets the checkpoint that the whole job resumes from.

    prefix: name of the series. num_model_checkpoints, num_data_checkpoints: how many ranks of this pod write each part. A step is
    complete in this pod when that many ranks have reported it, and never while both numbers are 0.
    """

    def __init__(self, prefix: str, num_model_checkpoints: int = 0, num_data_checkpoints: int = 0) -> None:
        self.prefix = prefix
        self.num_model_checkpoints = num_model_checkpoints
        self.num_data_checkpoints = num_data_checkpoints
        self._connections = Connections.from_env()
        self.connect()

    def connect(self) -> None:
        """Announce the series to the agent."""
        self._connections.call("series", prefix=self.prefix, expected=self._expected())

    def update(self, step: int, path: str | None, checkpoint_type: CheckpointType) -> None:
        """Report that this rank has written its part of a checkpoint, at ``path``."""
        kind = CheckpointType(checkpoint_type).value
        self._connections.call(
            "checkpoint", prefix=self.prefix, expected=self._expected(), step=int(step), path=path, type=kind
        )

    def get_latest_checkpoint_path(self) -> str | None:
        """Give the path of the newest checkpoint that is complete in this pod, else the one from the last start, else None."""
        path = self._connections.call("latest", prefix=self.prefix)["path"]
        return None if path is None else str(path)

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        self._connections.close()

    def _expected(self) -> dict[str, int]:
        return {
            CheckpointType.MODEL_CHECKPOINT.value: int(self.num_model_checkpoints),
            CheckpointType.DATA_CHECKPOINT.value: int(self.num_data_checkpoints),
        }


class TrainingManager:
    """Access to both clients, as existing HyperPod scripts expect it."""

    def __init__(self) -> None:
        self.InProcessRestart = InProcessRestartSocketClient()

    @staticmethod
    def get_checkpoint_discovery_client(
        prefix: str, num_model_checkpoints: int = 0, num_data_checkpoints: int = 0
    ) -> CheckpointDiscoverySocketClient:
        """Give a client for one series of checkpoints. Raises ValueError outside a pod."""
        return CheckpointDiscoverySocketClient(prefix, num_model_checkpoints, num_data_checkpoints)


def _reset_elastic_event() -> None:
    """Forget the elastic event of the run that ended, if the script ever called `elastic_event_detected`.

    A run that has not ended by the event has ended by a fault: other ranks may be gone, so nobody waits for them.
    """
    elastic = sys.modules.get("elastipod.elastic_event")
    if elastic is not None:
        elastic.reset_elastic_event(is_abandoned=not elastic.is_leaving())


def _export_own_variables(worker_envs: Mapping[str, str]) -> None:
    """Set the ELASTIPOD_* variables of a new run in os.environ; the script sets the others."""
    for name in _OUR_VARIABLES:
        if name in worker_envs:
            os.environ[name] = worker_envs[name]
        else:
            os.environ.pop(name, None)
