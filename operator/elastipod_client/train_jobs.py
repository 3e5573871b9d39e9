"""Converts the spec of Kubeflow's TrainJob, with what its runtime adds to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from elastipod_operator.kube.reading import Body, mapping

from .foreign_fields import Fields
from .launch_command import launched, training_container
from .pytorch_jobs import Converted
from .training_runtimes import Runtime, runtime_of

NO_IMAGE = "SET-AN-IMAGE"


def of_train_job(spec: Fields, namespace: str, runtimes: Sequence[Body]) -> Converted:
    """Give the spec without its parts, its run policy, and its one group of replicas. namespace: of the job, "" if unknown."""
    runtime = runtime_of(spec.block("runtimeRef"), namespace, runtimes)
    template = runtime.template
    per_node, nodes = _trainer(spec.block("trainer"), training_container(template), runtime)
    per_node = launched(template, "spec.trainer", spec.lost, per_node)
    run = {key: value for key in ("suspend", "activeDeadlineSeconds") if (value := spec.take(key)) is not None}
    spec.lose("initializer", "load data and model in an init container of the template, or before the job")
    for overrides in ("podTemplateOverrides", "podSpecOverrides", "runtimePatches"):
        spec.lose(overrides, "write it into spec.replicaSpecs[0].template")
    spec.lose("managedBy", "the operator manages every HyperPodPyTorchJob")
    for labels in ("labels", "annotations"):
        _add_to_metadata(template, labels, mapping(spec.take(labels)))
    return {"nprocPerNode": str(per_node or "auto")}, run, [{"name": "node", "replicas": nodes, "template": template}]


def _trainer(trainer: Fields, container: dict[str, Any], runtime: Runtime) -> tuple[Any, Any]:
    """Write the trainer's fields into its container; gives the workers in each pod, and the pods."""
    for name in ("image", "command", "args"):
        if (value := trainer.take(name)) is not None:
            container[name] = deepcopy(value)
    if added := trainer.take("env"):
        container["env"] = [*(container.get("env") or ()), *deepcopy(added)]
    if resources := trainer.take("resourcesPerNode"):
        container["resources"] = deepcopy(resources)
    if not container.get("image"):
        container["image"] = NO_IMAGE
        trainer.lost.append(f"{trainer.path}.image: neither the job nor a runtime has one; replace {NO_IMAGE}")
    nodes, per_node = trainer.take("numNodes"), trainer.take("numProcPerNode")
    trainer.finish()
    return per_node or runtime.per_node, nodes or runtime.nodes or 1


def _add_to_metadata(template: dict[str, Any], name: str, added: Body) -> None:
    """Add labels or annotations to those of the template."""
    if added:
        metadata = dict(mapping(template.get("metadata")))
        template["metadata"] = {**metadata, name: {**mapping(metadata.get(name)), **deepcopy(dict(added))}}
