"""Why a pod does not start, or how it ended, as a reason and a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.quoted_output import quote_output
from ..core.reasons import NO_REASON, Reason, ReasonAndMessage
from ..core.snapshot import NOT_CONSIDERED, ObservedContainer
from .containers import statuses_by_name
from .reading import mapping, mappings, shortened, text

PULL_PROBLEMS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
START_PROBLEMS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


def pod_problem(
    pod: str,
    status: Mapping[str, Any],
    mine: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Any]],
    fact: ObservedContainer | None,
) -> ReasonAndMessage:
    if status.get("phase") in ("Failed", "Succeeded") or (fact is not None and fact.ended):
        return Reason.CONTAINER_ENDED, _how_it_ended(pod, status, mine)
    if fact is not None and fact.is_restarting:
        last = _ended(mine) or mapping(mapping(mine.get("lastState")).get("terminated"))
        how = _one_end(f"container {mine.get('name')} of pod {pod}", last)
        return Reason.CONTAINER_ENDED, f"{how}; its kubelet restarts it"
    first = statuses_by_name(status.get("initContainerStatuses"))
    for name, container in {**first, **states, text(mine.get("name")): mine}.items():
        waiting = mapping(mapping(container.get("state")).get("waiting"))
        reason, message = text(waiting.get("reason")), text(waiting.get("message"))
        if reason in PULL_PROBLEMS:
            image = shortened(container.get("image"))
            what = f"image {image} of pod {pod} cannot be pulled ({reason}: {shortened(message)})"
            return Reason.IMAGE_PULL_FAILED, f"{what}; check its name, its tag and the pull secret"
        if reason in START_PROBLEMS:
            return (
                Reason.CONTAINER_CANNOT_START,
                f"container {name} of pod {pod} cannot be started ({reason}): {shortened(message)}",
            )
    for condition in mappings(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return Reason.UNSCHEDULABLE, shortened(condition.get("message") or "not scheduled yet")
    return NO_REASON, ""


def scheduler_problem(pod: str, spec: Mapping[str, Any], status: Mapping[str, Any]) -> ReasonAndMessage:
    """Say that no scheduler has considered a pod: a scheduler that has sets condition PodScheduled, even if no node fits."""
    is_known = any(c.get("type") == "PodScheduled" for c in mappings(status.get("conditions")))
    if is_known or spec.get("nodeName") or (status.get("phase") or "Pending") != "Pending":
        return NO_REASON, ""
    wanted = shortened(text(spec.get("schedulerName")) or "default-scheduler")
    return NOT_CONSIDERED, (
        f"no scheduler has considered pod {pod}: {wanted}, which its schedulerName names, does not exist, does not run or is slow; "
        "start that scheduler, or change spec.replicaSpecs[].template.spec.schedulerName"
    )


def was_considered(status: Mapping[str, Any]) -> bool:
    """Whether a scheduler has considered a pod. That it is gated is said by the API server."""
    told = (one for one in mappings(status.get("conditions")) if one.get("type") == "PodScheduled")
    return any(one.get("reason") != "SchedulingGated" for one in told)


def _how_it_ended(pod: str, status: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    if status.get("reason"):  # its node ended it, which explains how its containers ended
        told = [text(status[part]) for part in ("reason", "message") if status.get(part)]
        return f"pod {pod} ended: {shortened(': '.join(told))}"
    for first in mappings(status.get("initContainerStatuses")):
        if _ended(first).get("exitCode"):
            return _one_end(f"init container {first.get('name')} of pod {pod}", _ended(first))
    if not _ended(mine):
        return f"pod {pod} ended: {shortened(status.get('message') or 'no reason given')}"
    how = _one_end(f"container {mine.get('name')} of pod {pod}", _ended(mine))
    if _ended(mine).get("reason") == "OOMKilled":
        return how
    return f"{how}; its command must start hyperpodrun, which stays until the job ends"


def _ended(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(container.get("state")).get("terminated"))


def _one_end(what: str, ended: Mapping[str, Any]) -> str:
    if ended.get("reason") == "OOMKilled":
        return f"{what} was killed for using more memory than its limit; raise resources.limits.memory"
    said = f": {quote_output(shortened(ended['message']))}" if ended.get("message") else ""
    return f"{what} ended with exit code {shortened(ended.get('exitCode'), 20)}{said}"
