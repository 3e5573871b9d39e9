"""Programs that the local cluster's tool runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agent_client import until

from elastipod_local import host
from elastipod_local.cluster import Cluster
from elastipod_local.errors import CommandError, LocalClusterError
from elastipod_local.host import (
    STOP_SIGNALS,
    run,
    run_logged,
    signals_ignored,
    stop_signals_raise,
    tool_environment,
    without_proxy,
)
from elastipod_local.processes import ProcessId

PACKAGES = str(Path(sys.modules[run.__module__].__file__ or "").parents[1])
TOOL = """
import sys
from elastipod_local.host import run
run(["sh", "-c", "echo $$ > $0.new; mv $0.new $0; exec sleep 600", sys.argv[1]])
"""


def test_what_a_killed_tool_was_running_does_not_outlive_it(tmp_path: Path) -> None:
    """A copy of images that went on would write into a folder that `down` deletes."""
    note = tmp_path / "pid"
    tool = subprocess.Popen([sys.executable, "-c", TOOL, str(note)], env={**os.environ, "PYTHONPATH": PACKAGES})
    try:
        until(note.exists, "the program to run")
        program = ProcessId.of(int(note.read_text()))
        assert program is not None
    finally:
        tool.send_signal(signal.SIGKILL)
        tool.wait()
    until(lambda: not program.is_alive(), "the program to end")


def test_a_program_that_is_missing_is_named() -> None:
    with pytest.raises(LocalClusterError, match="the program no-such-program was not found; is it installed"):
        run(["no-such-program", "--help"])


def test_a_program_that_takes_too_long_is_told_with_its_log(tmp_path: Path) -> None:
    with (
        (tmp_path / "apt.log").open("wb") as log,
        pytest.raises(
            LocalClusterError, match=r"`apt-get update` did not end within 0.3 s: 12 % of the mirror; log: .*apt.log"
        ),
    ):
        run_logged(["sh", "-c", "echo 12 % of the mirror; exec sleep 60"], log, what="`apt-get update`", timeout_s=0.3)


def test_a_program_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(CommandError, match="ended with exit code 3: so it is"):
        run(["sh", "-c", "echo so it is >&2; exit 3"])


OURS = "localhost,127.0.0.1,127.0.0.0/8,198.18.0.0/15,.svc,.cluster.local"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, OURS, id="nothing is given"),
        pytest.param(
            {"NO_PROXY": "corp.example, 10.0.0.0/8"}, f"corp.example,10.0.0.0/8,{OURS}", id="what is given stays"
        ),
        pytest.param({"no_proxy": "a", "NO_PROXY": "b,a"}, f"b,a,{OURS}", id="both spellings count"),
        pytest.param({"no_proxy": OURS}, OURS, id="nothing is said twice"),
        pytest.param({"NO_PROXY": "*"}, "*", id="everything is direct already"),
    ],
)
def test_a_cluster_is_reached_past_any_proxy(given: dict[str, str], expected: str) -> None:
    assert without_proxy(given) == {"NO_PROXY": expected, "no_proxy": expected}


def test_every_program_of_a_cluster_reaches_it_past_the_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """kubectl, helm, the controller manager, the scheduler, kubelet and kube-proxy all go by HTTPS_PROXY."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "corp.example")
    monkeypatch.delenv("no_proxy", raising=False)
    for environment in (tool_environment(), tool_environment({"no_proxy": ""}), Cluster("a", tmp_path).environment()):
        assert environment["NO_PROXY"] == environment["no_proxy"] == f"corp.example,{OURS}"


class Interruption(BaseException):
    """What a stop signal raises here."""


@pytest.mark.usefixtures("without_nohup")
@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_the_first_stop_signal_interrupts_and_no_other_disturbs_the_clean_up(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_leave_terminal", lambda: None)  # which is that of the tests here
    before = [signal.getsignal(one) for one in STOP_SIGNALS]
    with stop_signals_raise(Interruption):
        with pytest.raises(Interruption):
            signal.raise_signal(signum)
        for other in STOP_SIGNALS:
            signal.raise_signal(other)
    assert [signal.getsignal(one) for one in STOP_SIGNALS] == before


def test_a_hang_up_that_nohup_keeps_out_stays_out() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals_raise(Interruption):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_stop_signal_disturbs_what_ignores_them() -> None:
    with signals_ignored():
        for signum in STOP_SIGNALS:
            signal.raise_signal(signum)


ON_A_TERMINAL = """
import sys
from elastipod_local.host import say, stop_signals_raise
try:
    with stop_signals_raise(KeyboardInterrupt):
        say("ready")
        while True:
            say("still here")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    open(sys.argv[1], "w").close()
"""


@pytest.mark.usefixtures("without_nohup")
def test_a_terminal_that_hangs_up_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    """Each line that it prints from then on would be refused."""
    cleaned_up = tmp_path / "cleaned-up"
    controller, terminal = os.openpty()
    tool = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-c", ON_A_TERMINAL, str(cleaned_up)],
        env={**os.environ, "PYTHONPATH": PACKAGES},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        assert os.read(controller, 5) == b"ready"
        os.close(controller)
        assert tool.wait(60) == 0
    finally:
        tool.kill()
        tool.wait()
    assert cleaned_up.exists()
