"""`elastipod suspend`, `resume`, `scale` and `logs`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli
from elastipod_client.failure_log import excerpt

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"


def job(state: str = "Running", status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    condition = {"type": state, "status": "True", "reason": state, "message": "rank 3 exited with code 1: “KeyError”"}
    meta = {"name": "llm", "namespace": "team"}
    return {"metadata": meta, "spec": spec, "status": {"conditions": [condition], **(status or {})}}


def patches(kubectl: FakeKubectl) -> list[str]:
    return [call[call.index("-p") + 1] for call in kubectl.calls() if call[0] == "patch"]


@pytest.mark.parametrize(
    ("command", "found", "status", "patch", "text"),
    [
        (["suspend"], job(), 0, '{"spec": {"runPolicy": {"suspend": true}}}', "save a checkpoint and stop"),
        (["suspend"], job(runPolicy={"suspend": True}), 0, None, "is suspended already; nothing was changed"),
        (
            ["resume"],
            job(runPolicy={"suspend": True}),
            0,
            '{"spec": {"runPolicy": {"suspend": false}}}',
            "trains again",
        ),
        (["resume"], job(), 0, None, "is resumed already"),
        (["suspend"], job("Completed"), 1, None, "job llm has ended (Completed); nothing was changed"),
        (["scale", "--replicas=4"], job(), 0, '{"spec": {"replicas": 4}}', "the ceiling was none and is 4"),
        (["scale", "--replicas=0"], job(replicas=4), 0, '{"spec": {"replicas": 0}}', "the ceiling was 4 and is none"),
        (["scale", "--replicas=0"], job("Failed"), 1, None, "has ended (Failed)"),
    ],
)
def test_changes(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str],
    command: list[str], found: dict[str, Any], status: int, patch: str | None, text: str,
) -> None:  # fmt: skip
    kubectl.answer({f"get {JOBS} llm": found, f"patch {JOBS} llm --type=merge": "patched"})
    assert cli.main([*command, "llm"]) == status
    assert text in capsys.readouterr().out
    assert patches(kubectl) == ([patch] if patch is not None else [])


def test_what_the_api_server_refuses_is_quoted(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = "The HyperPodPyTorchJob is invalid: spec.replicas is 1; raise it to elasticPolicy.minReplicas"
    kubectl.answer({f"get {JOBS} llm": job(), f"patch {JOBS} llm": f"error: {refusal}"})
    assert cli.main(["scale", "llm", "--replicas=1"]) == 3
    assert capsys.readouterr().err == f"elastipod scale: {refusal}\n"


def test_a_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["scale", "llm", "--replicas=many"])
    assert "'many' is no number of replicas; it must be 0 or more" in capsys.readouterr().err


LOG = """\
starting
[default0]:step 1
[default1]:Traceback (most recent call last):
[default1]:  File "old.py", line 1, in <module>
[default1]:OSError: an earlier failure
starting again
[default0]:Traceback (most recent call last):
[default1]:Traceback (most recent call last):
[default0]:  File "train.py", line 3, in <module>
[default1]:  File "train.py", line 7, in <module>
[default0]:RuntimeError: a peer is gone
[default1]:KeyError: 'x'"""


@pytest.mark.parametrize(
    ("rank", "last"), [(0, "RuntimeError: a peer is gone"), (1, "KeyError: 'x'"), (None, "KeyError: 'x'")]
)
def test_the_newest_traceback_of_the_rank_is_shown(rank: int | None, last: str) -> None:
    shown = excerpt(LOG, rank)
    assert len(shown) == 3
    assert shown[0].endswith("Traceback (most recent call last):")
    assert shown[-1].endswith(last)


def test_without_a_traceback_the_end_is_shown() -> None:
    assert excerpt("\n".join(f"line {n}" for n in range(100)))[-1] == "line 99"
    assert len(excerpt("\n".join(f"line {n}" for n in range(100)))) == 40


FAULTY = {"latestFaultyPodInstanceList": {"faultyPodList": ["llm-a-1"], "faultyRankList": ["1"]}}


def pod(name: str, restarts: int = 0) -> dict[str, Any]:
    status = {"name": "train", "restartCount": restarts}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "train"}]},
        "status": {"containerStatuses": [status]},
    }


@pytest.mark.parametrize("restarts", [0, 2])
def test_the_first_failure_is_that_of_the_faulty_pod(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], restarts: int
) -> None:
    found = job("Failed", FAULTY, nprocPerNode="2")
    pods = {"items": [pod("llm-a-0"), pod("llm-a-1", restarts)]}
    kubectl.answer({f"get {JOBS} llm": found, "get pods": pods, "logs llm-a-1 -c train": LOG})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rank 3 exited with code 1: “KeyError”\n\npod llm-a-1:\n")
    assert out.endswith("[default1]:KeyError: 'x'\n")
    assert ("--previous" in kubectl.calls()[-1]) is (restarts > 0)


def test_the_log_is_that_of_the_container_that_the_pod_was_made_with(kubectl: FakeKubectl) -> None:
    """The job may name another one by now."""
    one = pod("llm-a-1")
    env = [{"name": f"ELASTIPOD_{name}", "value": "x"} for name in ("JOB", "RUN_ID", "POD", "AGENT_PORT")]
    one["spec"]["containers"] = [{"name": "side"}, {"name": "train", "env": env}]
    found = job("Failed", FAULTY, elastipod={"container": "side"})
    kubectl.answer({f"get {JOBS} llm": found, "get pods": {"items": [one]}, "logs llm-a-1 -c train": LOG})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1


def test_a_log_with_bytes_that_are_not_utf_8_is_shown(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    found = {f"get {JOBS} llm": job("Failed", FAULTY), "get pods": {"items": [pod("llm-a-1")]}}
    kubectl.answer({**found, "logs llm-a-1 -c train": f"caf\udce9\n{LOG}: b'\udcff'"})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    assert capsys.readouterr().out.endswith("[default1]:KeyError: 'x': b'\N{REPLACEMENT CHARACTER}'\n")


def test_a_pod_that_is_gone(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({f"get {JOBS} llm": job("Failed", FAULTY), "get pods": {"items": [pod("llm-a-0")]}})
    assert cli.main(["logs", "llm", "--first-failure"]) == 1
    assert "pod llm-a-1 is gone, and its log with it; your log collection may have it" in capsys.readouterr().out


def test_a_job_without_a_fault(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({f"get {JOBS} llm": job(), "get pods": {"items": [pod("llm-a-0")]}})
    assert cli.main(["logs", "llm", "--first-failure"]) == 0
    assert capsys.readouterr().out == "job llm has had no fault\n"


def test_the_logs_of_all_pods(kubectl: FakeKubectl, capfd: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({f"get {JOBS} llm": job(), "logs --selector=HPJob=llm --prefix --tail=5": "[pod/a] hello"})
    assert cli.main(["logs", "llm", "--tail=5", "-n", "team"]) == 0
    assert capfd.readouterr().out == "[pod/a] hello\n"
    assert "--namespace=team" in kubectl.calls()[-1]


def test_following_logs_ends_quietly_when_nobody_reads_them(kubectl: FakeKubectl) -> None:
    kubectl.answer({f"get {JOBS} llm": job(), "logs --selector": "\n".join(["[pod/a] hello"] * 100_000)})
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
