"""Which jobs a release of Elastipod runs, as its leader lease tells other releases, and whose CRD it is. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.names import ANNOTATION_CONTROLLER, ANNOTATION_SCOPE
from .reading import Body, annotations_of, mapping, mappings, text


@dataclass(frozen=True, slots=True)
class Scope:
    """Which jobs a release runs. namespaces: empty for all. only_named: not those without the annotation of the controller."""

    release: str
    namespaces: tuple[str, ...] = ()
    controller: str = "elastipod"
    only_named: bool = False

    def watches(self, namespace: str) -> bool:
        """Whether it runs jobs of a namespace."""
        return not self.namespaces or namespace in self.namespaces

    def holds(self, job: Body) -> bool:
        """Whether it runs this job of its namespaces."""
        named = annotations_of(job).get(ANNOTATION_CONTROLLER, "")
        return named == self.controller or (not named and not self.only_named)

    def overlaps(self, other: Scope) -> bool:
        """Whether a job can exist that both run."""
        apart = self.namespaces and other.namespaces and not {*self.namespaces} & {*other.namespaces}
        shares_unnamed = not (self.only_named or other.only_named)
        return not apart and (self.controller == other.controller or shares_unnamed)

    def annotations(self, *, leads: bool) -> dict[str, str]:
        """Give what the lease says of it. leads: the holder has found that nobody else runs its jobs."""
        body = {
            "release": self.release, "namespaces": [*self.namespaces], "controller": self.controller,
            "onlyNamed": self.only_named, "leads": leads,
        }  # fmt: skip
        return {ANNOTATION_SCOPE: json.dumps(body, separators=(",", ":"))}


def scope_of(lease: Body) -> tuple[Scope, bool]:
    """Read what a lease says of its release, and whether its holder leads. One of an earlier version leads, and runs all jobs."""
    try:
        body = mapping(json.loads(annotations_of(lease).get(ANNOTATION_SCOPE, "")))
    except ValueError:
        return Scope(""), True
    named = body.get("namespaces")
    namespaces = tuple(str(name) for name in named) if isinstance(named, list) else ()
    scope = Scope(text(body.get("release")), namespaces, text(body.get("controller")), bool(body.get("onlyNamed")))
    return scope, bool(body.get("leads"))


def is_foreign(crd: Body) -> bool:
    """Whether the CRD belongs to another controller: the spec of its jobs has no field elastipod."""
    for version in mappings(mapping(crd.get("spec")).get("versions")):
        schema: Mapping[str, Any] = mapping(mapping(version.get("schema")).get("openAPIV3Schema"))
        spec = mapping(mapping(schema.get("properties")).get("spec"))
        if version.get("served") and "elastipod" in mapping(spec.get("properties")):
            return False
    return True
