"""The body of an apply patch, which the API server reads as YAML."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.core.builders import job

from elastipod_operator.kube.api import Api, as_yaml

BEACH = "GLHF! \U0001f3d6\ufe0f"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        pytest.param(BEACH, '"GLHF! \U0001f3d6\\ufe0f"', id="an emoji, as gloo's errors end"),
        pytest.param('"\\ud83d"', '"\\"\\\\ud83d\\""', id="what only looks like an escape"),
        pytest.param("\x00\x1b[31m\x7f\x85", r'"\u0000\u001b[31m\u007f\u0085"', id="control characters"),
        pytest.param("a\u2028b\ufeff\uffff", r'"a\u2028b\ufeff\uffff"', id="ends of lines, marks, non-characters"),
        pytest.param("caf\u00e9", r'"caf\u00e9"', id="letters"),
    ],
)
def test_what_yaml_cannot_hold_is_written_otherwise(text: str, written: str) -> None:
    assert as_yaml({"message": text}) == f'{{"message": {written}}}'
    assert json.loads(as_yaml({"message": text})) == {"message": text}


class Calls(Api):
    """Keeps calls, their bodies and options instead of making them."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.bodies: list[Any] = []
        self.options: list[dict[str, Any]] = []

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        self.targets.append(f"{method} {path}")
        self.bodies.append(body)
        self.options.append(options)
        return {}


JOB_PATH = "/apis/sagemaker.amazonaws.com/v1/namespaces/team/hyperpodpytorchjobs/llm"


async def test_a_status_is_applied_whole_and_by_the_operator_alone() -> None:
    calls = Calls()
    await calls.apply_status(job(namespace="team", name="llm"), {"a": 1})
    assert calls.targets == [f"PATCH {JOB_PATH}/status"]
    body = json.loads(calls.bodies[0])
    assert (body["kind"], body["status"]) == ("HyperPodPyTorchJob", {"a": 1})
    assert body["metadata"] == {"name": "llm", "namespace": "team", "uid": "job-uid"}
    assert calls.options == [
        {
            "query": [("fieldManager", "elastipod-operator"), ("force", "true")],
            "content_type": "application/apply-patch+yaml; charset=utf-8",
        }
    ]


async def test_annotations_are_written_to_the_version_that_was_read_and_jobs_deleted_by_their_uid() -> None:
    calls = Calls()
    await calls.patch_metadata(job(namespace="team", name="llm"), "7", {"annotations": {"a": "b"}})
    await calls.delete_job(job(namespace="team", name="llm"))
    assert calls.targets == [f"PATCH {JOB_PATH}", f"DELETE {JOB_PATH}"]
    assert calls.bodies == [
        {"metadata": {"annotations": {"a": "b"}, "resourceVersion": "7", "uid": "job-uid"}},
        {"preconditions": {"uid": "job-uid"}},
    ]
    assert calls.options[0] == {"content_type": "application/merge-patch+json"}


@pytest.mark.parametrize(
    ("force", "grace_s", "seconds"),
    [
        pytest.param(False, None, None, id="as the pod says"),
        pytest.param(False, 1, 1, id="shortened: its kubelet still confirms"),
        pytest.param(True, None, 0, id="by force"),
    ],
)
async def test_the_grace_of_a_deletion(force: bool, grace_s: int | None, seconds: int | None) -> None:
    calls = Calls()
    await calls.delete_pod("team", "pod", "uid", force=force, grace_s=grace_s)
    (body,) = calls.bodies
    assert body["preconditions"] == {"uid": "uid"}
    assert body.get("gracePeriodSeconds") == seconds


def test_half_a_character_is_replaced() -> None:
    assert json.loads(as_yaml({"message": "a\udc80b\ud83d"})) == {"message": "a\ufffdb\ufffd"}
