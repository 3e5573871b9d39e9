"""The agent against strangers and crowds, and what a person inside the pod and Prometheus see of it: real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.agent_client import until
from tests.e2e.agent_process import PACKAGES, AgentProcess, until_gone
from tests.e2e.agent_scripts import POLL, RunAgent, worker_pids
from tests.free_ports import free_port
from tests.nonempty import every
from tests.patience import PATIENCE_S

from elastipod_agent.authentication import Credentials, challenge_in, signed

KEY, TOKEN = "5a" * 32, "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
HOLDS_KEY = {"ELASTIPOD_KEY": KEY, "ELASTIPOD_TOKEN": TOKEN, "ELASTIPOD_POD": "job-workers-0"}
HOLDS_TOKEN = {"ELASTIPOD_TOKEN": TOKEN}
SECRET = "a-value-that-only-the-workers-may-see"
PRINT_ENVIRONMENT = """
import os
print("names", sorted(os.environ), flush=True)
is_held = "ELASTIPOD_KEY" in os.environ or "ELASTIPOD_TOKEN" in os.environ
print("own key", is_held, "own secret", len(os.environ["MY_SECRET"]), flush=True)
"""
CRASH = "import os; raise ValueError('bad')"


def fds(agent: AgentProcess) -> int:
    return len(os.listdir(f"/proc/{agent.process.pid}/fd"))


def own_lines(agent: AgentProcess) -> list[str]:
    """Give the lines that the agent itself printed."""
    return [line for line in agent.printed().splitlines() if line.startswith("hyperpodrun:")]


STRANGERS_KEYS = (
    Credentials(),
    Credentials(token=TOKEN[:-1]),
    Credentials(key="6b" * 32, pod="job-workers-0"),
    Credentials(key=KEY, pod="job-workers-1"),
)


@pytest.mark.parametrize(
    ("env", "strangers", "words"),
    [
        pytest.param(HOLDS_KEY, (*STRANGERS_KEYS, Credentials(token=TOKEN)), "need a MAC with the key", id="a key"),
        pytest.param(HOLDS_TOKEN, STRANGERS_KEYS, "Authorization: Bearer", id="the token of the previous version"),
    ],
)
def test_without_the_credentials_of_the_job_nothing_happens(
    run_agent: RunAgent, env: dict[str, str], strangers: tuple[Credentials, ...], words: str
) -> None:
    agent = run_agent(POLL, env=env)
    assert agent.start(1)[0] == 200
    agent.until_printed("pid ")
    (pid,) = worker_pids(agent)
    before = agent.status()
    good = agent.credentials
    calls = [
        ("GET", "/status"),
        ("POST", "/stop"),
        ("POST", "/shutdown"),
        ("POST", "/start"),
        ("POST", "/update"),
        ("GET", "/x"),
    ]
    for wrong in strangers:
        agent.credentials = wrong
        for method, path in calls:
            code, body = agent.call(method, f"{path}?token={TOKEN}", {} if method == "POST" else None)
            assert code == 401
            assert words in body["detail"]
    agent.credentials = good
    assert agent.status() == before
    os.kill(pid, 0)
    agent.drain(1)
    assert agent.until("ready")["drained"]
    refusals = [line for line in own_lines(agent) if "call refused" in line]
    assert len(refusals) == 10, "a flood is counted, not shown"


def raw_call(agent: AgentProcess, headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
    """POST /stop with just these headers; gives the code and the challenge."""
    connection = HTTPConnection("127.0.0.1", agent.port, timeout=PATIENCE_S)
    connection.request("POST", "/stop", body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.headers.get("WWW-Authenticate", "")


def test_a_call_that_was_overheard_cannot_be_repeated(run_agent: RunAgent) -> None:
    agent, body = run_agent(POLL, env=HOLDS_KEY), json.dumps({"timeout": 10}).encode()
    assert agent.start(1)[0] == 200
    agent.until_printed("pid ")
    _, told = raw_call(agent, {}, body)
    overheard = signed(agent.credentials, challenge_in(told), "POST", "/stop", body)
    assert raw_call(agent, overheard, body)[0] == 200
    agent.until("ready")
    assert agent.start(2)[0] == 200
    agent.until_printed("pid ", times=2)
    # The agent sees the first step of a generation a little later, and nothing changes by itself after that.
    before = until(lambda: (seen := agent.status())["gap_s"] is not None and seen, "the first step of the generation")
    for _ in range(3):
        assert raw_call(agent, overheard, body)[0] == 401
    assert agent.status() == before


def test_no_line_of_the_agent_holds_a_key_or_a_value_of_the_environment(run_agent: RunAgent) -> None:
    env = {**HOLDS_KEY, "MY_SECRET": SECRET, "DATABASE_URL": f"postgres://{SECRET}"}
    agent = run_agent(PRINT_ENVIRONMENT, "--server-log-level=debug", "--pre-train-script=/usr/bin/env", env=env)
    agent.start(1)
    agent.until("completed")
    agent.stop(1)
    agent.until("ready")
    agent.call("POST", "/start", raw=b"{")
    agent.call("POST", "/start", {"rank": 0})
    agent.call("GET", f"/status?token={TOKEN}")
    good, agent.credentials = agent.credentials, Credentials(token=TOKEN)
    agent.call("GET", "/status")
    agent.credentials = good
    agent.until_printed("path=/start status=422", 2)
    assert "own key False own secret 37" in agent.printed()
    for secret in (KEY, TOKEN):
        assert secret not in agent.printed(), "neither the agent, nor a script, nor a worker prints it"
    lines = own_lines(agent)
    assert any("path=/status status=200" in line for line in lines), "debug shows every call"
    assert not [line for line in lines if SECRET in line]
    assert every("job=tests/agent" in line for line in lines)
    begin = next(i for i, line in enumerate(lines) if "starting workers" in line)
    assert every("group_rank=0" in line for line in lines[begin:])


@contextmanager
def crowd(agent: AgentProcess, clients: int, calls: int) -> Iterator[list[str]]:
    """Let clients ask for the status, each on a connection of its own, so often and until the block ends; gives what they saw."""
    seen: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def ask() -> None:
        connection = HTTPConnection("127.0.0.1", agent.port, timeout=PATIENCE_S)
        while len(seen) < calls or not may_end.is_set():
            connection.request("GET", "/status")
            seen.append(json.loads(connection.getresponse().read())["status"])
            if len(seen) >= calls // 4:
                begun.set()
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    assert begun.wait(PATIENCE_S)
    try:
        yield seen
    finally:
        may_end.set()
        for thread in threads:
            thread.join(PATIENCE_S)


@pytest.mark.slow
def test_ten_thousand_calls_do_not_delay_the_news_of_a_killed_worker(run_agent: RunAgent) -> None:
    agent = run_agent(POLL)
    agent.start(1)
    agent.until_printed("pid ")
    (pid,) = worker_pids(agent)
    before = fds(agent)
    worker = psutil.Process(pid)
    with crowd(agent, 8, 10_000) as seen:
        os.kill(pid, signal.SIGKILL)
        until_gone([worker])  # which needs processor time of its own
        at_end = len(seen)
        until(lambda: "faulted" in seen, "the news")
    assert len(seen) >= 10_000
    first = seen.index("faulted")
    print(f"{first - at_end} calls were answered between the worker's end and the news of it")
    assert first - at_end < 3750, "half of those that are to come after the kill"
    # Each of the other clients may have had an answer that it had not noted yet.
    assert seen[first:].count("running") < 8
    until(lambda: fds(agent) <= before, "the connections to be closed")


STRANGERS = {
    "silent": b"",
    "a head that never ends": b"GET /status HTTP/1.1\r\nX: ",
    "a body that never comes": b"POST /start HTTP/1.1\r\nContent-Length: 900000\r\n\r\n{",
    "a huge header": b"GET /status HTTP/1.1\r\nX: " + b"x" * 40_000,
    "pipelining without reading": b"GET /status HTTP/1.1\r\n\r\n" * 3000,
    "a long poll that is left": b"GET /status?after=VERSION&wait=30 HTTP/1.1\r\n\r\n",
    "another long poll": b"GET /status?after=VERSION&wait=30 HTTP/1.1\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("env", [HOLDS_KEY, {}], ids=["with a key", "open to everybody"])
def test_a_thousand_connections_of_every_bad_kind(run_agent: RunAgent, env: dict[str, str]) -> None:
    agent = run_agent(POLL, env=env)
    agent.start(1)
    agent.until_printed("pid ")
    (pid,) = worker_pids(agent)
    version = agent.status()["version"]
    before, most = fds(agent), 0
    with ExitStack() as stack:
        for number in range(1000):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", agent.port), PATIENCE_S))
            data = list(STRANGERS.values())[number % len(STRANGERS)].replace(b"VERSION", str(version).encode())
            stranger.setblocking(False)
            with suppress(OSError):  # the agent may have had enough of it already
                stranger.send(data)
            if number % 100 == 99:
                assert agent.status()["status"] == "running", "the operator is let in at any time"
                most = max(most, fds(agent))
        os.kill(pid, signal.SIGKILL)
        assert agent.until("faulted")["failure"]["signal"] == "SIGKILL"
        assert most - before <= 128 + 256 + 8, "connections served, and those that the kernel holds ready"
    until(lambda: fds(agent) <= before, "all of them to be closed")


def test_an_unread_long_poll_holds_nothing_up(run_agent: RunAgent) -> None:
    agent = run_agent(POLL)
    version = agent.status()["version"]
    with ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", agent.port), PATIENCE_S))
            client.send(f"GET /status?after={version}&wait=30 HTTP/1.1\r\n\r\n".encode() * 50)
        agent.start(1)
        agent.until_printed("pid ")
        agent.drain(1)
        assert agent.until("ready")["drained"]


def scrape(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}


def test_metrics_of_a_run_with_a_crash_and_a_drain(run_agent: RunAgent) -> None:
    port = free_port()
    agent = run_agent(POLL, f"--metrics-port={port}", env=HOLDS_KEY)
    assert ("elastipod_agent_worker_step",) not in scrape(port)
    agent.start(1)
    agent.until_printed("pid ")
    os.kill(worker_pids(agent)[0], signal.SIGKILL)
    agent.until("faulted")
    agent.stop(1)
    agent.until("ready")
    agent.start(2)
    agent.until_printed("pid ", 2)
    found = scrape(port)
    assert found["elastipod_agent_worker_step",] == 7
    assert found["elastipod_agent_state", "running"] == 1
    assert found["elastipod_agent_last_start_seconds",] > 0
    agent.drain(2)
    agent.until("ready")
    found = scrape(port)
    wanted = {
        ("starts_total",): 2,
        ("restarts_total",): 1,
        ("drains_total",): 1,
        ("faults_total", "WorkerCrash"): 1,
        ("generation",): 2,
    }
    assert {
        (f"elastipod_agent_{name}", *labels): value for (name, *labels), value in wanted.items()
    }.items() <= found.items()
    assert found["elastipod_agent_output_bytes_total",] > 0
    assert 1e6 < found["elastipod_agent_resident_memory_bytes",] < 1e8


def test_a_metrics_port_that_is_taken_costs_only_the_metrics(run_agent: RunAgent) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        agent = run_agent(POLL, f"--metrics-port={taken.getsockname()[1]}")
        agent.until_printed("WARNING no metrics: cannot listen on 127.0.0.1:")
        assert agent.start(1)[0] == 200


def show(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `elastipod agent` as kubectl exec does: in the container's environment."""
    command = [sys.executable, "-m", "elastipod.cli", "agent", *arguments]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PACKAGES), **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)


def test_a_person_in_the_pod_sees_what_the_agent_does(run_agent: RunAgent) -> None:
    port = free_port()
    env = {**HOLDS_KEY, "ELASTIPOD_POD": "llm-0"}
    agent = run_agent(CRASH, env=env)
    inside = {"ELASTIPOD_AGENT_PORT": str(agent.port)}
    agent.start(1, nnodes=1, progress={"main": {"progressCount": 40, "progressData": "/data/step-40"}})
    agent.until("faulted")
    done = show("status", **inside, **env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(re.findall(r"^(\w+(?: \w+)?) +(.*)$", done.stdout, re.MULTILINE))
    assert lines["agent"].startswith(f"tests/agent, pod llm-0, port {agent.port}, version ")
    assert lines["state"].startswith("faulted for ")
    assert lines["generation"] == "1, group rank 0 of 1"
    assert lines["last fault"].startswith("WorkerCrash, ")
    assert lines["checkpoint"] == "main: step 40, /data/step-40"
    assert "ValueError: bad" in done.stdout
    refused = show("status", **inside)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "$ELASTIPOD_KEY is not set here" in refused.stderr
    assert show("status", f"--port={port}").returncode == 1


def test_of_several_agents_the_pods_own_is_asked_or_all_are_named(run_agent: RunAgent) -> None:
    agents = [run_agent(POLL), run_agent(POLL)]
    agents[0].start(1)
    seen = [json.loads(show("status", "--json", ELASTIPOD_AGENT_PORT=str(agent.port)).stdout) for agent in agents]
    assert [one["status"] for one in seen] == ["running", "ready"]
    crowded = show("status")
    assert crowded.returncode == 2
    assert every(f"{agent.port} (tests/agent)" in crowded.stderr for agent in agents)
