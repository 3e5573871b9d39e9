"""The generated CRD: current, small enough, and with exactly the fields that clients know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.nonempty import some

from elastipod_operator.api import crd, generate, pod_schema
from elastipod_operator.api.base import Model
from elastipod_operator.api.job_status import JobStatus
from elastipod_operator.api.models import JobSpec

CHECKOUT = Path(__file__).resolve().parents[3]

CONDITION_FIELDS = {"type", "status", "reason", "message", "lastTransitionTime", "lastProbeTime"}
STATUS_FIELDS = {
    "startTime",
    "completionTime",
    "conditions",
    "restartCount",
    "restartStatus",
    "masterAddr",
    "masterPort",
    "jobPods",
    "managerPods",
    "podManagerStatuses",
    "podSets",
    "podSetInfos",
    "elasticWorkloadRef",
    "latestFaultyPodInstanceList",
    "elasticScalingStatus",
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return crd.object_schema()


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def test_generated_files_are_current() -> None:
    assert generate.stale(CHECKOUT) == []


def test_a_stale_file_is_shown(tmp_path: Path) -> None:
    for path, text in generate.generated().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    reference = tmp_path / generate.REFERENCE_FILE
    reference.write_text(reference.read_text(encoding="utf-8").replace("suspend", "pause"), encoding="utf-8")
    (hint,) = generate.stale(tmp_path)
    assert "+| `suspend`" in hint


def test_the_chart_holds_the_same_crd() -> None:
    lines = (CHECKOUT / generate.CHART_CRD_FILE).read_text(encoding="utf-8").splitlines()
    assert lines[1] == "{{- if .Values.crds.install }}"
    plain = [line for line in lines if "{{" not in line and "resource-policy" not in line and line != "  annotations:"]
    assert yaml.load("\n".join(plain), yaml.CSafeLoader) == crd.build()


def test_a_plain_apply_takes_it() -> None:
    assert len(json.dumps(crd.build())) < crd.MAX_JSON_BYTES


def test_status_has_what_clients_know_and_no_more(schema: dict[str, Any]) -> None:
    status = schema["properties"]["status"]["properties"]
    assert set(status) == STATUS_FIELDS
    assert set(status["conditions"]["items"]["properties"]) == CONDITION_FIELDS
    assert status["masterPort"]["type"] == "string"


def test_every_optional_field_takes_null_or_has_a_default(schema: dict[str, Any]) -> None:
    fields = [
        (f"{path}.{name}", field, name in node.get("required", ()) or not path.count("."))
        for path, node in nodes(schema)
        for name, field in node.get("properties", {}).items()
    ]
    for path, field, is_required in some(fields):
        assert is_required or field.get("nullable") or "default" in field, path
        assert not ("enum" in field and field.get("nullable")), f"{path}: an enum refuses null"


def test_every_list_says_how_it_is_merged(schema: dict[str, Any]) -> None:
    lists = [one for one in nodes(schema) if "items" in one[1]]
    assert [path for path, node in some(lists) if "x-kubernetes-list-type" not in node] == []


@pytest.mark.parametrize("model", [JobSpec, JobStatus])
def test_every_field_of_ours_is_described(model: type[Model]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_pod_template() -> None:
    template = pod_schema.load()
    assert set(template["properties"]["metadata"]["properties"]) == {
        "annotations",
        "finalizers",
        "labels",
        "name",
        "namespace",
    }
    container = template["properties"]["spec"]["properties"]["containers"]["items"]
    assert container["required"] == ["name"]
    quantity = container["properties"]["resources"]["properties"]["limits"]["additionalProperties"]
    assert quantity["x-kubernetes-int-or-string"] is True
    # A pod may list a variable or a port twice, and generated manifests do.
    assert container["properties"]["env"]["x-kubernetes-list-type"] == "atomic"
    assert container["properties"]["ports"]["x-kubernetes-list-type"] == "atomic"
