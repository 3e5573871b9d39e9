"""The command `elastipod timeline`."""

from __future__ import annotations

import json
import sys
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli

SVG = "{http://www.w3.org/2000/svg}"
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


@pytest.mark.parametrize(
    ("told", "words"),
    [
        pytest.param({"depth_reason": "spec.elastipod.recovery is Process", "depth_code": "RecoveryIsProcess"},
                     "spec.elastipod.recovery is Process", id="its sentence"),
        pytest.param({"depth_code": "NothingKept"}, "the workers of this job never keep anything in memory", id="what its code means"),
        pytest.param({"depth_reason": "so"}, "so", id="the sentence of an operator before codes"),
        pytest.param({}, "", id="nothing is known"),
    ],
)  # fmt: skip
def test_the_table_says_why_a_change_went_as_deep(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], told: dict[str, Any], words: str
) -> None:
    kubectl.answer(answers([*HISTORY, {**change(2, "2026-01-01T00:02:01Z"), "depth": "process", **told}]))
    assert cli.main(["timeline", "llm"]) == 0
    heads, start, line = capsys.readouterr().out.splitlines()
    assert heads.endswith("UNTIL RUNNING   REASON FOR THE DEPTH")
    assert start.endswith("6 s")
    assert " ".join(line.split("process ")[1].split()) == f"1 s {words}".strip()


def test_the_picture_tells_why_to_whom_points_at_a_change(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"depth": "process", "depth_reason": "a < b & c", "depth_code": "MemberKeepsNothing"}
    memory = {"depth": "memory", "depth_code": "WorkersKept"}
    changes = [{**change(2, "2026-01-01T00:02:01Z"), **told}, {**change(3, "2026-01-01T00:03:01Z"), **memory}]
    kubectl.answer(answers([*HISTORY, *changes]))
    assert cli.main(["timeline", "llm", "-o", "svg"]) == 0
    picture = ElementTree.fromstring(capsys.readouterr().out)
    parents = [part for part in picture.iter() if part.find(f"{SVG}title") is not None]
    titles = [(part.get("id"), part.findtext(f"{SVG}title")) for part in parents]
    tips = [
        "generation 2: resize 0 → 2, JobCreated; new processes because a < b & c",
        "generation 3: resize 0 → 2, JobCreated; in memory because those who stay keep their processes and their state",
    ]
    assert sorted(titles) == [
        ("note-0-line", tips[0]), ("note-0-text", tips[0]), ("note-1-line", tips[1]), ("note-1-text", tips[1]),
    ]  # fmt: skip


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


def change(generation: int, running_at: str | None) -> dict[str, Any]:
    at = f"2026-01-01T00:0{generation}:00Z"
    return {
        **HISTORY[0],
        "generation": generation,
        "kind": "resize",
        "at": at,
        "detected_at": at,
        "running_at": running_at,
    }


def test_a_generation_that_another_replaced_never_runs(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.answer(answers([*HISTORY, change(2, None), change(3, None)]))
    assert cli.main(["timeline", "llm"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:]] == ["never", "yet"]


@pytest.mark.parametrize(("size", "shown"), [(8, 9), (11, 6), (1000, 11)])
def test_the_axis_of_replicas_can_be_read_for_any_size(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], size: int, shown: int
) -> None:
    kubectl.answer(answers([{**HISTORY[0], "from": 0, "to": size}]))
    assert cli.main(["timeline", "llm", "-o", "svg"]) == 0
    assert capsys.readouterr().out.count('id="ytick_') == shown


@pytest.mark.parametrize("form", ["svg", "html"])
@pytest.mark.parametrize("running_at", [None, "2999-01-01T00:00:06Z"])
def test_a_clock_that_is_behind_gives_a_picture_or_a_sentence(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], form: str, running_at: str | None
) -> None:
    at = "2999-01-01T00:00:00Z"
    found = answers([{**HISTORY[0], "at": at, "detected_at": at, "running_at": running_at}])
    found[f"get {JOBS} llm"]["metadata"]["creationTimestamp"] = at  # type: ignore[index]
    kubectl.answer(found)
    assert cli.main(["timeline", "llm", "-o", form]) == (1 if running_at is None else 0)
    out = capsys.readouterr().out
    assert ("the clock of this machine has not reached the first step" in out) is (running_at is None)
    assert ("<svg" in out) is (running_at is not None)
