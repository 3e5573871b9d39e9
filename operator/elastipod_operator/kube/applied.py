"""What of the spec must outlive an edit, kept in an annotation. Pure.

templates and nprocPerNode act only when a job is suspended and resumed: pods that are made while a job runs are like those
that run with them, whatever the template says by now. `rest` is all else of the last spec that could be used: it stays in
force while an edit cannot be used. Values of variables are not kept (redaction.py).
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
# Whoever may edit the job may write anything there; nothing of ours unpacks to more (`limits.MAX_TEMPLATE_BYTES`).
MAX_UNPACKED = 256 * 1024
# Each template and each field of the rest stands so many levels within the whole, at most.
MAX_KEPT_DEPTH = MAX_DEPTH + 4
# Of what is kept as it was read, of all jobs together: characters, which may take ten times as many bytes.
APPLIED_KEPT = 4 << 20


def encode_applied(spec: Mapping[str, Any]) -> str:
    """Give the annotation's text for the templates and worker counts of a spec as it is now."""
    return _packed({**_taken_up(spec), "rest": _rest_of(spec)})


def applied_annotation(body: Mapping[str, Any], *, adopts_spec: bool, room: int) -> str | None:
    """Give the annotation's new text for a job whose spec can be used; None where it stands as it is.

    adopts_spec: templates and worker counts act as they are now. room: so many bytes are left for it; where all that does not
    fit, the templates alone are kept.
    """
    spec, kept = body["spec"], applied_of(body)
    rest = _rest_of(spec)
    if kept is not None and not adopts_spec and kept.get("rest") == rest and kept.get("uid"):
        return None
    taken = (
        _taken_up(spec) if kept is None or adopts_spec else {name: kept[name] for name in ("nprocPerNode", "templates")}
    )
    taken["uid"] = uid_of(body)
    whole = _packed({**taken, "rest": rest})
    return whole if len(whole) <= room else _packed(taken)


def last_good_spec(body: Mapping[str, Any]) -> Spec | None:
    """Give the last spec of a job that could be used; None where it is not known.

    A wish to suspend acts also in an edit that cannot be used; one to resume waits until the edit is put right.
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
    good = {**rest, "nprocPerNode": kept["nprocPerNode"], "replicaSpecs": specs}
    if mapping(mapping(body.get("spec")).get("runPolicy")).get("suspend") is True:
        good["runPolicy"] = {**mapping(rest.get("runPolicy")), "suspend": True}
    return good


def _taken_up(spec: Mapping[str, Any]) -> Spec:
    templates = {s["name"]: redacted(s.get("template")) for s in spec.get("replicaSpecs") or ()}
    return {"nprocPerNode": spec.get("nprocPerNode"), "templates": templates}


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
    """Read the annotation of a job; None when there is none that can be read."""
    kept = any_applied_of(body)
    return kept if kept is not None and is_own(text(kept.get("uid")), body) else None


def any_applied_of(body: Mapping[str, Any]) -> Spec | None:
    """Read the annotation, for whatever object it was written."""
    packed = annotations_of(body).get(ANNOTATION_APPLIED)
    return _decoded(packed) if packed else None


def effective_spec(body: Mapping[str, Any], pods: Sequence[Mapping[str, Any]] = ()) -> Spec:
    """Give the spec from which pods are made: the user's, with templates and worker count as they were taken up.

    pods: some of the job's, from which values of variables are taken that the spec no longer has (see `needs_pods`). Where
    no pod has them either, the variables are as in the present spec.
    """
    spec, kept = dict(body["spec"]), applied_of(body)
    if kept is None:
        return spec
    templates = _restored_templates(kept["templates"], spec, pods)
    spec["replicaSpecs"] = [
        {**s, "template": templates[s["name"]]} if s.get("name") in templates else s for s in spec["replicaSpecs"]
    ]
    spec["nprocPerNode"] = kept["nprocPerNode"]
    return spec


def needs_pods(body: Mapping[str, Any]) -> bool:
    """Whether values of variables were edited since templates were taken up, so that only pods still have the former ones."""
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
    """Name the fields that were edited since; empty when there are none."""
    kept = applied_of(body)
    if kept is None:
        return ()
    spec = mapping(body.get("spec"))
    found = [] if spec.get("nprocPerNode") == kept["nprocPerNode"] else ["spec.nprocPerNode"]
    for s in mappings(spec.get("replicaSpecs")):
        if s.get("name") in kept["templates"] and redacted(s.get("template")) != redacted(kept["templates"][s["name"]]):
            found.append(f"spec.replicaSpecs[{s['name']}].template")
    return tuple(found)


def changed_specs(body: Mapping[str, Any]) -> str:
    """Say that the replicaSpecs are others than those that the job began with; empty when they are the same."""
    kept = applied_of(body)
    names = [s.get("name") for s in mappings(mapping(body.get("spec")).get("replicaSpecs"))]
    if kept is None or sorted(map(str, names)) == sorted(kept["templates"]):
        return ""
    before = ", ".join(sorted(kept["templates"]))
    return f"spec.replicaSpecs were {before} when the job began and cannot be others; delete the job and create it anew"
