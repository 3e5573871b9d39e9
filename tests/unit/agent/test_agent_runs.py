"""Whole runs of the agent with small real workers, in the process of the test."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from functools import partial

import pytest
from tests.agent_scenarios import check_fences, check_plain_protocol
from tests.patience import PATIENCE_S
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.worker_scripts import DRAINS, SAYS, pids


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

    from tests.free_ports import free_port

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


@pytest.mark.parametrize(
    ("options", "place"),
    [
        pytest.param(["--server-host=127.0.0.1"], "127.0.0.1:{}", id="at one address"),
        pytest.param([], "port {}", id="at all addresses"),
    ],
)
def test_a_taken_port_of_the_agent_ends_it_with_one_sentence(
    agent: AgentInProcess, options: list[str], place: str
) -> None:
    with socket.create_server(("127.0.0.1", agent.port)):
        assert agent.run_alone(*options, "train.py") == 1
    told = f"cannot listen on {place.format(agent.port)}: Address already in use; choose another --server-port"
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


def test_a_log_directory_that_cannot_be_written_costs_the_files_and_not_the_run(agent: AgentInProcess) -> None:
    logs = agent.folder / "logs"

    def scenario() -> None:
        (own,) = logs.iterdir()
        own.rmdir()
        own.touch()  # as on a full disk, no folder can be made in it
        agent.start(1)
        agent.until("completed")

    agent.run(SAYS, scenario, "--nproc-per-node=2", f"--log-dir={logs}", "--redirects=3")
    assert "rank 1 of 2\n" in agent.printed()
    assert agent.printed().count("the output of workers goes to the console only, because files in") == 1


def test_the_agent_answers_while_a_log_file_cannot_be_opened(agent: AgentInProcess) -> None:
    """The storage of --log-dir hangs; here a pipe that nobody reads takes the place of a file."""
    logs = agent.folder / "logs"

    def scenario() -> None:
        (own,) = logs.iterdir()
        file = own / "attempt_0/0/stdout.log"
        file.parent.mkdir(parents=True)
        os.mkfifo(file)
        agent.start(1)
        assert agent.status()["status"] == "running"
        with open(file, "rb") as opened:  # the storage is back
            agent.until("completed")
            assert opened.read() == b"rank 0 of 1\n"

    agent.run(SAYS, scenario, f"--log-dir={logs}", "--tee=1")


def test_the_agent_answers_while_an_error_report_cannot_be_read(agent: AgentInProcess) -> None:
    script = (
        "import os\nos.mkfifo(os.environ['TORCHELASTIC_ERROR_FILE'])\nprint('made', flush=True)\nraise SystemExit(3)\n"
    )

    def scenario() -> None:
        agent.start(1)
        agent.until_printed("made")
        (file,) = (agent.folder / "logs").glob("*/attempt_0/0/error.json")
        with open(file, "wb"):  # waits for the agent to read it
            assert agent.status()["status"] == "running"
        assert "exit code 3" in agent.until("faulted")["message"]

    agent.run(script, scenario, f"--log-dir={agent.folder / 'logs'}")


def test_a_stop_does_not_wait_for_the_storage_of_the_script(
    agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage_is_back, isfile = threading.Event(), os.path.isfile

    def hang(path: str) -> bool:
        if path == str(agent.folder / "train.py"):
            storage_is_back.wait(PATIENCE_S)
        return isfile(path)

    def scenario() -> None:
        monkeypatch.setattr(os.path, "isfile", hang)
        agent.start(1)
        agent.stop(1)
        agent.until("ready")
        storage_is_back.set()

    agent.run(SAYS, scenario)
    assert "rank 0" not in agent.printed()
