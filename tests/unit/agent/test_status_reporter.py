"""What happens to a generation, as /status, the agent's log and the pod's termination message show it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastipod.ipc.protocol import RestartMode
from elastipod_agent.core.exits import Outcome
from elastipod_agent.core.requests import StartRequest, UpdateRequest
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.generation.faults import Fault, GenerationEnd
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.log import EventLog
from elastipod_agent.status import Status, StatusStore
from elastipod_agent.status_reporter import UNANSWERED, StatusReporter
from elastipod_agent.workers.failure import Failure

PROCESSES, IN_PROCESS = RestartMode.PROCESS_LEVEL_RESTART, RestartMode.IN_PROCESS_RESTART
START = StartRequest(
    rank=1, nnodes=3, fault_count=2, master_addr="10.0.0.1", master_port=29500, generation=7, ip_version="ipv6"
)
FAILURE = Failure(
    global_rank=5, local_rank=1, exitcode=3, signal="SIGSEGV", message="rank 5 was killed\nwith\ndetails", time="now"
)


class Reported:
    """A reporter, and what it has reported so far."""

    def __init__(self, termination_log: Path, mode: RestartMode = PROCESSES) -> None:
        self.termination_log = termination_log
        self.lines: list[str] = []
        self.store = StatusStore(lambda: "now")
        self.worker_fields: dict[str, Any] = {"rank_labels": {"0": "first"}}
        self.one = StatusReporter(self.store, EventLog(self.lines.append, "team/a"), mode, lambda: self.worker_fields)

    @property
    def status(self) -> Status:
        return self.store.current

    @property
    def message(self) -> str:
        """The termination message."""
        return self.termination_log.read_text()

    def last_line(self) -> str:
        """The last log line without its time."""
        _, _, rest = self.lines[-1].partition(": ")
        return rest.partition(" ")[2]

    def run_until(self, state: S) -> None:
        """Begin a generation and bring it into this state."""
        self.one.ready()
        self.one.started(START, 2)
        if state is S.STOPPING:
            self.one.stopping(PROCESSES, is_graceful=True, timeout_s=60)


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reported:
    """A reporter of an agent that has just begun."""
    path = tmp_path / "termination-log"
    path.write_text("of an earlier container")
    monkeypatch.setenv("ELASTIPOD_TERMINATION_LOG", str(path))
    return Reported(path)


def pool(**fields: Any) -> WorkerPool:
    """Give a pool that says this about its workers."""
    known = {"is_gathered": True, "kept_all_processes": True, "num_kept": 2, "fault": None}
    return cast("WorkerPool", SimpleNamespace(**{**known, **fields}))


def test_an_agent_without_a_pool_is_ready_at_once(reported: Reported) -> None:
    assert (reported.status.state, reported.status.restart_mode) == (S.INIT, PROCESSES.value)
    reported.one.ready()
    assert reported.status.state is S.READY


def test_an_agent_with_a_pool_is_ready_once_its_workers_are_gathered(reported: Reported) -> None:
    reported.one.pool = pool(is_gathered=False)
    reported.one.ready()
    reported.one.workers_gathered()
    assert reported.status.state is S.INIT
    reported.one.pool = pool(kept_all_processes=False)
    reported.one.workers_gathered()
    assert (reported.status.state, reported.status.has_priority) == (S.READY, False)
    assert reported.status.rank_labels == {"0": "first"}
    assert reported.last_line() == "INFO ready job=team/a"
    version = reported.status.version
    reported.one.workers_gathered()
    assert reported.status.version == version, "it is ready already"


def test_a_change_of_a_pool_before_there_is_one_is_nothing(reported: Reported) -> None:
    reported.one.workers_gathered()
    assert reported.status.state is S.INIT


def test_workers_that_cannot_be_started_are_told_with_ready(reported: Reported) -> None:
    reported.one.pool = pool(fault=Fault("WorkerFault", FAILURE))
    reported.one.workers_gathered()
    status = reported.status
    assert (status.state, status.reason, status.message) == (S.READY, "WorkerFault", FAILURE.message)
    assert (status.failure, status.has_priority) == (FAILURE, True)
    assert reported.message == FAILURE.message


def test_a_start_leaves_nothing_of_the_generation_before(reported: Reported) -> None:
    reported.one.ready()
    reported.store.set(
        reason="Drained", message="old", drained=True, has_priority=True, failure=FAILURE, restart_mode="other"
    )
    reported.one.started(START, 2)
    status = reported.status
    assert (status.state, status.generation, status.assigned_rank, status.ip_version) == (S.RUNNING, 7, 1, "ipv6")
    assert (status.reason, status.message, status.failure, status.is_spare) == (None, None, None, False)
    assert (status.drained, status.has_priority) == (False, False)
    assert (status.restart_mode, status.rank_labels) == (PROCESSES.value, {"0": "first"})
    assert reported.message == ""
    assert reported.last_line() == (
        "INFO starting workers job=team/a generation=7 nnodes=3 nproc=2 world_size=6 master=10.0.0.1:29500 restarts=2"
    )


def test_facts_of_the_job_are_shown_as_they_come(reported: Reported) -> None:
    facts = UpdateRequest(
        rank=4, nnodes=9, fault_count=0, master_addr="m", master_port=1, ip_version="ipv4", is_spare=True
    )
    reported.one.job_facts(facts, generation=5)
    status = reported.status
    assert (status.assigned_rank, status.is_spare, status.ip_version, status.generation) == (4, True, "ipv4", 5)


@pytest.mark.parametrize(("asked", "shown"), [(None, PROCESSES), (IN_PROCESS, IN_PROCESS)])
def test_a_fault_of_running_workers(reported: Reported, asked: RestartMode | None, shown: RestartMode) -> None:
    reported.run_until(S.RUNNING)
    reported.worker_fields = {"rank_labels": {"0": "later"}}
    reported.one.fault(Fault("WorkerCrash", FAILURE, asked))
    status = reported.status
    assert (status.state, status.reason, status.message) == (S.FAULTED, "WorkerCrash", FAILURE.message)
    assert (status.failure, status.restart_mode, status.rank_labels) == (FAILURE, shown.value, {"0": "later"})
    assert reported.message == FAILURE.message
    assert reported.last_line() == (
        "ERROR fault job=team/a generation=7 reason=WorkerCrash global_rank=5 exitcode=3 signal=SIGSEGV "
        'message="rank 5 was killed"'
    )


def test_a_fault_during_a_stop_does_not_end_the_stop(reported: Reported) -> None:
    reported.run_until(S.STOPPING)
    reported.one.fault(Fault("WorkerCrash", FAILURE, IN_PROCESS))
    status = reported.status
    assert (status.state, status.reason, status.message) == (S.STOPPING, "WorkerCrash", FAILURE.message)
    assert (status.failure, status.restart_mode) == (FAILURE, PROCESSES.value)
    reported.one.ended(GenerationEnd(outcome=Outcome.STOPPED))
    assert (reported.status.state, reported.status.reason, reported.status.drained) == (S.READY, "WorkerCrash", False)
    assert reported.last_line() == "INFO stopped job=team/a generation=7 reason=WorkerCrash"


def test_a_fault_after_the_agent_began_to_leave_is_logged_only(reported: Reported) -> None:
    reported.run_until(S.RUNNING)
    reported.store.enter(S.SHUTDOWN)
    reported.one.fault(Fault("WorkerCrash", FAILURE))
    assert (reported.status.state, reported.status.reason) == (S.SHUTDOWN, None)
    assert "fault" in reported.lines[-1]


@pytest.mark.parametrize(
    ("is_graceful", "line"),
    [
        (True, "INFO draining workers job=team/a generation=7 timeout_s=60.0"),
        (False, "INFO stopping workers job=team/a generation=7"),
    ],
)
def test_a_stop_begins(reported: Reported, is_graceful: bool, line: str) -> None:
    reported.run_until(S.RUNNING)
    reported.store.set(reason="old", message="old")
    reported.one.stopping(IN_PROCESS, is_graceful=is_graceful, timeout_s=60.0)
    status = reported.status
    assert (status.state, status.restart_mode, status.reason, status.message) == (
        S.STOPPING, IN_PROCESS.value, None, None,
    )  # fmt: skip
    assert reported.last_line() == line


def test_a_hard_stop_that_replaces_a_drain_keeps_what_is_known(reported: Reported) -> None:
    reported.run_until(S.STOPPING)
    reported.one.saving()
    reported.one.stopping(IN_PROCESS, is_graceful=False, timeout_s=60)
    assert (reported.status.state, reported.status.saving, reported.status.restart_mode) == (
        S.STOPPING, True, PROCESSES.value,
    )  # fmt: skip


def test_what_a_drain_says_on_its_way(reported: Reported) -> None:
    reported.run_until(S.RUNNING)
    reported.one.saving()
    reported.one.unanswered()
    assert (reported.status.saving, reported.status.unanswered) == (False, False), "there is no drain"
    reported.one.stopping(PROCESSES, is_graceful=True, timeout_s=60)
    reported.one.drain_shortened(2.5)
    assert reported.last_line() == "INFO the drain has less time job=team/a generation=7 timeout_s=2.5"
    reported.one.saving()
    assert (reported.status.saving, reported.status.unanswered) == (True, False)
    reported.one.unanswered()
    assert reported.status.unanswered is True
    assert reported.last_line() == f"INFO {UNANSWERED} job=team/a generation=7"


def test_a_stop_that_found_nobody(reported: Reported) -> None:
    reported.run_until(S.STOPPING)
    reported.store.set(drained=True)
    reported.one.stopped()
    assert (reported.status.state, reported.status.drained) == (S.READY, False)


@pytest.mark.parametrize("state", [S.RUNNING, S.STOPPING])
def test_a_drain_is_done(reported: Reported, state: S) -> None:
    """Workers also leave by themselves when another pod's rank was asked."""
    reported.run_until(state)
    reported.store.set(reason="WorkerCrash", message="a rank failed on its way out")
    reported.one.ended(GenerationEnd(outcome=Outcome.DRAINED))
    status = reported.status
    assert (status.state, status.reason, status.message, status.drained) == (S.READY, "Drained", None, True)
    assert set(status.transitions) == {"INIT", "READY", "RUNNING", "STOPPING"}
    assert reported.last_line() == "INFO drained job=team/a generation=7"


def test_a_late_drain_says_so(reported: Reported) -> None:
    reported.run_until(S.STOPPING)
    reported.one.unanswered()
    reported.one.ended(GenerationEnd(outcome=Outcome.STOPPED, is_late=True, note="too late"))
    status = reported.status
    assert (status.state, status.reason, status.message) == (S.READY, "DrainTimedOut", "too late")
    assert status.drained is False


def test_a_drain_that_nobody_could_answer_says_so(reported: Reported) -> None:
    reported.run_until(S.STOPPING)
    reported.one.unanswered()
    reported.one.ended(GenerationEnd(outcome=Outcome.STOPPED))
    status = reported.status
    assert (status.state, status.reason) == (S.READY, "EventUnanswered")
    assert status.message == f"{UNANSWERED}; they were ended without a checkpoint"


def test_a_plain_stop_has_no_reason(reported: Reported) -> None:
    reported.run_until(S.STOPPING)
    reported.store.set(drained=True)
    reported.one.ended(GenerationEnd(outcome=Outcome.STOPPED, note="nothing to tell"))
    assert (reported.status.state, reported.status.reason, reported.status.message) == (S.READY, None, None)
    assert reported.status.drained is False
    assert reported.last_line() == "INFO stopped job=team/a generation=7"


@pytest.mark.parametrize(("note", "shown"), [("", None), ("the script failed", "the script failed")])
def test_a_completed_run(reported: Reported, note: str, shown: str | None) -> None:
    reported.run_until(S.RUNNING)
    reported.termination_log.write_text("before")
    reported.one.ended(GenerationEnd(outcome=Outcome.COMPLETED, note=note))
    assert (reported.status.state, reported.status.message) == (S.COMPLETED, shown)
    assert reported.message == note
    suffix = ' note="the script failed"' if note else ""
    assert reported.last_line() == f"INFO completed job=team/a generation=7{suffix}"


def test_a_fault_without_a_stop_stays(reported: Reported) -> None:
    reported.run_until(S.RUNNING)
    reported.one.fault(Fault("WorkerCrash", FAILURE))
    reported.one.ended(GenerationEnd(outcome=Outcome.CRASHED))
    assert (reported.status.state, reported.status.reason) == (S.FAULTED, "WorkerCrash")


def test_processes_that_survive_a_kill_make_the_pod_unusable(reported: Reported) -> None:
    reported.run_until(S.STOPPING)
    reported.one.ended(GenerationEnd(outcome=Outcome.STOPPED, stuck=(11, 12)))
    status = reported.status
    assert (status.state, status.reason) == (S.FAULTED, "WorkerUnhealthy")
    assert status.message == "processes 11, 12 cannot be killed; the node may need attention"
    assert reported.last_line() == 'ERROR processes cannot be killed job=team/a pids="11, 12"'


def test_a_fault_that_is_shown_already_is_not_replaced_by_stuck_processes(reported: Reported) -> None:
    reported.run_until(S.RUNNING)
    reported.one.fault(Fault("WorkerCrash", FAILURE))
    reported.one.ended(GenerationEnd(outcome=Outcome.CRASHED, stuck=(11,)))
    assert (reported.status.state, reported.status.reason) == (S.FAULTED, "WorkerCrash")


@pytest.mark.parametrize("is_faulted", [True, False], ids=["after a fault", "after a stop"])
def test_no_later_stop_makes_a_pod_usable_whose_processes_survived_a_kill(reported: Reported, is_faulted: bool) -> None:
    survivor = subprocess.Popen(["sleep", "600"])
    try:
        reported.run_until(S.RUNNING if is_faulted else S.STOPPING)
        if is_faulted:
            reported.one.fault(Fault("WorkerCrash", FAILURE))
        outcome = Outcome.CRASHED if is_faulted else Outcome.STOPPED
        reported.one.ended(GenerationEnd(outcome=outcome, stuck=(survivor.pid, 1)))
        for _ in range(2):
            reported.one.stopping(PROCESSES, is_graceful=False, timeout_s=0)
            reported.one.stopped()
            status = reported.status
            assert (status.state, status.reason) == (S.FAULTED, "WorkerUnhealthy")
            assert status.message == f"processes {survivor.pid} cannot be killed; the node may need attention"
    finally:
        survivor.kill()
        survivor.wait()
    reported.one.stopping(PROCESSES, is_graceful=False, timeout_s=0)
    reported.one.stopped()
    assert (reported.status.state, reported.status.reason, reported.status.message) == (S.READY, None, None)


@pytest.mark.parametrize("outcome", [Outcome.DRAINED, Outcome.STOPPED])
@pytest.mark.parametrize("kept", [True, False])
def test_after_a_stop_a_pool_says_whether_its_processes_live_on(
    reported: Reported, outcome: Outcome, kept: bool
) -> None:
    reported.run_until(S.STOPPING)
    reported.one.pool = pool(kept_all_processes=kept, num_kept=2 if kept else 1)
    reported.store.set(restart_mode="asked for")
    reported.worker_fields = {"rank_labels": {"0": "later"}}
    reported.one.ended(GenerationEnd(outcome=outcome))
    status = reported.status
    assert (status.state, status.has_priority, status.restart_mode) == (S.READY, kept, PROCESSES.value)
    assert status.num_kept == (2 if kept else 1)
    assert status.rank_labels == {"0": "later"}
