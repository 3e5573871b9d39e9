"""`elastipod agent status`: finds the agent, speaks to a person, and says what to check when nobody answers."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.unit.agent.test_status_text import RUNNING

from elastipod_agent import endpoint_file, status_command
from elastipod_agent.authentication import Credentials, MacGuard
from elastipod_agent.endpoint_file import AgentEndpoint, find_agents, publish_endpoint
from elastipod_agent.server.http import Admission, admit_everybody
from elastipod_agent.server.http_messages import Head, RequestRefused
from elastipod_agent.status_command import AmbiguousAgent, find_agent
from elastipod_agent.status_text import AgentAddress

HERE = AgentEndpoint(os.getpid(), "0.0.0.0", 7000, "team/a")
OTHER = AgentEndpoint(os.getpid(), "::", 7001, "")
NONE = Credentials()


@pytest.mark.parametrize(
    ("port", "agents", "environ", "expected"),
    [
        pytest.param(None, [HERE], {}, AgentAddress("127.0.0.1", 7000, NONE), id="the only one, wherever it listens"),
        pytest.param(
            None,
            [HERE],
            {"ELASTIPOD_AGENT_PORT": "8080"},
            AgentAddress("127.0.0.1", 7000, NONE),
            id="not where it was told to",
        ),
        pytest.param(
            None,
            [HERE, OTHER],
            {"ELASTIPOD_AGENT_PORT": "7001"},
            AgentAddress("::1", 7001, NONE),
            id="the one of this pod",
        ),
        pytest.param(7001, [HERE, OTHER], {}, AgentAddress("::1", 7001, NONE), id="the one that is named"),
        pytest.param(
            9,
            [HERE],
            {"ELASTIPOD_TOKEN": "abc"},
            AgentAddress("127.0.0.1", 9, Credentials(token="abc")),
            id="a port by itself",
        ),
        pytest.param(
            None, [], {"ELASTIPOD_AGENT_PORT": "81"}, AgentAddress("127.0.0.1", 81, NONE), id="the environment's"
        ),
        pytest.param(None, [], {}, AgentAddress("127.0.0.1", 8080, NONE), id="the default"),
    ],
)
def test_where_the_agent_is(
    port: int | None, agents: list[AgentEndpoint], environ: dict[str, str], expected: AgentAddress
) -> None:
    assert find_agent(port, agents, environ) == expected


def test_several_agents_are_listed() -> None:
    with pytest.raises(AmbiguousAgent, match=r"choose one with --port: 7000 \(team/a\), 7001 \(no job\)"):
        find_agent(None, [HERE, OTHER], {})


def test_agents_that_were_killed_are_passed_over_and_cleared_away(tmp_path: Path) -> None:
    folders = {name: tmp_path / f"elastipod-{name}" for name in "abcd"}
    for folder in folders.values():
        folder.mkdir()
    with publish_endpoint(folders["a"], HERE):
        publish_endpoint(folders["b"], OTHER).close()  # the kernel lets the lock of a killed agent go
        (folders["c"] / "agent.json").write_text("[1]")
        assert find_agents([tmp_path, tmp_path / "none"]) == [HERE]
        endpoint_file.remove_stale_folders(tmp_path)
        assert sorted(tmp_path.iterdir()) == [folders["a"], folders["d"]], "one that has no file yet is being made"


@contextmanager
def answering(
    code: int, body: bytes, admit: Callable[[Head], Admission] = admit_everybody
) -> Iterator[tuple[int, list[str | None]]]:
    """Answer every request that is admitted alike; gives the port and the proofs that were shown."""
    shown: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers.get("Authorization"))
            try:
                admit(Head("GET", self.path, {k.lower(): v for k, v in self.headers.items()}, True))
            except RequestRefused as refused:
                self.send_response(refused.response.status)
                for name, value in refused.response.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                return
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port, shown
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run the command where no agent has announced itself."""
    monkeypatch.setattr(endpoint_file, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("ELASTIPOD_KEY", "ELASTIPOD_TOKEN", "ELASTIPOD_AGENT_PORT"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: status_command.main(["status", *arguments])


def test_the_answer_is_printed(
    alone: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTIPOD_TOKEN", "my-token")
    with answering(200, json.dumps(RUNNING).encode()) as (port, shown):
        assert alone(f"--port={port}") == 0
        assert "state       running for" in capsys.readouterr().out
        assert alone(f"--port={port}", "--json") == 0
        assert json.loads(capsys.readouterr().out) == RUNNING
    assert shown == ["Bearer my-token"] * 2


def test_an_agent_with_a_key_is_asked_with_a_mac(
    alone: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Credentials(key="f" * 64, pod="job-workers-0")
    monkeypatch.setenv("ELASTIPOD_KEY", held.key)
    monkeypatch.setenv("ELASTIPOD_POD", held.pod)
    monkeypatch.setenv("ELASTIPOD_TOKEN", "my-token")
    guard = MacGuard(held)
    with answering(200, json.dumps(RUNNING).encode(), guard.admit) as (port, shown):
        assert alone(f"--port={port}") == 0
    assert "state       running for" in capsys.readouterr().out
    assert shown[0] is None
    assert "my-token" not in str(shown)


@pytest.mark.parametrize(
    ("code", "body", "words"),
    [
        pytest.param(401, b"{}", "$ELASTIPOD_KEY is not set here", id="a key is wanted"),
        pytest.param(404, b"<html>", "is not an agent (HTTP 404)", id="a web server"),
        pytest.param(200, b"[]", "is not an agent (HTTP 200)", id="something else"),
    ],
)
def test_who_answers_otherwise_is_named(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str], code: int, body: bytes, words: str
) -> None:
    with answering(code, body) as (port, _):
        assert alone(f"--port={port}") == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_nobody_there(alone: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, b"") as (port, _):
        pass
    assert alone(f"--port={port}") == 1
    assert f"nothing listens on port {port}: does hyperpodrun run" in capsys.readouterr().err


def test_it_is_repeated_until_the_person_has_enough(
    alone: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", nap)
    with answering(200, json.dumps(RUNNING).encode()) as (port, _):
        assert alone(f"--port={port}", "--watch") == 0
    assert naps == [2.0] * 3
    assert capsys.readouterr().out.count("state ") == 3


def test_an_error_goes_to_standard_error_alone(
    alone: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(404, b"") as (port, _):
        assert alone(f"--port={port}") == 1
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("elastipod agent: the server on port ")) == ("", True)
    monkeypatch.setattr(status_command, "find_agents", lambda: [HERE, OTHER])
    assert alone() == 2
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("elastipod agent: several agents run here; choose one")) == ("", True)


def test_an_agent_that_accepts_and_never_answers(
    alone: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_command, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert alone(f"--port={busy.getsockname()[1]}") == 1
    assert "does not answer (no answer in time): is it stopped, or busy?" in capsys.readouterr().err


def test_a_different_key_is_told_from_none(
    alone: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTIPOD_TOKEN", "another")
    with answering(401, b"{}") as (port, _):
        assert alone(f"--port={port}") == 1
    assert f"the agent on port {port} requires the key of its job, and $ELASTIPOD_KEY holds a different one" in (
        capsys.readouterr().err
    )


def test_a_terminal_is_cleared_for_each_repetition(
    alone: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", nap)
    with answering(200, json.dumps(RUNNING).encode()) as (port, _):
        assert alone(f"--port={port}", "--watch=0.1") == 0
        assert capsys.readouterr().out.startswith("agent       ")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        assert alone(f"--port={port}", "--watch=3600") == 0
        assert capsys.readouterr().out.startswith("\x1b[2J\x1b[Hagent       ")
        assert alone(f"--port={port}", "--watch", "--json") == 0
        assert json.loads(capsys.readouterr().out) == RUNNING
        assert alone(f"--port={port}") == 0
        assert capsys.readouterr().out.startswith("agent       ")
    assert naps == [0.1, 3600.0, 2.0]


def test_help_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        status_command.main(["--help"])
    overview = " ".join(capsys.readouterr().out.split())
    assert overview.startswith("usage: elastipod agent [-h] COMMAND ...")
    assert "Query the agent (hyperpodrun) of this pod." in overview
    assert "status show the state of the agent and its workers" in overview
    with pytest.raises(SystemExit):
        status_command.main(["status", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "Show the state of the agent and its workers. Inside the pod, the port and the key are found" in words
    assert "--port PORT port of the agent (default: found automatically)" in words
    assert "--json print the agent's answer, one JSON object per line" in words
    assert "--watch [SECONDS] repeat every SECONDS (default: 2)" in words
    with pytest.raises(SystemExit) as ended:
        status_command.main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--port=65536", "'65536' is not a port number"),
        ("--port=0", "'0' is not a port number"),
        ("--watch=0.09", "'0.09' is not a number of seconds from 0.1 to 3600"),
        ("--watch=3600.1", "'3600.1' is not a number of seconds from 0.1 to 3600"),
        ("--watch=x", "'x' is not a number of seconds from 0.1 to 3600"),
    ],
)
def test_what_is_wrong_with_a_value(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str], argument: str, sentence: str
) -> None:
    with pytest.raises(SystemExit):
        alone(argument)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--port=0"], ["--port=http"], ["--watch=0"], ["--watch=x"], ["more"]])
def test_wrong_use(alone: Callable[..., int], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        alone(*arguments)
    assert ended.value.code == 2
