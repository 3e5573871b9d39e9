"""The command `elastipod why`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.unit.client.fake_kubectl import FakeKubectl
from tests.unit.core.builders import trains

from elastipod import cli
from elastipod_operator.core.record_codec import encode

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
UID = "uid-1"
NONE: dict[str, Any] = {"items": []}


def job(reason: str = "Training", kind: str = "Running", **labels: str) -> dict[str, Any]:
    state = {"type": kind, "status": "True", "reason": reason, "message": "a sentence", "lastTransitionTime": None}
    meta = {"name": "llm", "namespace": "team", "uid": UID, "labels": labels}
    return {"metadata": meta, "status": {"conditions": [state]}}


def pod(name: str, owner: str, node: str = "") -> dict[str, Any]:
    waiting = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    labels = {"elastipod.io/spec": "a", "elastipod.io/ordinal": "0", "elastipod.io/incarnation": "0"}
    meta = {"name": name, "labels": labels, "ownerReferences": [{"uid": owner}]}
    return {
        "metadata": meta,
        "spec": {"nodeName": node},
        "status": {"phase": "Pending", "conditions": [] if node else [waiting]},
    }


def answers(found: dict[str, Any], pods: list[dict[str, Any]] | None = None) -> dict[str, object]:
    return {f"get {JOBS} llm": found, "get pods": {"items": pods or []}, "get events": NONE}


def test_a_job_that_trains(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(answers(job()))
    assert cli.main(["why", "llm"]) == 0
    assert capsys.readouterr().out == "Job team/llm runs. There is nothing to do.\n"


def progress(**annotations: str) -> dict[str, Any]:
    """A job that trains, with such annotations, whose record is its own."""
    found = job()
    state = encode(replace(trains(generation=3), owner=UID))
    found["metadata"]["annotations"] = {
        "elastipod.io/state": state,
        **{f"elastipod.io/{k}": v for k, v in annotations.items()},
    }
    return found


AT = {"step-at": "2026-03-01T09:00:00.000Z"}


@pytest.mark.parametrize(
    ("annotations", "sentence"),
    [
        ({"step": "4200", **AT}, "At 2026-03-01 09:00 UTC it had made 4,200 steps"),
        (
            {"step": "4200/10000", "eta": "2026-03-02T10:00:00Z", "checkpoint": "4000", **AT},
            "At 2026-03-01 09:00 UTC it had made 4,200 of 10,000 steps, and at that pace it ends at 2026-03-02 10:00 UTC; the newest "
            "durable checkpoint is of step 4000",
        ),
        ({"step": "many", **AT}, ""),
        ({"step": "4200", "step-at": "yesterday"}, ""),
        ({"step": "4200"}, ""),
    ],
)
def test_how_far_the_training_is(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], annotations: dict[str, str], sentence: str
) -> None:
    kubectl.answer(answers(progress(**annotations)))
    cli.main(["why", "llm", "-o", "json"])
    told = json.loads(capsys.readouterr().out)
    assert told["progress"] == sentence
    assert sentence in told["text"]
    foreign = progress(**annotations)
    foreign["metadata"]["uid"] = "uid-of-a-copy"
    kubectl.answer(answers(foreign))
    cli.main(["why", "llm", "-o", "json"])
    assert json.loads(capsys.readouterr().out)["progress"] == "", "it is that of another job"


def test_a_job_that_needs_attention(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(answers(job("InvalidSpec", "Suspended")))
    assert cli.main(["why", "hpjob/llm", "-o", "wide"]) == 1
    out = capsys.readouterr().out
    assert "InvalidSpec: a sentence." in out
    assert out.splitlines()[-2:] == [
        "SEVERITY   REASON        WHERE       SINCE",
        "error      InvalidSpec   Suspended   unknown",
    ]


def test_pods_of_another_job_of_this_name_are_not_its(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(answers(job(), [pod("llm-a-0", UID), pod("old-a-0", "uid-0")]))
    assert cli.main(["why", "llm", "-o", "json"]) == 0
    (blocker,) = json.loads(capsys.readouterr().out)["blockers"]
    assert blocker["where"] == "pod llm-a-0"
    assert blocker["message"] == "0/3 nodes are available"


def test_yaml_has_the_same_content(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(answers(job("InvalidSpec", "Suspended")))
    cli.main(["why", "llm", "-o", "json"])
    as_json = json.loads(capsys.readouterr().out)
    cli.main(["why", "llm", "-o", "yaml"])
    assert yaml.safe_load(capsys.readouterr().out) == as_json
    assert as_json["needsAttention"] is True


def test_options_are_handed_to_kubectl(kubectl: FakeKubectl) -> None:
    kubectl.answer(answers(job()))
    cli.main(["why", "llm", "-n", "team", "--context", "c", "--kubeconfig", "/k"])
    assert {"--namespace=team", "--context=c", "--kubeconfig=/k"} <= set(kubectl.calls()[0])


def test_the_queue_and_its_workloads_are_read(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    reserved = {"type": "QuotaReserved", "status": "False", "message": "no room in flavor x"}
    workload = {"metadata": {"name": "llm-base"}, "spec": {}, "status": {"conditions": [reserved]}}
    found = job("Queued", "Suspended", **{"kueue.x-k8s.io/queue-name": "train"})
    kubectl.answer(
        {
            **answers(found),
            "get workloads.kueue.x-k8s.io": {"items": [workload]},
            "get localqueues.kueue.x-k8s.io train": {"metadata": {"name": "train"}, "spec": {"clusterQueue": "gpus"}},
            "get clusterqueues.kueue.x-k8s.io gpus": 'Error from server (Forbidden): clusterqueues "gpus" is forbidden',
        }
    )
    assert cli.main(["why", "llm"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Workload llm-base waits for quota: no room in flavor x" in out
    assert 'Not read, so there may be more: clusterqueues: (Forbidden): clusterqueues "gpus" is forbidden.' in out


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_node_that_is_gone_is_told(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], is_lost: bool) -> None:
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    node = "" if is_lost else {"kind": "Node", "metadata": {"name": "node-1"}, **ready}
    kubectl.answer({**answers(job(), [pod("llm-a-0", UID, "node-1")]), "get nodes node-1": node})
    assert cli.main(["why", "llm"]) == int(is_lost)
    out = " ".join(capsys.readouterr().out.split())
    assert ("node node-1 (pod llm-a-0) does not exist any more" in out) is is_lost


def test_of_many_lost_nodes_the_first_are_told_and_the_others_counted(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    """A zone takes hundreds of them, and a command that starts no agent ends every pod with a sentence of its own."""
    pods = [pod(f"llm-a-{n:02}", UID, f"node-{n:02}") for n in range(40)]
    nodes = {f"get nodes {' '.join(f'node-{n:02}' for n in range(40))}": ""}
    kubectl.answer({**answers(job(), pods), **nodes, "get nodes": ""})
    assert cli.main(["why", "llm"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("does not exist any more") == 3
    assert "the same holds for 37 more: node node-03, node node-04, node node-05 and others." in out
    assert len(out) < 2000


def test_of_many_workloads_some_are_named(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    waits = {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "no room"}]}
    workloads = [
        {"metadata": {"name": f"share-{n:02}", "ownerReferences": [{"uid": UID}]}, "spec": {}, "status": waits}
        for n in range(40)
    ]
    found = job("Queued", "Created", **{"kueue.x-k8s.io/queue-name": "q"})
    kubectl.answer({**answers(found), "get workloads": {"items": workloads}, "get localqueues": "Error (NotFound): x"})
    cli.main(["why", "llm"])
    out = " ".join(capsys.readouterr().out.split())
    assert "each of the Workloads share-00, share-01, share-02 and 37 more waits for quota: no room" in out


@pytest.mark.parametrize(
    ("said", "tells"),
    [("", False), ("drain condition GpuUnhealthy=True", True), ("who knows what", False)],
)
def test_announcements_of_nodes_mean_what_the_operator_is_told(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], said: str, tells: bool
) -> None:
    conditions = [{"type": "Ready", "status": "True"}, {"type": "GpuUnhealthy", "status": "True"}]
    node = {"metadata": {"name": "node-1"}, "status": {"conditions": conditions}}
    found = job()
    found["metadata"]["annotations"] = {"elastipod.io/node-signals": said}
    kubectl.answer(answers(found, [pod("llm-a-0", UID, "node-1")]) | {"get nodes node-1": {"kind": "Node", **node}})
    cli.main(["why", "llm"])
    out = " ".join(capsys.readouterr().out.split())
    assert ("node-1 (pod llm-a-0): condition GpuUnhealthy=True" in out) is tells


@pytest.mark.parametrize(
    ("tolerates", "tells"),
    [("dedicated", False), ("something-else", True)],
    ids=["the taint", "another taint"],
)
def test_pods_stay_on_a_node_whose_taint_they_tolerate(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], tolerates: str, tells: bool
) -> None:
    taint = {"key": "dedicated", "value": "train", "effect": "NoExecute"}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    node = {"kind": "Node", "metadata": {"name": "node-1"}, "spec": {"taints": [taint]}, "status": ready}
    other, mine = pod("llm-a-0", UID, "node-1"), pod("llm-a-1", UID, "node-1")
    other["spec"]["tolerations"] = [{"operator": "Exists"}]
    mine["spec"]["tolerations"] = [{"key": tolerates, "operator": "Exists"}]
    kubectl.answer({**answers(job(), [other, mine]), "get nodes node-1": node})
    cli.main(["why", "llm"])
    out = " ".join(capsys.readouterr().out.split())
    assert ("pods must leave node node-1 (pod llm-a-1): taint dedicated:NoExecute" in out) is tells
    assert ("must leave" in out) is tells


def test_a_job_that_does_not_exist(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({f"get {JOBS} llm": f'Error from server (NotFound): {JOBS} "llm" not found'})
    assert cli.main(["why", "llm"]) == 3
    assert capsys.readouterr().err == f'elastipod why: (NotFound): {JOBS} "llm" not found\n'


def test_without_kubectl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert cli.main(["why", "llm"]) == 3
    assert "there is no kubectl in PATH; install it" in capsys.readouterr().err


def test_an_argument_that_is_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["why", "pod/llm"])
    assert left.value.code == 2
    assert "names a pod, not a job" in capsys.readouterr().err


def test_the_commands_load_nothing_heavy() -> None:
    """They run in the user's shell, where the operator's packages and torch need not be installed."""
    code = (
        "import sys, pkgutil, importlib, elastipod_client as package\n"
        "for one in pkgutil.iter_modules(package.__path__): importlib.import_module('elastipod_client.' + one.name)\n"
        "heavy = {'torch', 'pydantic', 'kubernetes', 'kopf', 'aiohttp', 'yaml', 'rich', 'matplotlib', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), len([m for m in sys.modules if m.startswith('elastipod_client.')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, _, count = done.stdout.strip().rpartition(" ")
    assert heavy == "[]"
    assert int(count) > 10
