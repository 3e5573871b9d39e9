"""The life of the fork server: stopped, given up, outdated. `unit/agent/test_agent_warm_workers.py` has more."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import PACKAGES, AgentProcess, suspend, until_gone
from tests.e2e.warm_start_run import WarmStartRun, make_bare_python, run_warm

HELLO = "import os\nprint('generation', os.environ['ELASTIPOD_GENERATION'], flush=True)\n"
WAIT = "import time\nprint('awake', flush=True)\ntime.sleep(600)\n"
# A child without an exec, in a session of its own, whose parent is gone: only what it inherited tells whose it is.
ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("orphan", os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the standard library only."""
    return make_bare_python(tmp_path_factory.mktemp("bare"))


def script(folder: Path, text: str = HELLO) -> str:
    (folder / "train.py").write_text(text, "utf-8")
    return "train.py"


@pytest.mark.slow
def test_a_stopped_server_is_not_waited_for(tmp_path: Path, python: Path) -> None:
    with run_warm(tmp_path, script(tmp_path), python=python) as run:
        run.until_warm(1)
        server = run.server()
        suspend(server)
        assert run.generation(1)["status"] == "completed"
        assert "it is stopped by a signal" in run.events("workers start cold")[0]
        assert run.starts() == (0, 1)
        until(lambda: not server.is_running(), "the end of the stopped server")
        run.until_warm(2)
        assert run.generation(2)["status"] == "completed"
        assert run.starts() == (1, 1)


@pytest.mark.slow
def test_a_server_that_is_lost_again_and_again_is_given_up(tmp_path: Path, python: Path) -> None:
    with run_warm(tmp_path, script(tmp_path), python=python) as run:
        for times in (1, 2, 3):
            run.until_warm(times)
            run.server().kill()
        until(lambda: run.events("no more warm workers"), "the end of trying")
        assert len(run.events("fork server is lost")) == 2
        assert run.generation(1)["status"] == "completed"
        assert run.starts() == (0, 1)
        assert run.events("INFO workers start cold") == [], "that was said, once"


def test_what_a_pre_train_script_installs_is_seen(tmp_path: Path, python: Path) -> None:
    """The second generation must not run with the module that the server has imported before."""
    module = tmp_path / "packages" / "recipe.py"
    module.parent.mkdir()
    module.write_text("NAME = 'old'\n", "utf-8")
    install = tmp_path / "install.sh"
    install.write_text(f"[ $ELASTIPOD_GENERATION != 2 ] || echo \"NAME = 'renewed'\" > {module}\n", "utf-8")
    text = "import sys\nis_preloaded = 'recipe' in sys.modules\nimport recipe\nprint(recipe.NAME, is_preloaded)\n"
    arguments = ["--preload=recipe", f"--pre-train-script={install}", script(tmp_path, text)]
    path = f"{PACKAGES}{os.pathsep}{module.parent}"
    with run_warm(tmp_path, *arguments, python=python, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1") as run:
        run.until_warm()
        for generation in (1, 2, 3):
            assert run.generation(generation)["status"] == "completed"
        assert run.lines() == ["[default0]:old True", "[default0]:renewed True", "[default0]:renewed True"]
        assert run.starts() == (3, 0)
        (said,) = run.events("fork server is restarted")
        assert "recipe.py has changed" in said


@pytest.mark.parametrize(
    ("arguments", "env", "why"),
    [
        pytest.param(["--no-python", "/bin/echo"], {}, "the workers do not run a Python program", id="no interpreter"),
        pytest.param([], {"PYTHONPROFILEIMPORTTIME": "1"}, "PYTHONPROFILEIMPORTTIME is set", id="a profile of imports"),
    ],
)
def test_some_workers_always_start_with_an_exec(
    arguments: list[str], env: dict[str, Any], why: str, tmp_path: Path, python: Path
) -> None:
    with run_warm(tmp_path, *arguments, script(tmp_path), python=python, **env) as run:
        assert run.generation(1)["status"] == "completed"
        assert why in run.events("workers start cold")[0]
        assert run.starts() == (0, 1)


def test_a_stop_does_not_wait_for_the_server(tmp_path: Path, python: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n", "utf-8")
    with run_warm(tmp_path, "--preload=slow", script(tmp_path), python=python) as run:
        run.agent.start(1)
        run.agent.stop(1)
        assert run.agent.until("ready")["drained"] is False
        assert run.starts() == (0, 0)


def test_nothing_outlives_an_agent_that_is_killed(tmp_path: Path, python: Path) -> None:
    arguments = ["--nproc-per-node=2", script(tmp_path, WAIT)]
    agent = AgentProcess(tmp_path, arguments, env={"PYTHON_EXEC": str(python)}, is_warm=True)
    run = WarmStartRun(agent, tmp_path, True)
    until(agent.answers, "the agent")
    run.until_warm()
    agent.start(1)
    agent.until_printed("awake", 2)
    family = until(lambda: len(found := run.below()) >= 3 and found, "server and workers")
    agent.process.kill()
    agent.process.wait()
    until_gone(family)


def test_an_orphan_that_never_ran_another_program_ends_with_its_worker(tmp_path: Path, python: Path) -> None:
    with run_warm(tmp_path, script(tmp_path, ORPHAN), python=python) as run:
        run.until_warm()
        run.agent.start(1)
        run.agent.until_printed("orphan")
        orphan = psutil.Process(int(run.lines()[0].split()[-1]))
        server = run.server()
        run.agent.stop(1)
        run.agent.until("ready")
        until_gone([orphan])
        assert server.is_running(), "it is no worker"


@pytest.mark.slow
def test_twenty_generations_leave_nothing_open(tmp_path: Path, python: Path) -> None:
    with run_warm(tmp_path, "--nproc-per-node=2", script(tmp_path), python=python) as run:
        run.until_warm()
        run.generation(1)
        run.generation(2)  # by now nothing is there that was forked ahead
        agent, server = psutil.Process(run.agent.process.pid), run.server()
        before = agent.num_fds() + server.num_fds()
        for number in range(3, 21):
            run.generation(number)
        assert run.starts() == (40, 0), run.agent.printed()
        # The test's own last call may not have been closed yet; then or now.
        until(lambda: agent.num_fds() + server.num_fds() <= before, f"at most {before} open descriptors")
        # No process waits or is left, not even a dead one.
        until(lambda: run.below() == [server], "the end of all others")


def test_a_killed_process_that_was_forked_ahead_does_no_harm(tmp_path: Path, python: Path) -> None:
    with run_warm(tmp_path, "--nproc-per-node=2", script(tmp_path), python=python) as run:
        run.until_warm()
        agent = psutil.Process(run.agent.process.pid)
        ahead = until(lambda: len(found := agent.children()) == 3 and found, "two processes forked ahead")
        server = run.server()
        next(process for process in ahead if process != server).send_signal(signal.SIGKILL)
        until(lambda: len(agent.children()) == 2, "its end")
        assert run.generation(1)["status"] == "completed"
        assert run.starts() == (2, 0)
