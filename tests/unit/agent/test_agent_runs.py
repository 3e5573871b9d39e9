"""Whole runs of the agent with small real workers, in the process of the test."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
from tests.agent_client import until
from tests.agent_scenarios import check_fences, check_plain_protocol
from tests.unit.agent.agent_in_process import AgentInProcess

from elastipod_agent.core.exits import StopMode
from elastipod_agent.generation.generation_run import GenerationRun

# Reports a step, then waits for the event in the worker file as the library does, and acknowledges it.
DRAINS = """
import os, sys, time
from elastipod.worker_file import WorkerFile
rank = int(os.environ["LOCAL_RANK"])
page = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])
page.report(rank, step=7, samples=70, loss=0.5, world_size=int(os.environ["WORLD_SIZE"]))
print("pid", os.getpid(), "gen", os.environ["ELASTIPOD_GENERATION"], "rank", os.environ["RANK"], flush=True)
while page.event().level == 0:
    time.sleep(0.01)
page.acknowledge(rank)
print("draining", flush=True)
"""
WAITS = "import time\nprint('awake', flush=True)\ntime.sleep(600)\n"
SAYS = (
    "import os, sys\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\nprint('oh', file=sys.stderr)\n"
)


def pids(agent: AgentInProcess) -> list[int]:
    """Give the pids that the workers have printed."""
    return [int(pid) for pid in re.findall(r"pid (\d+)", agent.printed())]


def test_a_run_that_completes(agent: AgentInProcess) -> None:
    def scenario() -> None:
        ready = agent.status()
        assert (ready["status"], ready["generation"], ready["failure"]) == ("ready", 0, None)
        assert agent.start(3, rank=1, nnodes=2) == (200, None)
        seen = agent.until("completed")
        assert (seen["generation"], seen["drained"], seen["failure"], seen["assigned_rank"]) == (3, False, None, "1")
        assert seen["version"] > ready["version"]
        assert agent.start(3) == (200, None), "a repetition changes nothing"
        assert agent.status()["version"] == seen["version"]
        assert agent.start(2)[0] == 409
        agent.call("POST", "/shutdown")

    assert agent.run(SAYS, scenario, "--nproc-per-node=2") == 0
    printed = agent.printed()
    for line in ("\n[default0]:rank 2 of 4\n", "\n[default1]:rank 3 of 4\n", "\n[default1]:oh\n"):
        assert line in printed
    events = [line for line in printed.splitlines() if line.startswith("hyperpodrun") or "job=tests/agent" in line]
    for word in ("ready", "starting workers", "completed", "shutting down", "gone"):
        assert any(word in event for event in events), f"{word} in {printed}"
    assert "exit_code=0" in printed
    assert agent.termination_message == ""


def test_a_failed_worker_is_a_fault_until_the_stop_and_the_next_generation_is_clean(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("gen 1", 2)
        assert agent.status()["worker"]["step"] == 7
        os.kill(pids(agent)[1], signal.SIGKILL)
        seen = agent.until("faulted")
        failure = seen["failure"]
        assert (seen["reason"], failure["signal"], failure["exitcode"]) == ("WorkerCrash", "SIGKILL", None)
        assert failure["global_rank"] in (0, 1)
        assert seen["message"].startswith("rank ")
        assert agent.termination_message == failure["message"]
        assert agent.start(2)[0] == 409, "a faulted agent is stopped first"
        assert agent.stop(1) == (200, None)
        assert agent.until("ready")["drained"] is False
        assert agent.start(2)[0] == 200
        agent.until_printed("gen 2", 2)
        after = agent.status()
        assert (after["failure"], after.get("reason"), after.get("message")) == (None, None, None)
        assert agent.termination_message == ""

    assert agent.run(DRAINS, scenario, "--nproc-per-node=2") == 0
    assert "reason=WorkerCrash" in agent.printed()


def test_an_exception_is_reported_with_its_traceback(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1, rank=1, nnodes=2)
        failure = agent.until("faulted")["failure"]
        assert (failure["exitcode"], failure["global_rank"], failure["local_rank"]) == (1, 1, 0)
        assert failure["message"].startswith("rank 1 (local rank 0) ended with exit code 1")
        assert failure["message"].endswith("KeyError: 'lr'")
        assert "Traceback" in failure["message"]

    assert agent.run("def train():\n    raise KeyError('lr')\ntrain()\n", scenario) == 1
    assert "exit_code=1" in agent.printed()


def test_a_graceful_stop_drains(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid", 2)
        assert agent.drain(1) == (200, None)
        seen = agent.until("ready")
        assert (seen["drained"], seen["reason"], seen.get("message"), seen["generation"]) == (True, "Drained", None, 1)
        assert seen["worker"]["step"] == 7, "the last report stays readable"
        assert agent.drain(1) == (200, None), "a repetition changes nothing"
        assert agent.status()["version"] == seen["version"]

    assert agent.run(DRAINS, scenario, "--nproc-per-node=2") == 0
    for word in ("draining workers", "drained", "/stop changes nothing"):
        assert word in agent.printed()


def test_workers_on_their_way_out_of_a_drain_are_reported_as_saving(agent: AgentInProcess) -> None:
    slow = DRAINS + "print('saving', flush=True)\ntime.sleep(600)\n"

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid", 2)
        assert agent.status()["saving"] is False
        agent.drain(1, timeout=600)
        until(lambda: agent.status()["saving"], "the workers to be saving")
        assert agent.status()["unanswered"] is False
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["saving"], seen["drained"], seen.get("reason")) == (False, False, None)

    agent.run(slow, scenario, "--nproc-per-node=2")


def test_the_event_carries_the_deadline_and_who_leaves(agent: AgentInProcess) -> None:
    tells = (
        DRAINS
        + "event = page.event()\nprint('time', event.deadline - time.time() > 500, 'leaves', page.leaves(), flush=True)\n"
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        agent.stop(1, is_graceful=True, timeout=600, leaves=True)
        agent.until("ready")

    agent.run(tells, scenario)
    assert "time True leaves True" in agent.printed()


def test_a_repeated_stop_tells_workers_that_their_pod_leaves_after_all(agent: AgentInProcess) -> None:
    tells = (
        DRAINS.replace("page.acknowledge", "\nwhile not page.leaves(): time.sleep(0.01)\npage.acknowledge")
        + "print('leaves', page.leaves(), page.kept(), flush=True)\n"
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        agent.drain(1, timeout=600, leaves=False, restart_mode="process_level_restart")
        agent.drain(1, timeout=600, leaves=False)
        assert agent.status()["status"] == "stopping"
        agent.drain(1, timeout=600, leaves=True)
        agent.until("ready")

    agent.run(tells, scenario)
    assert "leaves True False" in agent.printed()


def test_a_drain_without_time_ends_in_a_kill(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        asked_at = time.monotonic()
        agent.drain(1, timeout=0.3)
        seen = agent.until("ready")
        assert time.monotonic() - asked_at >= 0.3
        assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")
        assert "did not drain" in seen["message"]

    agent.run(WAITS, scenario)
    assert "reason=DrainTimedOut" in agent.printed()
    assert "SIGUSR1" not in agent.printed(), "the wake-up signal kills nobody who does not listen"


def test_a_repeated_stop_gives_a_drain_less_time_and_never_more(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=600)
        asked_at = time.monotonic()
        assert agent.drain(1, timeout=1)[0] == 200
        agent.drain(1, timeout=600)
        assert agent.until("ready")["reason"] == "DrainTimedOut"
        assert time.monotonic() - asked_at >= 1

    agent.run(WAITS, scenario)
    assert agent.printed().count("the drain has less time") == 1


def test_a_hard_stop_ends_a_drain_and_is_no_late_one(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=600)
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen.get("reason")) == (False, None)

    agent.run(WAITS, scenario)


def test_a_hard_stop_is_no_late_drain_even_if_the_time_runs_out_meanwhile(
    agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerationRun, "is_late", lambda run: run.stop_mode is StopMode.HARD)

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=600)
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen.get("reason")) == (False, None)

    agent.run(WAITS, scenario)


def test_workers_that_cannot_know_of_a_drain_are_reported(
    agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastipod_agent.generation.generation_run.ANSWER_TIME_S", 0.2)
    monkeypatch.setattr("elastipod_agent.generation.generation_run.IMPORT_TIME_S", 0.2)

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=600)
        until(lambda: agent.status()["unanswered"], "the agent to find out")
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen["reason"], seen["unanswered"]) == (False, "EventUnanswered", False)
        assert "elastic_event_detected()" in seen["message"]

    agent.run(WAITS, scenario)


def test_workers_with_a_handler_can_know_of_a_drain(agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod_agent.generation.generation_run.ANSWER_TIME_S", 0.2)
    monkeypatch.setattr("elastipod_agent.generation.generation_run.IMPORT_TIME_S", 0.2)
    handles = (
        "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n"
        + WAITS.replace("600", "1")
        + "time.sleep(1)\n" * 600
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1, timeout=1.0)
        assert agent.until("ready")["reason"] == "DrainTimedOut"

    agent.run(handles, scenario)
    assert "no worker asks" not in agent.printed()


def test_a_crash_during_a_drain_is_reported(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid", 2)
        agent.drain(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen["reason"], seen["failure"]["exitcode"]) == (False, "WorkerCrash", 3)

    assert agent.run(DRAINS + "sys.exit(3)\n", scenario, "--nproc-per-node=2") == 1


def test_a_drain_that_came_through_another_pod_is_no_completion(agent: AgentInProcess) -> None:
    acknowledges = (
        "import os\nfrom elastipod.worker_file import WorkerFile\n"
        "WorkerFile.open(os.environ['ELASTIPOD_WORKER_FILE']).acknowledge(0)\n"
    )

    def scenario() -> None:
        agent.start(1)
        until(lambda: agent.status()["drained"], "the drain")
        assert (agent.status()["status"], agent.status()["reason"]) == ("ready", "Drained")
        assert "STOPPING" in agent.status()["transitions"]

    agent.run(acknowledges, scenario)


def test_generations_fence_late_and_repeated_calls(agent: AgentInProcess) -> None:
    agent.run(DRAINS, partial(check_fences, agent))
    assert "/start refused" in agent.printed()
    assert "/stop refused" in agent.printed()


def test_a_spare_is_held_and_knows_its_facts(agent: AgentInProcess) -> None:
    def scenario() -> None:
        assert agent.start(4, rank=2, nnodes=2, spare=True) == (200, None)
        seen = agent.status()
        assert (seen["status"], seen["spare"], seen["generation"], seen["assigned_rank"]) == ("ready", "True", 4, "2")
        body = {"rank": 1, "nnodes": 2, "generation": 4, "spare": False, "faultCount": 3}
        assert agent.call("POST", "/update", body | {"master_addr": "127.0.0.1", "master_port": 1})[0] == 200
        assert (agent.status()["spare"], agent.status()["assigned_rank"]) == ("False", "1")

    agent.run(SAYS, scenario)
    assert "held as a spare" in agent.printed()


def test_facts_of_the_plain_protocol_are_kept(agent: AgentInProcess) -> None:
    agent.run(DRAINS, partial(check_plain_protocol, agent))


def test_sigterm_is_reported_at_once_and_training_goes_on_until_the_drain(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: agent.status()["terminating"], "terminating")
        assert agent.status()["status"] == "running"
        agent.drain(1)
        assert agent.until("ready")["drained"] is True

    assert agent.run(DRAINS, scenario) == 0
    assert "SIGTERM: the workers continue" in agent.printed()


@pytest.mark.parametrize(
    ("script", "state", "code"),
    [
        pytest.param(None, "ready", 143, id="before any run"),
        pytest.param(SAYS, "completed", 0, id="after completion"),
        pytest.param("raise SystemExit(9)", "faulted", 1, id="after a fault"),
    ],
)
def test_sigterm_ends_an_idle_agent_at_once(agent: AgentInProcess, script: str | None, state: str, code: int) -> None:
    def scenario() -> None:
        if script:
            agent.start(1)
        agent.until(state)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: "gone" in agent.printed(), "the end")

    assert agent.run(script or SAYS, scenario) == code
    assert "SIGTERM: " in agent.printed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_an_interrupt_ends_workers_and_agent(agent: AgentInProcess, number: signal.Signals) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        os.kill(os.getpid(), number)
        until(lambda: "gone" in agent.printed(), "the end")

    assert agent.run(DRAINS, scenario) == 128 + number
    assert f"{number.name}: leaving now" in agent.printed()


def test_a_second_sigterm_ends_what_runs(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: agent.status()["terminating"], "terminating")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: "gone" in agent.printed(), "the end")

    assert agent.run(DRAINS, scenario) == 143


def test_shutdown_ends_the_workers(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid", 2)
        assert agent.call("POST", "/shutdown") == (200, None)

    assert agent.run(DRAINS, scenario, "--nproc-per-node=2") == 0
    assert len(pids(agent)) == 2
    assert not [pid for pid in pids(agent) if Path(f"/proc/{pid}").exists()]


def test_a_gentle_stop_sends_the_chosen_signal_first(agent: AgentInProcess) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n" + WAITS
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        agent.stop(1)
        seen = agent.until("ready")
        assert (seen["drained"], seen["failure"]) == (False, None)

    agent.run(script, scenario, "--shutdown-signal=SIGTERM")
    assert "bye" in agent.printed()


def test_who_ignores_the_chosen_signal_is_killed_after_the_patience(agent: AgentInProcess) -> None:
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("awake")
        asked_at = time.monotonic()
        agent.stop(1)
        agent.until("ready")
        assert time.monotonic() - asked_at >= 1

    agent.run(script, scenario, "--shutdown-signal=SIGTERM", "--shutdown-timeout=1")


def test_pre_and_post_scripts_see_the_size_of_every_start(agent: AgentInProcess) -> None:
    pre, post = agent.folder / "pre.sh", agent.folder / "post.sh"
    pre.write_text('echo "before $1 with $NNODES"\n')
    post.write_text('echo "after $1 with $NNODES"\nexit 5\n')

    def scenario() -> None:
        agent.start(1, nnodes=3)
        seen = agent.until("completed")
        assert seen["message"].startswith("training completed, but")
        assert "exit code 5" in seen["message"]
        assert seen["message"].endswith("after it with 3")

    agent.run(
        SAYS, scenario, f"--pre-train-script={pre}", "--pre-train-args='the run'", f"--post-train-script={post}",
        "--post-train-args=it",
    )  # fmt: skip
    printed = agent.printed()
    marks = "[pre-train]:before the run with 3", "rank 0 of 3", "[post-train]:after it with 3"
    assert sorted(marks, key=printed.index) == list(marks)
    assert agent.termination_message.startswith("training completed, but")


def test_a_failing_pre_script_is_a_fault_with_its_words(agent: AgentInProcess) -> None:
    (agent.folder / "pre.sh").write_text("echo no data at /data >&2\nexit 4\n")

    def scenario() -> None:
        agent.start(1)
        seen = agent.until("faulted")
        assert (seen["reason"], seen["failure"]["global_rank"]) == ("PreScriptFailed", None)
        assert "exit code 4; the end of its output:\nno data at /data" in seen["message"]

    agent.run(SAYS, scenario, "--pre-train-script", str(agent.folder / "pre.sh"))
    assert "rank 0" not in agent.printed()


def test_a_pre_script_that_cannot_be_run_is_a_fault(agent: AgentInProcess) -> None:
    script = agent.folder / "pre"
    script.write_text("#!/nowhere\n")
    script.chmod(0o755)

    def scenario() -> None:
        agent.start(1)
        seen = agent.until("faulted")
        assert seen["reason"] == "PreScriptFailed"

    agent.run(SAYS, scenario, "--pre-train-script", str(script))


def test_a_stop_during_a_long_pre_script_ends_it(agent: AgentInProcess) -> None:
    (agent.folder / "pre.sh").write_text("echo waiting as $$\nexec sleep 600\n")

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("waiting as")
        agent.stop(1)
        assert agent.until("ready")["failure"] is None

    agent.run(SAYS, scenario, "--pre-train-script", str(agent.folder / "pre.sh"))
    (pid,) = re.findall(r"waiting as (\d+)", agent.printed())
    assert not Path(f"/proc/{pid}").exists()
    assert "rank 0" not in agent.printed()


def test_a_missing_training_script_is_a_fault(agent: AgentInProcess) -> None:
    def scenario() -> None:
        (agent.folder / "train.py").unlink()
        agent.start(1)
        seen = agent.until("faulted")
        text = f"training script {agent.folder / 'train.py'} does not exist"
        assert (seen["reason"], seen["message"]) == ("StartFailed", text)

    agent.run(SAYS, scenario)


@pytest.mark.parametrize(("rank", "state"), [(0, "faulted"), (1, "completed")])
def test_a_taken_master_port_is_a_fault_of_rank_0_alone(agent: AgentInProcess, rank: int, state: str) -> None:
    def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            agent.start(1, rank=rank, nnodes=2, master_port=port)
            seen = agent.until(state)
        if rank == 0:
            told = f"EADDRINUSE: master port {port} is in use on this host"
            assert (seen["reason"], seen["message"], seen["failure"]["global_rank"]) == ("WorkerFault", told, None)

    agent.run(SAYS, scenario)


@pytest.mark.parametrize(("rank", "reason"), [(0, "WorkerFault"), (1, "WorkerCrash")])
def test_a_master_port_taken_in_a_race_is_charged_to_nobody_at_rank_0_alone(
    agent: AgentInProcess, rank: int, reason: str
) -> None:
    script = "import os\nraise OSError('EADDRINUSE, port ' + os.environ['MASTER_PORT'])\n"

    def scenario() -> None:
        agent.start(1, rank=rank, nnodes=2)
        seen = agent.until("faulted")
        assert (seen["reason"], seen["failure"]["global_rank"]) == (reason, rank)
        assert seen["message"].startswith("EADDRINUSE: master port") is (rank == 0)

    agent.run(script, scenario)


def test_log_files_have_a_folder_for_each_attempt_and_rank(agent: AgentInProcess) -> None:
    logs = agent.folder / "logs"

    def scenario() -> None:
        agent.start(3)
        agent.until("completed")

    agent.run(
        SAYS, scenario, "--nproc-per-node=2", f"--log_dir={logs}", "--tee", "1", "--redirect", "2", "--rdzv-id=r1"
    )
    assert "[default1]:rank 1 of 2\n" in agent.printed()
    assert "]:oh" not in agent.printed()
    (own,) = logs.glob("r1_*")
    assert (own / "attempt_2/1/stdout.log").read_text() == "rank 1 of 2\n"
    assert (own / "attempt_2/0/stderr.log").read_text() == "oh\n"


def test_metrics_are_served_on_their_own_port(agent: AgentInProcess) -> None:
    from urllib.request import urlopen

    from tests.agent_client import free_port

    port = free_port()

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("pid")
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            page = answer.read().decode()
        assert "elastipod_agent_generation 1\n" in page
        assert "elastipod_agent_worker_step 7\n" in page
        assert re.search(r"elastipod_agent_output_bytes_total [1-9]", page)

    agent.run(DRAINS, scenario, f"--metrics-port={port}")


def test_a_taken_metrics_port_is_a_warning(agent: AgentInProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert agent.run(SAYS, lambda: None, f"--metrics-port={port}") == 0
    assert f"no metrics: cannot listen on 127.0.0.1:{port}: Address already in use" in agent.printed()


def test_a_taken_port_of_the_agent_ends_it_with_one_sentence(agent: AgentInProcess) -> None:
    with socket.create_server(("127.0.0.1", agent.port)):
        assert agent.run_alone("--server-host=127.0.0.1", "train.py") == 1
    told = f"cannot listen on 127.0.0.1:{agent.port}: Address already in use; choose another --server-port"
    assert told in agent.printed()
    assert agent.termination_message == told


@pytest.mark.parametrize(
    ("host", "why"),
    [
        pytest.param("no such host", "Name or service not known", id="no name of a host"),
        pytest.param(
            "a..b",
            "the name has an empty part, or one of more than 63 characters",
            id="a name that cannot be asked for",
        ),
        pytest.param("192.0.2.1", "Cannot assign requested address", id="an address of another machine"),
    ],
)
def test_a_host_that_cannot_be_listened_on_ends_the_agent_with_one_sentence(
    agent: AgentInProcess, host: str, why: str
) -> None:
    assert agent.run_alone(f"--server-host={host}", "train.py") == 1
    told = f"cannot listen on {host}:{agent.port}: {why}; choose another --server-host"
    assert told in agent.printed()
    assert "Traceback" not in agent.printed()
    assert agent.termination_message == told


def test_the_details_of_a_status_command(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1)
        agent.until("completed")
        seen = agent.call("GET", "/status?details=true")[1]
        shown = seen.get("details", seen)
        assert (shown["job"], shown["pid"], shown["nproc"], shown["is_warm"]) == ("tests/agent", os.getpid(), 2, False)

    agent.run(SAYS, scenario, "--nproc-per-node=2")
