"""What a training runtime of Kubeflow Trainer gives to its TrainJobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from elastipod_operator.kube.reading import Body, mapping, mappings, name_of, text

from .foreign_fields import GANGS, Fields

# Kubeflow's own default is the first.
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"


@dataclass
class Runtime:
    """template: of the pods that train. nodes: pods; per_node: workers in each; None if the runtime does not say."""

    template: dict[str, Any] = field(default_factory=lambda: {"spec": {"containers": [{"name": "node"}]}})
    nodes: Any = None
    per_node: Any = None


def runtime_of(reference: Fields, namespace: str, runtimes: Sequence[Body]) -> Runtime:
    """Give what the runtime of a job gives. runtimes: those of the file. namespace: of the job, "" if unknown."""
    name, kind = text(reference.take("name")), text(reference.take("kind")) or RUNTIMES[0]
    reference.take("apiGroup")
    reference.finish()
    named = [one for one in runtimes if name_of(one) == name and one.get("kind") == kind]
    found = [one for one in named if kind == RUNTIMES[0] or _is_in(one, namespace)]
    if not found:
        reference.lost.append(
            f"{reference.path}: {kind} {name} is not in the file, so its pod template and its numbers of pods and workers "
            "are not converted; add its manifest to FILE"
        )
        return Runtime()
    if len(found) > 1:
        reference.lost.append(f"{reference.path}: the file has {kind} {name} more than once; the last one is converted")
    return _converted(Fields(f"{kind}/{name}.spec", dict(mapping(found[-1].get("spec"))), reference.lost))


def _is_in(runtime: Body, namespace: str) -> bool:
    """Whether a TrainingRuntime is of a job's namespace, as far as the manifests say."""
    own = text(mapping(runtime.get("metadata")).get("namespace"))
    return not own or not namespace or own == namespace


def _converted(spec: Fields) -> Runtime:
    made = Runtime()
    policy = spec.block("mlPolicy")
    made.nodes = policy.take("numNodes")
    torch = policy.block("torch")
    made.per_node = torch.take("numProcPerNode")
    torch.lose("elasticPolicy", "write it into spec.elasticPolicy, with minReplicas and maxReplicas")
    torch.finish()
    policy.lose("mpi", "hyperpodrun starts the workers, without mpirun")
    policy.finish()
    spec.lose("podGroupPolicy", GANGS)
    template = spec.block("template")
    job_set = template.block("spec")
    listed = mappings(job_set.take("replicatedJobs"))
    job_set.finish()
    template.finish()
    spec.finish()
    trains = next((one for step in (_is_labelled, _is_named) for one in listed if step(one)), None)
    for one in listed:
        path = f"{job_set.path}.replicatedJobs[{text(one.get('name'))}]"
        if one is trains:
            made.template = _template(Fields(path, dict(one), spec.lost)) or made.template
        else:
            spec.lost.append(
                f"{path}: only the pods that train are converted; do its work in an init container, or before"
            )
    return made


def _is_labelled(job: Body) -> bool:
    labels = mapping(mapping(mapping(job.get("template")).get("metadata")).get("labels"))
    return labels.get(STEP_LABEL) == "trainer"


def _is_named(job: Body) -> bool:
    return job.get("name") == "node"


def _template(job: Fields) -> dict[str, Any]:
    """Give the pod template of the replicated job that trains; empty if it has no containers."""
    job.take("name")
    if job.body.get("replicas") in (None, 1):
        job.take("replicas")
    outer = job.block("template")
    metadata = outer.block("metadata")
    labels = metadata.block("labels")
    labels.take(STEP_LABEL)
    labels.finish()
    metadata.finish()
    inner = outer.block("spec")
    inner.lose("backoffLimit", "set spec.runPolicy.jobMaxRetryCount, which counts recoveries")
    template = inner.block("template")
    made = {key: deepcopy(value) for key in ("metadata", "spec") if (value := template.take(key))}
    for block in (template, inner, outer, job):
        block.finish()
    return made if mappings(mapping(made.get("spec")).get("containers")) else {}
