"""`elastipod suspend`, `resume` and `scale`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli

JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"


def job(state: str = "Running", **spec: Any) -> dict[str, Any]:
    condition = {"type": state, "status": "True", "reason": state, "message": "a sentence"}
    meta = {"name": "llm", "namespace": "team"}
    return {"metadata": meta, "spec": spec, "status": {"conditions": [condition]}}


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
