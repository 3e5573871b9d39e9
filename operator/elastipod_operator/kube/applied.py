"""The parts of the spec that must survive an edit, kept in an annotation. Pure.

Edits of templates, of the container in them that runs the agent, and of nprocPerNode take effect when a job is suspended and
resumed: until then new pods are like the running ones. `rest` is the remainder of the last valid spec, which stays in
force while an edit is invalid. Values of variables are not kept (redaction.py).
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.caches import limited_cache
from ..core.names import ANNOTATION_APPLIED, LABEL_SPEC
from .identity import is_own
from .reading import MAX_DEPTH, annotations_of, is_within_depth, labels_of, mapping, mappings, text, uid_of
from .redaction import misses_values, redacted, restored, values_of

Spec = dict[str, Any]
# A user may write anything into the annotation; the operator writes none that unpacks to more (`limits.MAX_TEMPLATE_BYTES`).
MAX_UNPACKED = 256 * 1024
# Each template and each field of the rest is at most this many levels below the top.
MAX_KEPT_DEPTH = MAX_DEPTH + 4
# Characters that are cached for all jobs together; they may take ten times as many bytes.
APPLIED_KEPT = 4 << 20


def encode_applied(spec: Mapping[str, Any]) -> str:
    """Give the annotation's text for the templates and worker counts of a spec."""
    return _packed({**_taken_up(spec), "rest": _rest_of(spec)})


def applied_annotation(body: Mapping[str, Any], *, adopts_spec: bool, room: int) -> str | None:
    """Give the annotation's new text for a job with a valid spec; None if it is unchanged.

    adopts_spec: the present templates and worker counts take effect. room: the bytes that it may take; if everything does not
    fit, only the templates are kept.
    """
    spec, kept = body["spec"], applied_of(body)
    rest = _rest_of(spec)
    if kept is not None and not adopts_spec and kept.get("rest") == rest and kept.get("uid"):
        return None
    taken = (
        _taken_up(spec)
        if kept is None or adopts_spec
        else {name: kept[name] for name in ("nprocPerNode", "templates")} | {"container": _container_of(kept, spec)}
    )
    taken["uid"] = uid_of(body)
    whole = _packed({**taken, "rest": rest})
    return whole if len(whole) <= room else _packed(taken)


def last_good_spec(body: Mapping[str, Any]) -> Spec | None:
    """Give the last valid spec of a job; None if unknown.

    An invalid edit can still suspend the job; it can resume the job only when it is valid.
    """
    kept = applied_of(body)
    rest = kept.get("rest") if kept is not None else None
    if kept is None or not isinstance(rest, dict):
        return None
    templates = _restored_templates(kept["templates"], mapping(body.get("spec")), ())
    specs = [
        {**s, "template": templates[s["name"]]}
        for s in mappings(rest.get("replicaSpecs"))
        if s.get("name") in templates
    ]
    good = _with_container({**rest, "nprocPerNode": kept["nprocPerNode"], "replicaSpecs": specs}, kept)
    if mapping(mapping(body.get("spec")).get("runPolicy")).get("suspend") is True:
        good["runPolicy"] = {**mapping(rest.get("runPolicy")), "suspend": True}
    return good


def _taken_up(spec: Mapping[str, Any]) -> Spec:
    templates = {s["name"]: redacted(s.get("template")) for s in spec.get("replicaSpecs") or ()}
    return {"nprocPerNode": spec.get("nprocPerNode"), "container": _container_in(spec), "templates": templates}


def _container_in(spec: Mapping[str, Any]) -> str | None:
    """Give the container that a spec names for the agent; None for the first one."""
    return text(mapping(spec.get("elastipod")).get("container")) or None


def _container_of(kept: Mapping[str, Any], spec: Mapping[str, Any]) -> str | None:
    """Give the container that runs the agent in pods of the kept templates.

    An annotation of an earlier version names it with the rest of the spec. spec: the present one, if even that is missing.
    """
    if "container" in kept:
        return text(kept["container"]) or None
    rest = kept.get("rest")
    return _container_in(rest if isinstance(rest, Mapping) else spec)


def _with_container(spec: Spec, kept: Mapping[str, Any]) -> Spec:
    """Give a spec with the container of the kept templates."""
    container = _container_of(kept, spec)
    if container == _container_in(spec):
        return spec
    return {**spec, "elastipod": {**mapping(spec.get("elastipod")), "container": container}}


def _rest_of(spec: Mapping[str, Any]) -> Spec:
    specs = [{name: value for name, value in s.items() if name != "template"} for s in spec.get("replicaSpecs") or ()]
    return {**{name: value for name, value in spec.items() if name != "nprocPerNode"}, "replicaSpecs": specs}


def _packed(kept: Mapping[str, Any]) -> str:
    plain = json.dumps(kept, separators=(",", ":"), sort_keys=True)
    return base64.b85encode(zlib.compress(plain.encode(), 9)).decode()


def _unpacked_length(kept: Spec | None, packed: str) -> int:
    return len(packed) + (len(json.dumps(kept)) if kept is not None else 0)


@limited_cache(APPLIED_KEPT, _unpacked_length)
def _decoded(packed: str) -> Spec | None:
    try:
        unpacker = zlib.decompressobj()
        kept = json.loads(unpacker.decompress(base64.b85decode(packed), MAX_UNPACKED))
        are_templates = all(isinstance(one, dict) for one in kept["templates"].values())
        is_sound = unpacker.eof and are_templates and "nprocPerNode" in kept
        return kept if is_sound and is_within_depth(kept, MAX_KEPT_DEPTH) else None
    except (zlib.error, binascii.Error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def applied_of(body: Mapping[str, Any]) -> Spec | None:
    """Read the annotation of a job; None if it is missing or damaged."""
    kept = any_applied_of(body)
    return kept if kept is not None and is_own(text(kept.get("uid")), body) else None


def any_applied_of(body: Mapping[str, Any]) -> Spec | None:
    """Read the annotation even if it was written for another object."""
    packed = annotations_of(body).get(ANNOTATION_APPLIED)
    return _decoded(packed) if packed else None


def effective_spec(body: Mapping[str, Any], pods: Sequence[Mapping[str, Any]] = ()) -> Spec:
    """Give the spec from which pods are created: the user's, with the templates, container and worker count that are in effect.

    pods: some pods of the job, for values of variables that the spec no longer has (see `needs_pods`). A value that no pod has
    either is taken from the present spec.
    """
    spec, kept = dict(body["spec"]), applied_of(body)
    if kept is None:
        return spec
    templates = _restored_templates(kept["templates"], spec, pods)
    spec["replicaSpecs"] = [
        {**s, "template": templates[s["name"]]} if s.get("name") in templates else s for s in spec["replicaSpecs"]
    ]
    spec["nprocPerNode"] = kept["nprocPerNode"]
    return _with_container(spec, kept)


def needs_pods(body: Mapping[str, Any]) -> bool:
    """Whether values of variables were edited since the templates took effect, so that only pods have the former values."""
    kept, now = applied_of(body), _templates_of(mapping(body.get("spec")))
    return kept is not None and any(
        misses_values(template, values_of([now.get(name)])) for name, template in kept["templates"].items()
    )


def _restored_templates(templates: Spec, spec: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> Spec:
    now = _templates_of(spec)
    return {
        name: restored(
            template, values_of([now.get(name), *(pod for pod in pods if labels_of(pod).get(LABEL_SPEC) == name)])
        )
        for name, template in templates.items()
    }


def _templates_of(spec: Mapping[str, Any]) -> Spec:
    return {text(s.get("name")): s.get("template") for s in mappings(spec.get("replicaSpecs"))}


def pending_edits(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the fields whose edits have not taken effect yet."""
    kept = applied_of(body)
    if kept is None:
        return ()
    spec = mapping(body.get("spec"))
    found = [] if spec.get("nprocPerNode") == kept["nprocPerNode"] else ["spec.nprocPerNode"]
    if _container_of(kept, spec) != _container_in(spec):
        found.append("spec.elastipod.container")
    for s in mappings(spec.get("replicaSpecs")):
        if s.get("name") in kept["templates"] and redacted(s.get("template")) != redacted(kept["templates"][s["name"]]):
            found.append(f"spec.replicaSpecs[{s['name']}].template")
    return tuple(found)


def changed_specs(body: Mapping[str, Any]) -> str:
    """Say that the replicaSpecs differ from those that the job began with; empty if they do not."""
    kept = applied_of(body)
    names = [s.get("name") for s in mappings(mapping(body.get("spec")).get("replicaSpecs"))]
    if kept is None or sorted(map(str, names)) == sorted(kept["templates"]):
        return ""
    before = ", ".join(sorted(kept["templates"]))
    return (
        f"spec.replicaSpecs were {before} when the job began and cannot be changed; delete the job and create it again"
    )
