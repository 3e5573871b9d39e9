"""`elastipod bundle`: everything that explains a job, and nothing secret."""

from __future__ import annotations

import json
import stat
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl
from tests.unit.core.builders import pid, trains

from elastipod import cli
from elastipod_client.bundle import write
from elastipod_client.bundling import lines_about, redacted_log, redacted_object, values_of_variables
from elastipod_operator.core.names import ANNOTATION_STATE
from elastipod_operator.core.record_codec import PACKED, encode
from elastipod_operator.core.record_codec import unpacked as unpacked_record
from elastipod_operator.kube.applied import encode_applied

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


def test_the_copy_of_the_spec_that_the_operator_keeps_can_be_read_and_holds_no_secret() -> None:
    """It is compressed, so no pattern finds a secret in it; whoever gets the archive unpacks it with two lines of Python."""
    spec = {
        "nprocPerNode": "1",
        "replicaSpecs": [
            {"name": "worker", "template": {"spec": {"containers": [container(args=["--hf-token", f"{SECRET}-2"])]}}}
        ],
    }
    notes = {"elastipod.io/applied": encode_applied(spec), "elastipod.io/size": "2/2/4"}
    kept = redacted_object({"metadata": {"annotations": notes}})["metadata"]["annotations"]
    found = json.loads(kept["elastipod.io/applied"])
    (train,) = found["templates"]["worker"]["spec"]["containers"]
    assert (train["name"], train["args"]) == ("train", ["--hf-token", "REDACTED"])
    assert SECRET not in json.dumps(kept)
    assert kept["elastipod.io/size"] == "2/2/4"


def test_a_record_that_is_packed_can_be_read_and_holds_no_secret() -> None:
    """The operator packs the records of large jobs, and quotes what a worker printed."""
    members = tuple(pid(n, n * 7 % 5) for n in range(1000))
    record = replace(trains(1000, members=members), outcome_message=f"HTTPError: 401 for https://u:{SECRET}@hub/x")
    state = encode(record)
    assert state.startswith(PACKED)
    notes = redacted_object({"metadata": {"annotations": {ANNOTATION_STATE: state}}})["metadata"]["annotations"]
    kept = json.loads(notes[ANNOTATION_STATE])
    assert kept["v"] == json.loads(unpacked_record(state))["v"]
    assert "HTTPError: 401 for https://" in json.dumps(kept)
    assert SECRET not in json.dumps(kept)
    broken = redacted_object({"metadata": {"annotations": {ANNOTATION_STATE: f"{PACKED}no"}}})
    assert broken["metadata"]["annotations"] == {ANNOTATION_STATE: "REDACTED"}


def test_a_copy_of_the_spec_that_cannot_be_read_goes() -> None:
    meta = redacted_object({"metadata": {"annotations": {"elastipod.io/applied": "eJzdamaged"}}})["metadata"]
    assert meta == {"annotations": {"elastipod.io/applied": "REDACTED"}}


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
    "found",
    [
        pytest.param({"httpHeaders": [{"name": "X-Api-Key", "value": SECRET}]}, id="a header of a probe"),
        pytest.param({"command": ["bash", "-c", f"train --wandb-api-key {SECRET}"]}, id="behind its option in a shell"),
        pytest.param({"password": 1234567890}, id="a number"),
    ],
)
def test_what_looks_secret_goes_from_fields(found: dict[str, Any]) -> None:
    text = json.dumps(redacted_object({"spec": found}))
    assert SECRET not in text
    assert "1234567890" not in text
    assert "REDACTED" in text


def test_counts_stay_in_fields() -> None:
    spec = {"args": ["--max-tokens", "4096"], "tokenExpirationSeconds": 3600}
    assert redacted_object({"spec": spec})["spec"] == spec


def test_names_of_secrets_stay() -> None:
    spec = {"volumes": [{"secret": {"secretName": "data"}}], "imagePullSecrets": [{"name": "pull"}]}
    assert redacted_object({"spec": spec})["spec"] == spec


def test_a_log_loses_values_of_variables() -> None:
    values = values_of_variables([{"spec": {"containers": [container()]}}])
    assert redacted_log(f"connecting with {SECRET}\nstep 1", values) == "connecting with REDACTED\nstep 1"
    assert values_of_variables([{"spec": {"containers": [{"env": [{"name": "N", "value": "1"}]}]}}]) == []


def test_lines_of_the_operator_about_this_job_only() -> None:
    log = '{"job": "team/llm"}\n{"job": "team/llm-2"}\n{"job": "other/llm"}\nPOST /namespaces/team/pods/llm 409'
    assert lines_about(log, "team/llm", 10).splitlines() == [
        '{"job": "team/llm"}',
        "POST /namespaces/team/pods/llm 409",
    ]
    others = ["my-team/llm", "team/llm.v2", "team/llm-2", "POST /namespaces/team/pods/my.llm", "x.team/llm"]
    assert not [line for line in others if lines_about(line, "team/llm", 1)]
    mine = ["team/llm.", "'team/llm'", "job=team/llm: done", "GET /namespaces/team/pods/llm?x=1"]
    assert [line for line in mine if lines_about(line, "team/llm", 1)] == mine
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


def leader(name: str, watches: str) -> dict[str, Any]:
    env = [{"name": "WATCH_NAMESPACES", "value": watches}]
    containers = [{"name": "proxy"}, {"name": "main", "command": ["elastipod", "operator"], "env": env}]
    return {"metadata": {"name": name, "namespace": "ops"}, "spec": {"containers": containers}}


LEADERS = "get pods --all-namespaces --selector=hp-training-control-plane"


def test_the_operator_of_the_jobs_namespace_is_read(kubectl: FakeKubectl, tmp_path: Path) -> None:
    """Its log is not that of its sidecar, nor that of another release."""
    two = {"items": [leader("op-1", "other"), leader("op-2", "x, team")]}
    kubectl.answer({**answers(), LEADERS: two, "logs op-2 -c main": "team/llm: mine"})
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 0
    assert unpacked(path)["llm-bundle/operator.log"] == "team/llm: mine"


@pytest.mark.parametrize(
    ("watches", "told"),
    [
        ("other", "log of the operator: no operator watches namespace team: ops/op-1, ops/op-3 watch others"),
        ("", "logs of other operators that watch namespace team: ops/op-3"),
    ],
)
def test_an_operator_that_may_be_of_another_release_is_said(
    kubectl: FakeKubectl, tmp_path: Path, watches: str, told: str
) -> None:
    two = {"items": [leader("op-1", watches), leader("op-3", watches)]}
    kubectl.answer({**answers(), LEADERS: two})
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 0
    assert unpacked(path)["llm-bundle/unread.txt"].splitlines() == [told]


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


def test_of_a_pod_whose_log_cannot_be_read_the_rest_is_there(kubectl: FakeKubectl, tmp_path: Path) -> None:
    waits = 'container "train" in pod "llm-a-0" is waiting to start: ContainerCreating'
    kubectl.answer({**answers(), "logs llm-a-0": f"[pod/llm-a-0/init] hello\nerror: {waits}"})
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 0
    files = unpacked(path)
    assert files["llm-bundle/logs/llm-a-0.log"] == "[pod/llm-a-0/init] hello\n"
    assert files["llm-bundle/unread.txt"] == f"log of pod llm-a-0: {waits}\n"
    (call,) = [call for call in kubectl.calls() if call[:2] == ["logs", "llm-a-0"]]
    assert {"--ignore-errors", "--limit-bytes=4194304"} <= set(call)


def test_values_of_variables_are_in_no_file(kubectl: FakeKubectl, tmp_path: Path) -> None:
    """Messages of pods, Events and the operator repeat what a script has printed."""
    found = answers()
    job: Any = found[f"get {JOBS} llm"]
    quoting = {"type": "Failed", "status": "True", "reason": "WorkerCrash", "message": f"rank 0: “no {SECRET}”"}
    job["status"]["conditions"] = [quoting]
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    pods: Any = found["get pods --selector=HPJob=llm"]
    ended = {"terminated": {"exitCode": 1, "message": f"cannot open {SECRET}"}}
    pods["items"][0]["status"] = {"containerStatuses": [{"name": "train", "state": ended}]}
    found["get events"] = {"items": [{"reason": "Running", "message": f"the script said {SECRET}"}]}
    template = {"spec": {"containers": [container()]}}
    workload = {"metadata": {"name": "w"}, "spec": {"podSets": [{"template": template}], "note": f"about {SECRET}"}}
    found["get workloads.kueue.x-k8s.io"] = {"items": [workload]}
    found["get localqueues.kueue.x-k8s.io"] = f"Error from server: the proxy {SECRET} is gone"
    kubectl.answer(found)
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 0
    files = unpacked(path)
    assert len(files) == 9
    assert not [name for name, text in files.items() if SECRET in text]


def test_names_that_are_values_too_stay(kubectl: FakeKubectl, tmp_path: Path) -> None:
    """The operator gives pods their own names and that of their job as variables."""
    found = answers()
    pods: Any = found["get pods --selector=HPJob=llm"]
    pods["items"][0]["metadata"]["namespace"] = "team"
    env = [{"name": "ELASTIPOD_POD", "value": "llm-a-0"}, {"name": "ELASTIPOD_JOB", "value": "team/llm"}]
    pods["items"][0]["spec"] = {"containers": [{"name": "train", "env": env}]}
    long = {**found, "logs llm-a-0": "I am llm-a-0 of team/llm"}
    kubectl.answer(long)
    path = tmp_path / "x.tar.gz"
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 0
    files = unpacked(path)
    assert files["llm-bundle/logs/llm-a-0.log"] == "I am llm-a-0 of team/llm\n"
    assert json.loads(files["llm-bundle/pods.json"])[0]["metadata"]["name"] == "llm-a-0"


def test_values_are_found_line_by_line_and_in_json() -> None:
    env = [{"name": "CONFIG", "value": 'first "line"\nsecond line'}]
    values = values_of_variables([{"spec": {"containers": [{"env": env}]}}])
    log = 'read: second line\n{"value": "first \\"line\\"\\nsecond line"}'
    assert redacted_log(log, values) == 'read: REDACTED\n{"value": "REDACTED"}'


def test_a_folder_that_may_not_be_read_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "lstat", refused)
    monkeypatch.setattr(Path, "stat", refused)
    assert cli.main(["bundle", "llm", "--file", "/closed/x.tar.gz"]) == 2
    assert "/closed/x.tar.gz cannot be written: Permission denied" in capsys.readouterr().err


def test_the_archive_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    path = tmp_path / "x.tar.gz"
    packs = tarfile.open

    def watched(**options: Any) -> tarfile.TarFile:
        modes.append(stat.S_IMODE(path.stat().st_mode))
        return packs(**options)

    monkeypatch.setattr("tarfile.open", watched)
    write(path, "llm", {"why.txt": "x"})
    assert modes == [0o600]


def test_an_interrupted_archive_is_removed(
    kubectl: FakeKubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    kubectl.answer(answers())
    path = tmp_path / "x.tar.gz"
    monkeypatch.setattr("tarfile.TarFile.addfile", interrupted)
    assert cli.main(["bundle", "llm", "--file", str(path)]) == 130
    assert not path.exists()


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
