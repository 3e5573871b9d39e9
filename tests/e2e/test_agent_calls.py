"""Calls to a real agent process: fences, bad bodies, large ones, clients that stall, command lines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.agent_scenarios import check_fences, check_plain_protocol
from tests.e2e.agent_process import PACKAGES
from tests.e2e.agent_scripts import POLL, SAY_RANK, RunAgent, worker_pids
from tests.patience import PATIENCE_S


def test_generations_fence_late_and_repeated_calls(run_agent: RunAgent) -> None:
    check_fences(run_agent(POLL))


def test_the_plain_protocol_knows_no_generation(run_agent: RunAgent) -> None:
    check_plain_protocol(run_agent(POLL))


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "words"),
    [
        pytest.param("GET", "/nowhere", None, 404, "there is no /nowhere", id="unknown path"),
        pytest.param("GET", "/start", None, 405, "/start allows POST", id="wrong method"),
        pytest.param("POST", "/start", b"{", 422, "not JSON", id="broken JSON"),
        pytest.param("POST", "/start", b"[NaN]", 422, "not JSON", id="not a number"),
        pytest.param("POST", "/start", b"[]", 422, "must be a JSON object", id="a list"),
        pytest.param("POST", "/start", b'{"rank": 0}', 422, "nnodes", id="missing field"),
        pytest.param("POST", "/stop", b'{"timeout": "soon"}', 422, "timeout", id="wrong type"),
        pytest.param("GET", "/status?after=x", None, 422, "after", id="bad query"),
        pytest.param("POST", "/stop", b" " * (2**20 + 1), 413, "at most 1048576", id="large body"),
    ],
)
def test_bad_calls_are_answered_with_the_field_at_fault(
    run_agent: RunAgent, method: str, path: str, body: bytes | None, code: int, words: str
) -> None:
    agent = run_agent(SAY_RANK)
    answered, detail = agent.call(method, path, raw=body)
    assert answered == code
    assert words in str(detail["detail"])
    assert agent.status()["status"] == "ready"


def test_a_start_may_carry_the_addresses_of_thousands_of_pods(run_agent: RunAgent) -> None:
    agent = run_agent(SAY_RANK)
    addresses = [{"rank": rank, "ip": f"10.{rank >> 8}.0.{rank & 255}", "note": "x" * 200} for rank in range(16_000)]
    assert agent.start(1, rankIps=addresses)[0] == 200
    agent.until("completed")


def test_clients_that_stall_do_not_delay_supervision(run_agent: RunAgent) -> None:
    agent = run_agent(POLL)
    agent.start(1)
    agent.until_printed("pid")
    with ExitStack() as clients:
        for number in range(60):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", agent.port)))
            client.sendall(b"GET /sta" if number % 2 else b"POST /start HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{")
        os.kill(worker_pids(agent)[0], signal.SIGKILL)
        agent.until("faulted")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["--nproc-per-node=many", "t.py"], 2, "--nproc-per-node is 'many'", id="worker count"),
        pytest.param(["--shutdown-signal=SIGFOO", "t.py"], 2, "invalid choice", id="choice"),
        pytest.param(["--nnodes=2:x", "t.py"], 2, "--nnodes is '2:x'", id="nnodes"),
        pytest.param([], 2, "training_script", id="no script"),
        pytest.param(["--log-dir=/proc/nowhere", "t.py"], 2, "--log-dir /proc/nowhere", id="log directory"),
    ],
)
def test_a_bad_command_line_ends_with_one_sentence(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = _run_to_end(tmp_path, arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_ends_with_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = _run_to_end(tmp_path, ["--server-host=127.0.0.1", f"--server-port={port}", "t.py"])
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_idle_agent_is_light_and_free_of_torch(run_agent: RunAgent) -> None:
    agent = run_agent(SAY_RANK)
    process = psutil.Process(agent.process.pid)
    assert process.memory_full_info().uss < 60 * 2**20
    assert not [m.path for m in process.memory_maps() if "torch" in m.path]


def test_outside_a_pod_it_is_torchrun(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SAY_RANK + "print(sys.argv[1:])\n".replace("sys", "__import__('sys')"), "utf-8")
    done = _run_to_end(
        tmp_path,
        ["--nproc_per_node=1", "--rdzv-backend=hyperpod", "--server-port=1", "t.py", "--server-port", "2"],
        is_pod=False,
    )
    assert "rank 0 of 1" in done.stdout
    assert "['--server-port', '2']" in done.stdout
    assert done.returncode == 0


def _run_to_end(folder: Path, arguments: list[str], *, is_pod: bool = True) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(PACKAGES)}
    if is_pod:
        env["KUBERNETES_SERVICE_HOST"] = "127.0.0.1"
    command = [sys.executable, "-m", "elastipod_agent", *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
