"""Converts Kubeflow's PyTorchJob and TrainJob to a HyperPodPyTorchJob. Pure.

What has a counterpart is converted, what has none is named. A field that is not known here counts as not converted: nothing is
dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from elastipod_operator.core.names import API_VERSION, KIND
from elastipod_operator.kube.reading import Body, mapping, mappings, text

from .foreign_fields import Fields, UnknownJobError
from .launch_command import training_container
from .pytorch_jobs import of_pytorch_job
from .train_jobs import of_train_job

PYTORCH_JOB, TRAIN_JOB = ("kubeflow.org", "PyTorchJob"), ("trainer.kubeflow.org", "TrainJob")


def convert(job: Mapping[str, Any], runtimes: Sequence[Body]) -> tuple[dict[str, Any], list[str]]:
    """Give the job, and a sentence for each thing that could not be converted. runtimes: of Kubeflow Trainer.

    Raises UnknownJobError for a manifest of another kind, and for one without replicas.
    """
    kind = (text(job.get("apiVersion")).partition("/")[0], text(job.get("kind")))
    lost: list[str] = []
    spec = Fields("spec", dict(mapping(job.get("spec"))), lost)
    head = mapping(job.get("metadata"))
    if kind == PYTORCH_JOB:
        parts = of_pytorch_job(spec)
    elif kind == TRAIN_JOB:
        parts = of_train_job(spec, text(head.get("namespace")), runtimes)
    else:
        raise UnknownJobError(
            f"{kind[1] or 'an object without a kind'} of {kind[0] or 'no group'} cannot be converted; a PyTorchJob of kubeflow.org "
            "and a TrainJob of trainer.kubeflow.org can"
        )
    spec.finish()
    kept = {
        key: deepcopy(head[key])
        for key in ("name", "generateName", "namespace", "labels", "annotations")
        if head.get(key)
    }
    kept.get("annotations", {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": kept, "spec": _finished(*parts)}, sorted(lost)


def _finished(made: dict[str, Any], run: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if run:
        made["runPolicy"] = run
    first = mappings(mapping(groups[0]["template"].get("spec")).get("containers"))
    agent = text(training_container(groups[0]["template"]).get("name"))
    if first and first[0].get("name") != agent:
        made["elastipod"] = {"container": agent}
    return {**made, "replicaSpecs": list(groups)}
