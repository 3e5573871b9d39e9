"""Generate the CustomResourceDefinition from the models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from elastipod_operator.api import pod_schema, rules
from elastipod_operator.api.base import MAX_INT32, SHORT_NAMES, SINGULAR
from elastipod_operator.api.job_status import RUNNING, SELECTOR, JobStatus
from elastipod_operator.api.models import HyperPodPyTorchJob, JobSpec
from elastipod_operator.core.names import GROUP, KIND, PLURAL, VERSION

Schema = dict[str, Any]

CRD_NAME: Final = f"{PLURAL}.{GROUP}"
MAX_JSON_BYTES: Final = 256 * 1024
"""Size limit of the annotation in which a plain `kubectl apply` keeps its last input."""

_BOUNDS: Mapping[str, str] = {
    "minimum": "minimum",
    "maximum": "maximum",
    "minLength": "minLength",
    "maxLength": "maxLength",
    "minItems": "minItems",
    "maxItems": "maxItems",
    "enum": "enum",
    "format": "format",
    "description": "description",
}
# Lists whose entries are identified by name; all others are replaced as a whole.
_LISTS_BY_NAME = frozenset({"replicaSpecs", "logMonitoringConfiguration"})

# `conditions[-1:]` is the present state, because the operator keeps it last.
# Name, type, description, path; those of priority 1 are shown by `-o wide` only.
_ANNOTATION = r".metadata.annotations.elastipod\.io/"
_COLUMNS = (
    ("State", "string", "The present state: the last condition.", ".status.conditions[-1:].type"),
    ("Size", "string", "Replicas that train, target size, and maximum size.", f"{_ANNOTATION}size"),
    ("Restarts", "integer", "Recoveries so far.", ".status.restartCount"),
    ("Queue", "string", "The LocalQueue that the job waits in.", r".metadata.labels.kueue\.x-k8s\.io/queue-name"),
)
_WIDE_COLUMNS = (
    ("Reason", "string", "Why the job is in this state.", ".status.conditions[-1:].reason"),
    ("Step", "string", "Completed steps, of how many where that is known; up to 10 min old.", f"{_ANNOTATION}step"),
    ("ETA", "string", "When the last step will be made at the present pace.", f"{_ANNOTATION}eta"),
    ("Checkpoint", "string", "The step of the newest durable checkpoint.", f"{_ANNOTATION}checkpoint"),
)
_KEYS = ("name", "type", "description", "jsonPath")
_PRINTER_COLUMNS: tuple[Schema, ...] = (
    *(dict(zip(_KEYS, column, strict=True)) for column in _COLUMNS),
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    *({**dict(zip(_KEYS, column, strict=True)), "priority": 1} for column in _WIDE_COLUMNS),
)

# The scale subresource needs the paths of a number and of a selector under status, without lists on the way, and clients
# reject unknown fields there. Two of the known fields are open maps (`job_status`).
_SCALE: Schema = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": f".status.elasticScalingStatus.targetReplicas.{RUNNING}",
    "labelSelectorPath": f".status.elasticWorkloadRef.{SELECTOR}",
}


def build() -> Schema:
    """Give the whole CRD as JSON-ready values. Raises ValueError if it is too large for a plain `kubectl apply`."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": list(SHORT_NAMES),
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}, "scale": dict(_SCALE)},
                    "additionalPrinterColumns": [dict(column) for column in _PRINTER_COLUMNS],
                    "schema": {"openAPIV3Schema": object_schema()},
                }
            ],
        },
    }


def object_schema() -> Schema:
    """Give the structural schema of a whole object."""
    return {
        "type": "object",
        "description": (HyperPodPyTorchJob.__doc__ or "").splitlines()[0],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _spec_schema(),
            "status": _status_schema(),
        },
        "x-kubernetes-validations": [rule.to_schema() for rule in rules.JOB_RULES],
    }


def _spec_schema() -> Schema:
    document = JobSpec.model_json_schema(by_alias=True)
    schema = _Converter(document["$defs"], with_defaults=True).convert(document)
    fields = schema["properties"]
    specs = fields["replicaSpecs"]
    spec_fields = specs["items"]["properties"]
    template = pod_schema.load()
    spec_fields["template"] = {"description": spec_fields["template"]["description"], **template}
    _add_rules(schema, rules.JOB_SPEC_RULES)
    _add_rules(fields["nprocPerNode"], rules.NPROC_RULES)
    _add_rules(fields["elasticPolicy"], rules.ELASTIC_POLICY_RULES)
    _add_rules(specs, rules.REPLICA_SPECS_RULES)
    _add_rules(spec_fields["name"], rules.SPEC_NAME_RULES)
    return schema


def _status_schema() -> Schema:
    document = JobStatus.model_json_schema(by_alias=True)
    return _Converter(document["$defs"], with_defaults=False).convert(document)


def _add_rules(schema: Schema, added: tuple[rules.Rule, ...]) -> None:
    schema["x-kubernetes-validations"] = [rule.to_schema() for rule in added]


class _Converter:
    """Turns pydantic's JSON schema into a structural one.

    A scalar default becomes a default of the CRD and makes the field non-nullable, so that the API server replaces null by it.
    Every other optional field is nullable and stays as the user wrote it. So do the fields of list entries, because
    `kubectl apply` compares lists as a whole and would report a difference after a default was added.
    """

    def __init__(self, definitions: Mapping[str, Schema], *, with_defaults: bool) -> None:
        self._definitions = definitions
        self._with_defaults = with_defaults

    def convert(self, schema: Mapping[str, Any]) -> Schema:
        """Give the structural form of one node."""
        schema = self._resolved(schema)
        result: Schema = {name: schema[key] for key, name in _BOUNDS.items() if key in schema}
        if "description" in result:
            result["description"] = " ".join(result["description"].split())
        kind = schema["type"]
        result["type"] = kind
        if kind == "integer":
            result["format"] = "int32" if schema.get("maximum", MAX_INT32) <= MAX_INT32 else "int64"
        elif kind == "array":
            result["items"] = _Converter(self._definitions, with_defaults=False).convert(schema["items"])
            result["x-kubernetes-list-type"] = "atomic"
        elif kind == "object":
            result |= self._object(schema)
        return result

    def _object(self, schema: Mapping[str, Any]) -> Schema:
        if "properties" not in schema:
            values = schema.get("additionalProperties")
            if isinstance(values, Mapping) and values:
                return {"additionalProperties": self.convert(values)}
            return {"x-kubernetes-preserve-unknown-fields": True}
        required = schema.get("required", [])
        properties = {
            name: self._property(name, value, name in required) for name, value in schema["properties"].items()
        }
        return {"properties": properties} | ({"required": required} if required else {})

    def _property(self, name: str, schema: Mapping[str, Any], is_required: bool) -> Schema:
        result = self.convert(schema)
        default = schema.get("default")
        if name in _LISTS_BY_NAME:
            result |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
        if self._with_defaults and isinstance(default, str | int | float):
            result["default"] = default
        elif not is_required:
            result["nullable"] = True
            if "enum" in result:
                result["pattern"] = pod_schema.choice(result.pop("enum"))
        return result

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Resolve references and `X or null`; keys beside a reference override those of its target."""
        own = {key: value for key, value in schema.items() if key not in ("anyOf", "$ref", "title")}
        if "anyOf" in schema:
            (other,) = (part for part in schema["anyOf"] if part.get("type") != "null")
            return {**self._resolved(other), **own}
        if "$ref" in schema:
            return {**self._resolved(self._definitions[schema["$ref"].rpartition("/")[2]]), **own}
        return own
