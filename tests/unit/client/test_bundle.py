"""`elastipod bundle`: everything that explains a job, and nothing secret."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli
from elastipod_client.bundling import lines_about, redacted_log, redacted_object, redacted_text, values_of_variables

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
SECRET = "correct-horse-battery"


def container(**more: Any) -> dict[str, Any]:
    return {
        "name": "train",
        "env": [{"name": "HARMLESS", "value": SECRET}, {"name": "B", "valueFrom": {"x": "y"}}],
        **more,
    }


def test_values_of_variables_go_and_their_names_stay() -> None:
    (found,) = redacted_object({"spec": {"containers": [container()]}})["spec"]["containers"]
    assert found["env"] == [{"name": "HARMLESS", "value": "REDACTED"}, {"name": "B", "valueFrom": {"x": "y"}}]


def test_copies_of_the_manifest_go() -> None:
    notes = {"kubectl.kubernetes.io/last-applied-configuration": SECRET, "elastipod.io/size": "2/2/4"}
    meta = redacted_object({"metadata": {"annotations": notes, "managedFields": [1]}})["metadata"]
    assert meta == {"annotations": {**notes, "kubectl.kubernetes.io/last-applied-configuration": "REDACTED"}}


@pytest.mark.parametrize(
    "field",
    [
        pytest.param({"password": SECRET}, id="a key that says so"),
        pytest.param({"args": ["--wandb-api-key", SECRET]}, id="behind its option"),
        pytest.param({"command": [f"train --token={SECRET} --lr=1"]}, id="in a command line"),
        pytest.param({"message": f"Authorization: Bearer {SECRET}"}, id="a bearer token"),
        pytest.param({"message": f"cannot reach https://user:{SECRET}@host/x"}, id="in an address"),
        pytest.param({"initContainers": [container()]}, id="a variable"),
    ],
)
def test_what_looks_secret_goes(field: dict[str, Any]) -> None:
    text = json.dumps(redacted_object({"spec": field}))
    assert SECRET not in text
    assert "REDACTED" in text


@pytest.mark.parametrize(
    "text",
    [
        "tokens=8192", "tokens_per_second: 1234.5, loss 3", "ValueError: boom", "http://host:8080/status",
        "serviceAccountName: elastipod", "imagePullSecrets",
    ],
)  # fmt: skip
def test_what_explains_stays(text: str) -> None:
    assert redacted_text(text) == text


def test_names_of_secrets_stay() -> None:
    spec = {"volumes": [{"secret": {"secretName": "data"}}], "imagePullSecrets": [{"name": "pull"}]}
    assert redacted_object({"spec": spec})["spec"] == spec


def test_a_log_loses_values_of_variables() -> None:
    values = values_of_variables([{"spec": {"containers": [container()]}}])
    assert redacted_log(f"connecting with {SECRET}\nstep 1", values) == "connecting with REDACTED\nstep 1"
    assert values_of_variables([{"spec": {"containers": [{"env": [{"name": "N", "value": "1"}]}]}}]) == set()


def test_lines_of_the_operator_about_this_job_only() -> None:
    log = '{"job": "team/llm"}\n{"job": "team/llm-2"}\n{"job": "other/llm"}\nPOST /namespaces/team/pods/llm 409'
    assert lines_about(log, "team/llm", 10).splitlines() == [
        '{"job": "team/llm"}',
        "POST /namespaces/team/pods/llm 409",
    ]
    assert lines_about("team/llm 1\nteam/llm 2", "team/llm", 1) == "team/llm 2"


def answers() -> dict[str, object]:
    state = {"type": "Running", "status": "True", "reason": "Training", "message": "trains"}
    meta = {"name": "llm", "namespace": "team", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    template = {"spec": {"containers": [container()]}}
    pod = {"metadata": {"name": "llm-a-0", "ownerReferences": [{"uid": "u"}]}, "spec": template["spec"], "status": {}}
    leader = {"metadata": {"name": "op-1", "namespace": "ops"}, "spec": {"containers": [{"name": "operator"}]}}
    return {
        f"get {JOBS} llm": {
            "metadata": meta,
            "spec": {"replicaSpecs": [{"template": template}]},
            "status": {"conditions": [state]},
        },
        "get pods --selector=HPJob=llm": {"items": [pod]},
        "get events": {"items": [{"reason": "Running", "message": f"token: {SECRET}"}]},
        "logs llm-a-0": f"step 1 {SECRET}",
        "get pods --all-namespaces --selector=hp-training-control-plane": {"items": [leader]},
        "logs op-1": f'{{"job": "team/llm", "message": "{SECRET}"}}\nother/job',
    }


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            entry.name: file.read().decode()
            for entry in archive.getmembers()
            if (file := archive.extractfile(entry)) is not None
        }


def test_the_archive_has_everything_and_no_secret(
    kubectl: FakeKubectl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.answer(answers())
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 0
    files = unpacked(path)
    names = ("events.json", "job.json", "logs/llm-a-0.log", "operator.log", "pods.json", "timeline.json", "why.txt")
    assert sorted(files) == [f"llm-bundle/{name}" for name in names]
    assert not [name for name, text in files.items() if SECRET in text]
    assert files["llm-bundle/operator.log"] == '{"job": "team/llm", "message": "REDACTED"}'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "Look through it before you send it." in capsys.readouterr().out


def test_logs_may_have_bytes_that_are_not_utf_8(kubectl: FakeKubectl, tmp_path: Path) -> None:
    kubectl.answer({**answers(), "logs llm-a-0": "caf\udce9"})
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 0
    assert unpacked(path)["llm-bundle/logs/llm-a-0.log"] == "caf\N{REPLACEMENT CHARACTER}\n"


def test_what_may_not_be_read_is_said(kubectl: FakeKubectl, tmp_path: Path) -> None:
    forbidden = "Error from server (Forbidden): pods is forbidden"
    kubectl.answer({**answers(), "logs llm-a-0": forbidden, "get pods --all-namespaces": forbidden,
                    "get pods --all-namespaces --selector=hp-training-control-plane": forbidden})  # fmt: skip
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 0
    assert unpacked(path)["llm-bundle/unread.txt"].splitlines() == [
        "log of pod llm-a-0: (Forbidden): pods is forbidden",
        "log of the operator: (Forbidden): pods is forbidden",
    ]


def test_an_existing_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_text("mine")
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "exists; remove it, or name another with --file" in capsys.readouterr().err


def test_logs_can_be_left_out(kubectl: FakeKubectl, tmp_path: Path) -> None:
    kubectl.answer(answers())
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--no-logs", "--file", str(path)]) == 0
    assert not [name for name in unpacked(path) if name.endswith("llm-a-0.log")]
