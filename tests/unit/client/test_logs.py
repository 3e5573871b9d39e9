"""`elastipod logs`: the logs of a job's pods."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli
from elastipod_client.log_reading import without_errors

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
AGENTS = [{"name": f"ELASTIPOD_{name}", "value": "x"} for name in ("JOB", "RUN_ID", "POD", "AGENT_PORT")]


def pod(name: str, *containers: str) -> dict[str, Any]:
    """Give a pod whose last container runs the agent."""
    *others, agents = containers or ("train",)
    listed = [*({"name": one} for one in others), {"name": agents, "env": AGENTS}]
    return {"metadata": {"name": name}, "spec": {"containers": listed}}


def answers(*names: str, pods: list[dict[str, Any]] | None = None) -> dict[str, object]:
    listed = pods if pods is not None else [pod(name) for name in names]
    return {f"get {JOBS} llm": {"metadata": {"name": "llm"}}, "get pods --selector=HPJob=llm": {"items": listed}}


WAITS = 'container "train" in pod "b" is waiting to start: ContainerCreating'


def test_a_log_that_cannot_be_read_is_said_and_the_others_are_printed(
    kubectl: FakeKubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    kubectl.answer({**answers("a", "b", "c"), "logs": f"[pod/a] hello\nerror: {WAITS}\n[pod/c] bye"})
    assert cli.main(["logs", "llm"]) == 1
    assert "--ignore-errors" in kubectl.calls()[-1]
    out, err = capfd.readouterr()
    assert (out, err) == ("[pod/a] hello\n[pod/c] bye\n", f"elastipod logs: error: {WAITS}\n")


def test_kubectl_that_fails_fails_the_command(kubectl: FakeKubectl, capfd: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({**answers("a"), "logs": "Error from server (Forbidden): no"})
    assert cli.main(["logs", "llm"]) == 3
    assert "(Forbidden): no" in capfd.readouterr().err


def test_following_reads_the_logs_of_many_pods(kubectl: FakeKubectl, capfd: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({**answers(*(f"p{n}" for n in range(512))), "logs": "[pod/p0] hello"})
    assert cli.main(["logs", "llm", "-f"]) == 0
    assert {"--follow", "--max-log-requests=512"} <= set(kubectl.calls()[-1])
    kubectl.answer(answers(*(f"p{n}" for n in range(513))))
    assert cli.main(["logs", "llm", "-f"]) == 2
    assert "job llm has 513 logs, and --follow reads at most 512 at once" in capfd.readouterr().err


def test_the_agents_log_is_printed_though_a_sidecar_comes_first(kubectl: FakeKubectl) -> None:
    kubectl.answer({**answers(pods=[pod("a", "proxy", "train"), pod("b", "train")]), "logs": "[pod/a] hello"})
    assert cli.main(["logs", "llm"]) == 0
    call = kubectl.calls()[-1]
    assert call[call.index("--container") + 1] == "train"


def test_all_logs_are_printed_where_the_agents_containers_have_different_names(kubectl: FakeKubectl) -> None:
    """kubectl takes one name for all pods, and refuses it if a pod has no such container."""
    kubectl.answer({**answers(pods=[pod("a", "old"), pod("b", "proxy", "new")]), "logs": "[pod/a] hello"})
    assert cli.main(["logs", "llm"]) == 0
    assert "--all-containers" in kubectl.calls()[-1]
    assert "--container" not in kubectl.calls()[-1]


def test_a_job_without_pods_has_no_logs(kubectl: FakeKubectl, capfd: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(answers())
    assert cli.main(["logs", "llm"]) == 0
    assert capfd.readouterr().err == "job llm has no pods; see: elastipod why llm\n"


def test_the_logs_of_all_pods(kubectl: FakeKubectl, capfd: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({**answers("a"), "logs --selector=HPJob=llm --prefix --tail=5": "[pod/a] hello"})
    assert cli.main(["logs", "llm", "--tail=5", "-n", "team"]) == 0
    assert capfd.readouterr().out == "[pod/a] hello\n"
    assert "--namespace=team" in kubectl.calls()[-1]


def test_following_logs_ends_quietly_when_nobody_reads_them(kubectl: FakeKubectl) -> None:
    kubectl.answer({**answers("a"), "logs --selector": "\n".join(["[pod/a] hello"] * 100_000)})
    command = [sys.executable, "-m", "elastipod.cli", "logs", "llm"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == "[pod/a] hello\n"
        running.stdout.close()
        assert (running.wait(20), running.stderr.read()) == (0, "")


def test_follow_and_the_first_failure_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", "llm", "-f", "--first-failure"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_words_of_a_worker_are_not_taken_for_those_of_kubectl() -> None:
    printed = f"[pod/a] 10 %\rerror: not kubectl's\n[pod/b] x\x85y\nerror: {WAITS}\n"
    kept, errors = without_errors(printed)
    assert (kept, errors) == ("[pod/a] 10 %\rerror: not kubectl's\n[pod/b] x\x85y\n", [WAITS])
    assert without_errors("") == ("", [])
