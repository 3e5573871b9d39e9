"""The command `elastipod timeline`."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
HISTORY = [
    {
        "generation": 1, "from": 0, "to": 2, "kind": "start", "cause": "JobCreated", "at": "2026-01-01T00:00:05Z",
        "detected_at": "2026-01-01T00:00:00Z", "running_at": "2026-01-01T00:00:06Z", "uid": "u",
    }
]  # fmt: skip


def answers(history: list[dict[str, Any]]) -> dict[str, object]:
    meta = {
        "name": "llm", "namespace": "team", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {"elastipod.io/history": json.dumps(history)},
    }  # fmt: skip
    return {f"get {JOBS} llm": {"metadata": meta, "status": {}}, "get pods": {"items": []}, "get events": {"items": []}}


def test_the_table(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(answers(HISTORY))
    assert cli.main(["timeline", "llm"]) == 0
    heads, line = capsys.readouterr().out.splitlines()
    assert heads.split()[:3] == ["TIME", "GENERATION", "SIZE"]
    assert line.split()[-2:] == ["6", "s"]


@pytest.mark.parametrize("form", ["text", "svg"])
def test_a_job_that_has_not_started(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], form: str) -> None:
    kubectl.answer(answers([]))
    assert cli.main(["timeline", "llm", "-o", form]) == 1
    assert capsys.readouterr().out == "job llm has not started to train; see: elastipod why llm\n"


def test_json_of_a_job_that_has_not_started(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(answers([]))
    assert cli.main(["timeline", "llm", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == []


def test_a_picture_without_what_draws_it(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.answer(answers(HISTORY))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["timeline", "llm", "-o", "svg"]) == 2
    told = "-o svg needs the package matplotlib; in a checkout of elastipod, run: pip install '.[cli]'"
    assert told in capsys.readouterr().err
