"""The schema of a pod template, extracted from an API server's OpenAPI document and adapted for a CRD.

The result is stored as `pod_template.json` beside this file, so generating the CRD needs no cluster. With it `kubectl apply`
rejects misspelt fields of containers, and `kubectl explain` describes the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final

Schema = dict[str, Any]

FILE_NAME: Final = "pod_template.json"
OPENAPI_PATH: Final = "/openapi/v3/api/v1"

_PREFIX = "#/components/schemas/"
_POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"

_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_QUANTITY_PATTERN = rf"^[+-]?{_NUMBER}(([KMGTPE]i)|[numkMGTPE]|[eE][+-]?{_NUMBER})?$"

_KEPT_KEYS = ("type", "format", "enum", "required", "minimum", "maximum", "x-kubernetes-map-type")
_META_FIELDS: Mapping[str, Schema] = {
    "annotations": {"type": "object", "additionalProperties": {"type": "string"}, "nullable": True},
    "finalizers": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "atomic", "nullable": True},
    "labels": {"type": "object", "additionalProperties": {"type": "string"}, "nullable": True},
    "name": {"type": "string", "nullable": True},
    "namespace": {"type": "string", "nullable": True},
}
# Pods may repeat entries in these lists although their schema declares maps; generated manifests do.
_LISTS_WITH_REPEATS = frozenset({"env", "ports", "imagePullSecrets", "hostAliases"})


def load() -> Schema:
    """Give the committed schema of `PodTemplateSpec`, a new copy at each call."""
    text = resources.files(__package__).joinpath(FILE_NAME).read_text(encoding="utf-8")
    schema: Schema = json.loads(text)
    return schema


def extract(openapi: Mapping[str, Any]) -> Schema:
    """Extract the schema from the document that an API server serves at `OPENAPI_PATH`.

    Descriptions and defaults are dropped (pods get their defaults at creation), references are resolved, quantities may be
    integers, and every optional field may be null, because generators of manifests write empty fields. Raises KeyError if the
    document is not that of the core API.
    """
    schema = _convert(_PREFIX + _POD_TEMPLATE, openapi["components"]["schemas"])
    schema["required"] = ["spec"]
    pod = schema["properties"]["spec"]
    del pod["nullable"]
    del pod["properties"]["ephemeralContainers"]  # no pod can be created with one
    pod["properties"]["containers"]["minItems"] = 1
    return schema


def choice(values: Iterable[str]) -> str:
    """Give a pattern in place of an enum for a nullable field, because the API server's enums do not allow null."""
    return f"^({'|'.join(map(re.escape, values))})$"


def _convert(reference: str, schemas: Mapping[str, Schema]) -> Schema:
    name = reference.removeprefix(_PREFIX)
    if name == _QUANTITY:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": _QUANTITY_PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    if name == _INT_OR_STRING:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    if name == _OBJECT_META:
        # Without its fields listed, the API server would prune the metadata of templates.
        return {"type": "object", "properties": {key: dict(value) for key, value in _META_FIELDS.items()}}
    return _structural(schemas[name], schemas)


def _structural(schema: Schema, schemas: Mapping[str, Schema]) -> Schema:
    reference = schema.get("$ref") or next((part["$ref"] for part in schema.get("allOf", ()) if "$ref" in part), None)
    if reference:
        return _convert(reference, schemas)
    result: Schema = {key: schema[key] for key in _KEPT_KEYS if key in schema}
    if "items" in schema:
        result["items"] = _structural(schema["items"], schemas)
        result["x-kubernetes-list-type"] = schema.get("x-kubernetes-list-type", "atomic")
        if result["x-kubernetes-list-type"] == "map":
            result["x-kubernetes-list-map-keys"] = schema["x-kubernetes-list-map-keys"]
    if "additionalProperties" in schema:
        result["additionalProperties"] = _structural(schema["additionalProperties"], schemas)
    if "properties" in schema:
        required = schema.get("required", ())
        result["properties"] = {
            name: _property(name, value, optional=name not in required, schemas=schemas)
            for name, value in sorted(schema["properties"].items())
        }
    return result


def _property(name: str, schema: Schema, *, optional: bool, schemas: Mapping[str, Schema]) -> Schema:
    result = _structural(schema, schemas)
    if name in _LISTS_WITH_REPEATS:
        result["x-kubernetes-list-type"] = "atomic"
        result.pop("x-kubernetes-list-map-keys", None)
    if optional:
        result["nullable"] = True
        if "enum" in result:
            result["pattern"] = choice(result.pop("enum"))
    return result
