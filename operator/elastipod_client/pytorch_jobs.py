"""Converts the spec of Kubeflow's PyTorchJob. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from .foreign_fields import GANGS, Fields, UnknownJobError
from .launch_command import launched

# What the operator gives by itself, so nothing is lost.
_NOT_NEEDED = ("rdzvBackend", "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone")
Converted = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]


def of_pytorch_job(spec: Fields) -> Converted:
    """Give the spec without its parts, its run policy, and its groups of replicas. Raises UnknownJobError without replicas."""
    groups = spec.block("pytorchReplicaSpecs")
    elastic = spec.block("elasticPolicy")
    run = _run_policy(spec.block("runPolicy"))
    per_node = spec.take("nprocPerNode") or elastic.take("nProcPerNode")
    elastic.take("nProcPerNode")
    found: list[dict[str, Any]] = []
    for name in ("Master", "Worker"):
        group = groups.block(name)
        if not group.body:
            continue
        count, template = group.take("replicas"), deepcopy(group.take("template")) or {}
        restart = group.take("restartPolicy")
        if restart == "Never":
            run["jobMaxRetryCount"] = 0
        elif restart == "ExitCode":
            spec.lost.append(
                f"{group.path}.restartPolicy: exit codes are not told apart; log rules can name fatal errors"
            )
        group.finish()
        per_node = launched(template, f"{group.path}.template", spec.lost, per_node)
        found.append({"name": name.lower(), "replicas": 1 if count is None else count, "template": template})
    groups.finish()
    if not found:
        raise UnknownJobError("spec.pytorchReplicaSpecs has neither Master nor Worker")
    if len(found) == 2 and found[0]["template"] == found[1]["template"]:
        found = [{**found[1], "replicas": found[0]["replicas"] + found[1]["replicas"]}]
        before: int = 1
    else:
        before = found[0]["replicas"] if len(found) == 2 else 0
    made: dict[str, Any] = {"nprocPerNode": str(per_node or "auto")}
    if elastic.body:
        made["elasticPolicy"] = _elastic_policy(elastic, found, before, run)
    return made, run, found


def _elastic_policy(
    elastic: Fields, groups: Sequence[dict[str, Any]], before: int, run: dict[str, Any]
) -> dict[str, Any]:
    """Convert the bounds, which count workers; before: replicas of the master, which ours count too."""
    total = sum(group["replicas"] for group in groups)
    low, high = elastic.take("minReplicas"), elastic.take("maxReplicas")
    restarts = elastic.take("maxRestarts")
    if restarts is not None:
        run.setdefault("jobMaxRetryCount", restarts)
    for name in _NOT_NEEDED:
        elastic.take(name)
    elastic.lose(
        "metrics", "make a HorizontalPodAutoscaler whose target is the job: it moves the ceiling spec.replicas"
    )
    elastic.finish()
    most = total if high is None else high + before
    groups[-1]["maxReplicas"] = most - (total - groups[-1]["replicas"])
    return {"minReplicas": total if low is None else low + before, "maxReplicas": most}


def _run_policy(run: Fields) -> dict[str, Any]:
    """Convert the fields that mean the same; the rest is named."""
    names = {
        "cleanPodPolicy": "cleanPodPolicy",
        "ttlSecondsAfterFinished": "ttlSecondsAfterFinished",
        "suspend": "suspend",
    }
    names |= {"activeDeadlineSeconds": "activeDeadlineSeconds", "backoffLimit": "jobMaxRetryCount"}
    made = {ours: value for theirs, ours in names.items() if (value := run.take(theirs)) is not None}
    run.lose("schedulingPolicy", GANGS)
    run.lose("managedBy", "the operator manages every HyperPodPyTorchJob")
    run.finish()
    return made
