"""What a user can get wrong: each mistake ends with one sentence, where people look for it, and with the right exit code."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess, until_gone
from tests.e2e.agent_scripts import FAMILY, POLL, RunAgent, worker_pids
from tests.nonempty import every
from tests.patience import PATIENCE_S

HELLO = "print('hello')\n"
FORK_AND_EXIT = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"


@pytest.fixture
def last_words(tmp_path: Path) -> Path:
    """The file in the place of a container's termination message."""
    path = tmp_path / "termination-log"
    path.touch()
    return path


@pytest.fixture
def start(run_agent: RunAgent, tmp_path: Path, last_words: Path) -> Callable[..., AgentProcess]:
    """Start an agent whose last words can be read; ``words`` replace the script and its arguments."""

    def run(script: str, *arguments: str, **options: Any) -> AgentProcess:
        arguments = tuple(one.replace("@", str(tmp_path)) for one in arguments)
        return run_agent(script, *arguments, env={"ELASTIPOD_TERMINATION_LOG": str(last_words)}, **options)

    return run


def end_of(agent: AgentProcess, state: str, generation: int = 1) -> dict[str, Any]:
    """Start a generation and give the status of its end."""
    assert agent.start(generation)[0] == 200
    return agent.until(state)


@pytest.mark.parametrize(
    ("script", "arguments", "reason", "message"),
    [
        pytest.param(
            "def train(:\n",
            [],
            "WorkerCrash",
            "rank 0 (local rank 0) ended with exit code 1: SyntaxError: ",
            id="syntax error",
        ),
        pytest.param(
            HELLO, ["@/missing.py"], "StartFailed", "training script @/missing.py does not exist", id="no script"
        ),
        pytest.param(HELLO, ["@/folder"], "StartFailed", "training script @/folder is a directory", id="a folder"),
        pytest.param(HELLO, ["-m", "no_such.module"], "WorkerCrash", "No module named 'no_such'", id="no module"),
        pytest.param(
            HELLO,
            ["--no-python", "no-such-command"],
            "StartFailed",
            "the workers could not be started: no-such-command: No such file or directory",
            id="no command",
        ),
        pytest.param(
            HELLO,
            ["--no-python", "@/train.py"],
            "StartFailed",
            "the workers could not be started: @/train.py: Permission denied",
            id="not executable",
        ),
        pytest.param(
            HELLO,
            ["--pre-train-script=@/pre.sh"],
            "PreScriptFailed",
            "pre-train script @/pre.sh cannot be run: No such file or directory",
            id="no pre-train script",
        ),
        pytest.param(
            HELLO,
            ["--pre-train-script=@/folder"],
            "PreScriptFailed",
            "pre-train script @/folder cannot be run: Is a directory",
            id="a folder as pre-train script",
        ),
    ],
)
def test_what_cannot_run_is_a_fault_with_one_sentence(
    start: Callable[..., AgentProcess],
    tmp_path: Path,
    last_words: Path,
    script: str,
    arguments: list[str],
    reason: str,
    message: str,
) -> None:
    (tmp_path / "folder").mkdir()
    agent = start(script, *arguments)
    seen = end_of(agent, "faulted")
    assert seen["reason"] == reason
    assert message.replace("@", str(tmp_path)) in seen["message"].splitlines()[0]
    assert seen["failure"]["message"] == seen["message"]
    assert last_words.read_text("utf-8") == seen["message"]
    assert agent.end() == 1
    assert "Traceback" not in agent.printed()
    assert last_words.read_text("utf-8") == seen["message"], "also after the end"


def test_the_command_line_is_at_fault(tmp_path: Path, last_words: Path) -> None:
    """A mistake that argparse finds, one in a value, and nothing at all."""
    for arguments, words in (
        (
            ["--shutdown-signal=SIGFOO", "t.py"],
            "argument --shutdown-signal/--shutdown_signal: invalid choice: 'SIGFOO'",
        ),
        (["--hang-timeout=soon", "t.py"], "--hang-timeout is 'soon'; it must be auto, 0 or a number of seconds"),
        ([], "the following arguments are required: training_script"),
    ):
        done = end_at_once(tmp_path, last_words, arguments)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"hyperpodrun: error: {words}")
        assert last_words.read_text("utf-8").startswith(f"hyperpodrun: {words}")


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_log_directory_that_cannot_be_made(tmp_path: Path, last_words: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = end_at_once(tmp_path, last_words, ["--server-host=127.0.0.1", f"--server-port={port}", "t.py"])
    assert done.returncode == 1
    sentence = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --server-port"
    assert last_words.read_text("utf-8") == sentence
    assert sentence in done.stderr
    done = end_at_once(tmp_path, last_words, [f"--log-dir={last_words}", "t.py"])
    assert done.returncode == 2
    assert last_words.read_text("utf-8") == f"hyperpodrun: --log-dir {last_words} cannot be written: File exists"


def end_at_once(folder: Path, last_words: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run an agent that does not come far."""
    env = {"HOME": str(folder), "KUBERNETES_SERVICE_HOST": "127.0.0.1", "ELASTIPOD_TERMINATION_LOG": str(last_words)}
    last_words.write_text("", "utf-8")
    command = [sys.executable, "-m", "elastipod_agent", *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_log_directory_that_is_lost_later_costs_the_files_and_no_run(
    start: Callable[..., AgentProcess], tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    agent = start(HELLO, f"--log-dir={logs}", "--redirects=3")
    end_of(agent, "completed")
    agent.stop(1)
    agent.until("ready")
    shutil.rmtree(logs)
    logs.touch()
    assert end_of(agent, "completed", 2)["failure"] is None
    agent.until_printed(f"the output of workers goes to the console only, because files in {logs}/")
    agent.until_printed("[default0]:hello")
    agent.stop(2)
    agent.until("ready")
    logs.unlink()
    assert end_of(agent, "completed", 3)["failure"] is None
    assert [file.read_text("utf-8") for file in logs.rglob("stdout.log")] == ["hello\n"]


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system with room for 64 KiB."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_costs_copies_but_no_run(start: Callable[..., AgentProcess], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        agent = start("print('x' * 200_000)\nprint('the end')\n", f"--log-dir={disk}", "--tee=3")
        assert end_of(agent, "completed")["failure"] is None
        agent.until_printed("[default0]:the end")
        agent.until_printed("stdout.log lacks lines from now on: No space left on device")
        agent.end()


def test_a_worker_that_ends_because_its_own_log_is_full_is_explained(
    start: Callable[..., AgentProcess], tmp_path: Path, last_words: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        agent = start("print('x' * 200_000)\n", f"--log-dir={disk}", "--redirects=3")
        seen = end_of(agent, "faulted")
        assert seen["reason"] == "WorkerCrash"
        assert seen["message"].startswith("rank 0 (local rank 0) ended with exit code")
        assert f"the disk that holds {disk}/" in seen["message"]
        assert last_words.read_text("utf-8") == seen["message"]
        agent.end()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param(
            "echo no bucket\nexit 3\n", "ended with exit code 3; the end of its output:\nno bucket", id="it fails"
        ),
        pytest.param(None, "cannot be run: No such file or directory", id="it is missing"),
    ],
)
def test_a_post_script_that_fails_is_told_and_the_run_is_complete(
    start: Callable[..., AgentProcess], tmp_path: Path, last_words: Path, script: str | None, words: str
) -> None:
    post = tmp_path / "post.sh"
    if script is not None:
        post.write_text(script, "utf-8")
    agent = start(HELLO, f"--post-train-script={post}")
    seen = end_of(agent, "completed")
    assert seen["message"].startswith("training completed, but ")
    assert seen["message"].endswith(words)
    assert last_words.read_text("utf-8") == seen["message"]
    assert agent.end() == 0


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("", id="an empty script"),
        pytest.param("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(0.2)\n", id="no output any more"),
        pytest.param("import os\nos.write(1, bytes(range(256)) * 40)\nos.write(2, bytes(range(256)))\n", id="garbage"),
        pytest.param(FORK_AND_EXIT, id="a child is left behind"),
    ],
)
def test_odd_workers_complete(start: Callable[..., AgentProcess], script: str) -> None:
    agent = start(script)
    assert end_of(agent, "completed")["failure"] is None
    assert not below(psutil.Process(agent.process.pid))


def test_garbage_is_made_readable_in_the_message(start: Callable[..., AgentProcess], last_words: Path) -> None:
    agent = start("import os\nos.write(2, bytes(range(256)) * 4)\nos._exit(7)\n")
    message = end_of(agent, "faulted")["message"]
    assert message.startswith("rank 0 (local rank 0) ended with exit code 7")
    assert every(one.isprintable() or one in "\n\t" for one in message)
    assert last_words.read_text("utf-8") == message


def test_a_second_sigterm_ends_it_at_once(start: Callable[..., AgentProcess]) -> None:
    agent = start(POLL)
    agent.start(1)
    agent.until_printed("pid")
    worker = psutil.Process(worker_pids(agent)[0])
    agent.process.terminate()
    until(lambda: agent.status()["terminating"], "the first to be told")
    assert worker.is_running()
    agent.process.terminate()
    assert agent.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    until_gone([worker])


CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")  # whatever it starts is PID 1 of a container
SHELL = ("/bin/sh", "-c", '"$@"; code=$?; exit $code', "sh")


def pid_1(agent: AgentProcess) -> psutil.Process:
    """Give the first process of the container."""
    (first,) = psutil.Process(agent.process.pid).children()
    return first


def below(process: psutil.Process) -> list[str]:
    """List what runs below a process, zombies too."""
    return [f"{one.pid} {one.name()} {one.status()}" for one in process.children(recursive=True)]


@pytest.mark.parametrize("wrapper", [CONTAINER, (*CONTAINER, *SHELL)], ids=["the agent", "a shell"])
def test_whoever_is_pid_1_no_process_and_no_zombie_stays(
    start: Callable[..., AgentProcess], wrapper: tuple[str, ...]
) -> None:
    agent = start(FAMILY, wrapper=wrapper)
    agent.start(1)
    agent.until_printed("family")
    first = pid_1(agent)
    others = 1 if len(wrapper) > len(CONTAINER) else 0  # the agent below the shell
    until(lambda: len(below(first)) == 4 + others, "the worker, its two children and the orphan")
    agent.stop(1)
    agent.until("ready")
    assert len(below(first)) == others, below(first)
    assert agent.call("POST", "/shutdown")[0] == 200
    assert agent.process.wait(PATIENCE_S) == 0


def test_the_agent_as_pid_1_takes_sigterm_as_the_beginning_of_a_drain(start: Callable[..., AgentProcess]) -> None:
    agent = start(POLL, wrapper=CONTAINER)
    agent.start(1)
    agent.until_printed("pid")
    pid_1(agent).terminate()
    until(lambda: agent.status()["terminating"], "the signal to be told")
    agent.drain(1)
    assert agent.until("ready")["drained"] is True
    assert agent.call("POST", "/shutdown")[0] == 200
    assert agent.process.wait(PATIENCE_S) == 0


def test_a_shell_as_pid_1_keeps_sigterm_from_the_agent_and_its_end_ends_all(start: Callable[..., AgentProcess]) -> None:
    """The operator drains by other signs then; when the grace period is over the kernel ends the whole container."""
    agent = start(POLL, wrapper=(*CONTAINER, *SHELL))
    agent.start(1)
    agent.until_printed("pid")
    first = pid_1(agent)
    container = first.children(recursive=True)
    (root,) = {Path(path).parents[1] for one in container if (path := one.environ().get("ELASTIPOD_WORKER_FILE"))}
    first.terminate()
    seen = agent.status()
    assert (seen["status"], seen["terminating"]) == ("running", False)
    assert agent.drain(1) == (200, None), "as the operator does when the pod is being deleted"
    assert agent.until("ready")["drained"] is True
    first.kill()
    until_gone([first, *container])
    agent.process.wait(PATIENCE_S)
    shutil.rmtree(
        root, ignore_errors=True
    )  # a container's memory would be gone with it; an agent that starts removes it too
