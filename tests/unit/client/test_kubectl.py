"""What the commands make of kubectl's answers, and of its silence."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli
from elastipod_client.kubectl import Kubectl, KubectlError

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
INVALID = 'The HyperPodPyTorchJob "llm" is invalid: '
NOT_CHECKED = (
    '* <nil>: Invalid value: "null": some validation rules were not checked because the object was invalid; correct the existing '
    "errors to complete validation"
)


def refusal(kubectl: FakeKubectl, said: str) -> str:
    kubectl.answer({"get": f"refused:{said}"})
    with pytest.raises(KubectlError) as raised:
        Kubectl().get("pods", "a")
    return str(raised.value)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        pytest.param(
            f"{INVALID}\n* spec.replicas: must be at least 2\n* spec.nprocPerNode: must be positive\n{NOT_CHECKED}\n",
            f"{INVALID}spec.replicas: must be at least 2; spec.nprocPerNode: must be positive",
            id="a list of errors",
        ),
        pytest.param(
            "E1127 08:00:00.0 1 memcache.go:265] no\nWarning: old\nUnable to connect to the server: x509\n",
            "Unable to connect to the server: x509",
            id="the log of kubectl",
        ),
        pytest.param("Error from server: Internal error\n", "Error from server: Internal error", id="one line"),
        pytest.param("Invalid value: 3", "Invalid value: 3", id="a line that begins as one of a log"),
        pytest.param("E1127 08:00:00.0 1 a.go:2] no\n", "E1127 08:00:00.0 1 a.go:2] no", id="nothing but the log"),
        pytest.param(
            "", "kubectl failed with exit code 1 and said nothing; try the same call with kubectl -v=6", id="nothing"
        ),
    ],
)
def test_every_reason_of_a_refusal_is_told(kubectl: FakeKubectl, said: str, told: str) -> None:
    assert refusal(kubectl, said) == told


def test_pages_of_a_login_plugin_are_cut_in_the_middle(kubectl: FakeKubectl) -> None:
    said = refusal(kubectl, "\n".join(["first", *["x" * 60] * 100, "last"]))
    assert len(said) < 1600
    assert (said[:5], said[-4:]) == ("first", "last")


def test_a_refused_change_has_the_exit_code_3(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"metadata": {"name": "llm", "namespace": "team"}}
    kubectl.answer({f"get {JOBS} llm": job, "patch": f"refused:{INVALID}\n* spec.replicas: too few\n{NOT_CHECKED}\n"})
    assert cli.main(["scale", "llm", "--replicas=1"]) == 3
    assert capsys.readouterr().err == f"elastipod scale: {INVALID}spec.replicas: too few\n"


LOGIN = """#!/bin/sh
printf 'To sign in, enter the code ABC: ' >&2
[ -n "$SLOW" ] && sleep 0.4
echo 'error: you did not' >&2
exit 1
"""
ASKS = (
    "import elastipod_client.child as child\n"
    "child.SILENT_S = 0.2\n"
    "from elastipod_client import why\n"
    "raise SystemExit(why.main(['llm']))"
)


@pytest.mark.parametrize("is_slow", [True, False])
def test_what_a_login_plugin_asks_is_shown_while_kubectl_waits(tmp_path: Path, is_slow: bool) -> None:
    """On a terminal only, and not if kubectl has ended at once: then it is told as one sentence."""
    program = tmp_path / "kubectl"
    program.write_text(LOGIN)
    program.chmod(0o755)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLOW": "1" if is_slow else ""}
    with subprocess.Popen(
        [sys.executable, "-c", ASKS], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as running:
        os.close(theirs)
        assert running.wait(20) == 3
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert shown.startswith("To sign in, enter the code ABC: ") is is_slow
    assert "elastipod why: To sign in, enter the code ABC: error: you did not" in shown


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("elastipod_client.kubectl.CALL_LIMIT_S", 0.2)
    with pytest.raises(KubectlError, match=r"^kubectl has not answered for 0 s$"):
        Kubectl().get("pods", "a")
