"""Workers from the fork server, which imports a torch that is there at once; the agent in the process of the test."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.unit.agent.agent_in_process import PACKAGES, AgentInProcess, pod

from elastipod_agent.fork_server.client import ForkServerClient
from elastipod_agent.fork_server.forked_worker import ForkedWorker

HELLO = """
import os, sys
print("generation", os.environ["ELASTIPOD_GENERATION"], "rank", os.environ["RANK"], "torch" in sys.modules, sys.argv[1:])
print("name", __name__, os.path.basename(__file__), "flag", "--flag" in open("/proc/self/cmdline").read(), flush=True)
"""
WAIT = "import time\nprint('awake', flush=True)\ntime.sleep(600)\n"
TORCH = {"torch/__init__.py": "from . import cuda\n", "torch/cuda.py": "def is_initialized():\n    return False\n"}


class WarmAgent:
    """An agent with warm workers, and what it logs about them."""

    def __init__(self, agent: AgentInProcess) -> None:
        self.agent = agent

    def run(self, scenario: Any, *options: str, script: str = HELLO, script_args: tuple[str, ...] = ()) -> int:
        return self.agent.run(script, scenario, *options, script_args=script_args, is_warm=True)

    def until_warm(self, times: int = 1) -> None:
        """Wait until so many servers have become ready."""
        self.agent.until_printed("fork server is ready", times)

    def generation(self, number: int, state: str = "completed") -> dict[str, Any]:
        """Run a generation to its end; gives the status in which it ended."""
        assert self.agent.start(number) == (200, None)
        seen = self.agent.until(state)
        self.agent.stop(number)
        self.agent.until("ready")
        return seen

    def starts(self) -> tuple[int, int]:
        """Give how many workers were started warm, and cold, by any agent of this process."""
        details = self.agent.call("GET", "/status?details=1")[1]["details"]
        return details["warm_starts"], details["cold_starts"]

    def server(self) -> psutil.Process:
        """Give the server's process; those forked ahead look alike and are younger."""

        def found() -> psutil.Process | None:
            children = psutil.Process().children()
            servers = [child for child in children if "fork_server/bootstrap.py" in " ".join(child.cmdline())]
            return min(servers, key=lambda child: child.create_time(), default=None)

        process: psutil.Process = until(found, "the server's process")
        return process

    def events(self, words: str) -> list[str]:
        return [line for line in self.agent.printed().splitlines() if line.startswith("hyperpodrun") and words in line]


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[WarmAgent]:
    put(tmp_path, TORCH | {"torchdata/__init__.py": ""})
    with pod(tmp_path, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGES}"}) as agent:
        yield WarmAgent(agent)


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_workers_come_from_the_server_and_are_like_any_other(warm: WarmAgent) -> None:
    def scenario() -> None:
        warm.until_warm()
        assert warm.agent.status()["warming"] is False
        before = warm.starts()
        for number in (1, 2):
            assert warm.generation(number)["failure"] is None
        after = warm.starts()
        assert (after[0] - before[0], after[1] - before[1]) == (4, 0)

    assert warm.run(scenario, "--nproc-per-node=2", script_args=("--flag", "x")) == 0
    printed = warm.agent.printed()
    for line in (
        "[default0]:generation 1 rank 0 True ['--flag', 'x']",
        "[default1]:generation 2 rank 1 True ['--flag', 'x']",
        "[default1]:name __main__ train.py flag True",
    ):
        assert line in printed


def test_a_process_that_dies_while_it_is_forked_ahead_costs_no_warm_start(
    warm: WarmAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start comes before the answer to the request that has forked it."""
    fork, asked, is_asked_again, is_told = ForkServerClient.fork, list[int](), asyncio.Event(), asyncio.Event()

    async def forked(server: ForkServerClient, count: int) -> list[ForkedWorker]:
        asked.append(count)
        if len(asked) > 1:
            is_asked_again.set()
            await is_told.wait()
            await asyncio.sleep(0)  # the one who asked before goes on first
            return await fork(server, count)
        found = await fork(server, count)
        os.kill(found[0].child.pid, signal.SIGKILL)
        await found[0].child.ended.wait()
        await is_asked_again.wait()
        is_told.set()
        return found

    def scenario() -> None:
        warm.until_warm()
        before = warm.starts()
        until(lambda: asked, "processes that are forked ahead")
        assert warm.generation(1)["failure"] is None
        after = warm.starts()
        assert (after[0] - before[0], after[1] - before[1]) == (2, 0)

    monkeypatch.setattr(ForkServerClient, "fork", forked)
    warm.run(scenario, "--nproc-per-node=2")
    assert asked[:2] == [2, 2]


def test_a_module_is_run_as_python_runs_it(warm: WarmAgent) -> None:
    put(warm.agent.folder, {"package/__init__.py": "", "package/train.py": HELLO})

    def scenario() -> None:
        warm.until_warm()
        before = warm.starts()
        warm.agent.start(1)
        warm.agent.until("completed")
        assert warm.starts()[0] == before[0] + 1

    warm.run(scenario, "--module", script="package.train")
    assert "name __main__ train.py" in warm.agent.printed()


@pytest.mark.parametrize(
    ("script", "state", "facts"),
    [
        pytest.param("raise SystemExit(7)", "faulted", {"exitcode": 7, "signal": None}, id="an exit code"),
        pytest.param("import os\nos.kill(os.getpid(), 9)", "faulted", {"signal": "SIGKILL"}, id="a signal"),
        pytest.param("raise KeyError('lr')", "faulted", {"exitcode": 1}, id="an exception"),
        pytest.param("raise SystemExit('no data')", "faulted", {"exitcode": 1}, id="a sentence"),
        pytest.param(
            "import atexit\natexit.register(print, 'bye', flush=True)\nraise SystemExit", "completed", {}, id="at exit"
        ),
    ],
)
def test_the_end_of_a_warm_worker_is_reported(warm: WarmAgent, script: str, state: str, facts: dict[str, Any]) -> None:
    def scenario() -> None:
        warm.until_warm()
        before = warm.starts()
        failure = warm.generation(1, state)["failure"] or {}
        assert {name: failure[name] for name in facts} == facts
        assert warm.starts()[0] == before[0] + 1

    warm.run(scenario, script=script)
    for words in ("KeyError: 'lr'", "no data", "bye"):
        assert (words in warm.agent.printed()) is (words.split(":")[0] in script)


def test_a_lost_server_is_replaced_and_workers_start_cold_meanwhile(
    warm: WarmAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay_s = 5.0  # enough for a start in between
    monkeypatch.setattr("elastipod_agent.fork_server.fork_server_manager.replacement_delay_s", lambda _: delay_s)

    def scenario() -> None:
        warm.until_warm(1)
        before = warm.starts()
        assert warm.generation(1)["status"] == "completed"
        warm.server().kill()
        until(lambda: warm.events("fork server is lost"), "the loss")
        assert "SIGKILL" in warm.events("fork server is lost")[0]
        assert warm.generation(2)["status"] == "completed"
        after = warm.starts()
        assert (after[0] - before[0], after[1] - before[1]) == (1, 1)
        (said,) = until(lambda: warm.events("workers start cold"), "the reason")
        assert "there is no fork server: it ended with signal SIGKILL" in said
        warm.until_warm(2)
        assert warm.generation(3)["status"] == "completed"
        assert warm.starts()[0] == after[0] + 1

    warm.run(scenario)


@pytest.mark.slow
def test_a_server_that_is_lost_again_and_again_is_given_up(warm: WarmAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = {1: 0.1, 2: 0.2}
    monkeypatch.setattr("elastipod_agent.fork_server.fork_server_manager.replacement_delay_s", delays.get)

    def scenario() -> None:
        for times in (1, 2, 3):
            warm.until_warm(times)
            warm.server().kill()
        until(lambda: warm.events("no more warm workers"), "the end of trying")
        assert len(warm.events("fork server is lost")) == 2
        before = warm.starts()
        assert warm.generation(1)["status"] == "completed"
        assert warm.starts() == (before[0], before[1] + 1)

    warm.run(scenario)


@pytest.mark.slow
def test_servers_that_are_lost_far_apart_are_replaced_each_time(
    warm: WarmAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastipod_agent.core.warm_start.LOSS_WINDOW_S", 0.0)  # any two losses are far apart

    def scenario() -> None:
        for times in (1, 2, 3):
            warm.until_warm(times)
            warm.server().kill()
        warm.until_warm(4)
        assert [line.rpartition("next_in_s=")[2] for line in warm.events("fork server is lost")] == ["1.0"] * 3
        assert not warm.events("no more warm workers")
        before = warm.starts()
        assert warm.generation(1)["status"] == "completed"
        assert warm.starts() == (before[0] + 1, before[1])

    warm.run(scenario)


def test_a_stopped_server_is_not_waited_for(warm: WarmAgent) -> None:
    def scenario() -> None:
        warm.until_warm(1)
        server = warm.server()
        server.suspend()
        until(lambda: server.status() == psutil.STATUS_STOPPED, "the stop")
        assert warm.generation(1)["status"] == "completed"
        (said,) = until(lambda: warm.events("workers start cold"), "the reason")
        assert "it is stopped by a signal" in said
        until(lambda: not server.is_running(), "the end of the stopped server")
        warm.until_warm(2)

    warm.run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
            "imported modules left 1 thread(s) running",
            id="a thread",
        ),
        pytest.param("import socket\npair = socket.socketpair()\n", "imported modules left socket:[", id="a socket"),
        pytest.param("1 / 0\n", "importing bad failed: ZeroDivisionError", id="a failed import"),
        pytest.param("import os\nos._exit(3)\n", "it ended with exit code 3", id="an exit"),
        pytest.param("import torch\ntorch.cuda.is_initialized = lambda: True\n", "initialized cuda", id="a device"),
    ],
)
def test_a_server_that_must_not_be_forked_is_not(warm: WarmAgent, text: str, why: str) -> None:
    put(warm.agent.folder, {"bad.py": text})

    def scenario() -> None:
        until(lambda: warm.events(why), f"{why!r} in {warm.agent.printed()}")
        before = warm.starts()
        assert warm.generation(1)["status"] == "completed"
        assert warm.starts() == (before[0], before[1] + 1)

    warm.run(scenario, "--preload=bad")


def test_a_missing_module_is_left_out_with_a_warning(warm: WarmAgent) -> None:
    def scenario() -> None:
        warm.until_warm()
        assert warm.generation(1)["status"] == "completed"

    warm.run(scenario, "--preload=nowhere_to_be_found")
    assert "nowhere_to_be_found is not preloaded" in warm.agent.printed()


def test_what_a_pre_train_script_installs_is_seen(warm: WarmAgent) -> None:
    module, install = warm.agent.folder / "recipe.py", warm.agent.folder / "install.sh"
    module.write_text("NAME = 'old'\n")
    install.write_text(f"[ $ELASTIPOD_GENERATION != 2 ] || echo \"NAME = 'renewed'\" > {module}\n")
    text = "import sys\nis_preloaded = 'recipe' in sys.modules\nimport recipe\nprint(recipe.NAME, is_preloaded)\n"

    def scenario() -> None:
        warm.until_warm()
        for number in (1, 2):
            assert warm.generation(number)["status"] == "completed"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        warm.run(scenario, "--preload=recipe", f"--pre-train-script={install}", script=text)
    assert re.findall(r"(\w+ (?:True|False))", warm.agent.printed()) == ["old True", "renewed True"]
    assert "recipe.py has changed" in warm.agent.printed()


def test_a_stop_ends_warm_workers(warm: WarmAgent) -> None:
    def scenario() -> None:
        warm.until_warm()
        warm.agent.start(1)
        warm.agent.until_printed("awake")
        (worker,) = [child for child in psutil.Process().children() if "train.py" in " ".join(child.cmdline())]
        assert os.getpgid(worker.pid) == worker.pid, "a signal reaches all that it has started"
        warm.agent.stop(1)
        assert warm.agent.until("ready")["drained"] is False
        until(lambda: not worker.is_running(), "the end of the worker")

    warm.run(scenario, script=WAIT)


def test_a_program_that_is_not_python_starts_cold(warm: WarmAgent) -> None:
    """Even if its options look like those of an interpreter."""
    assert warm.agent.run("", lambda: None, "--no-python", script_args=("-u", "x.py"), is_warm=True) in (0, 143)
    assert "the workers do not run a Python program" in warm.events("workers start cold")[0]
