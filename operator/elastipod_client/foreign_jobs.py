"""Converts Kubeflow's PyTorchJob and TrainJob to a HyperPodPyTorchJob. Pure.

What has a counterpart is converted, what has none is named. A field that is not known here counts as not converted: nothing is
dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from elastipod_operator.core.names import API_VERSION, KIND
from elastipod_operator.kube.reading import mapping, mappings, text

PYTORCH_JOB, TRAIN_JOB = ("kubeflow.org", "PyTorchJob"), ("trainer.kubeflow.org", "TrainJob")
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
_LAUNCHES = re.compile(r"(?<![\w/.-])(?:torchrun|python3?(?:\.\d+)? -m torch\.distributed\.(?:run|launch))(?![\w.-])")
_PYTHON = re.compile(r"(?:.*/)?python3?(\.\d+)?")
_SHELL = re.compile(r"(?:.*/)?(ba|da)?sh")
# What the operator gives by itself, so nothing is lost.
_NOT_NEEDED = ("rdzvBackend", "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone")


class UnknownJobError(ValueError):
    """The manifest is of no kind that can be converted; the text says which it is."""


@dataclass
class Fields:
    """The fields of a block that are still to be converted; what is left at the end has no counterpart."""

    path: str
    body: dict[str, Any]
    lost: list[str]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str) -> Any:
        """Give a field, None if it is absent; it counts as converted."""
        self.taken.add(name)
        return self.body.get(name)

    def block(self, name: str) -> Fields:
        """Give a block below this one, empty if it is absent."""
        return Fields(f"{self.path}.{name}", dict(mapping(self.take(name))), self.lost)

    def lose(self, name: str, why: str) -> None:
        """Say that a field has no counterpart, if it is there."""
        if self.take(name) is not None:
            self.lost.append(f"{self.path}.{name}: {why}")

    def finish(self) -> None:
        """Name every field that nobody has asked for."""
        for name in self.body.keys() - self.taken:
            self.lost.append(f"{self.path}.{name}: it has no counterpart that is known here")


def convert(job: Mapping[str, Any], runtimes: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Give the job, and a sentence for each thing that could not be converted. runtimes: of Kubeflow Trainer, by name.

    Raises UnknownJobError for a manifest of another kind, and for one without replicas.
    """
    kind = (text(job.get("apiVersion")).partition("/")[0], text(job.get("kind")))
    lost: list[str] = []
    spec = Fields("spec", dict(mapping(job.get("spec"))), lost)
    if kind == PYTORCH_JOB:
        made = _of_pytorch_job(spec)
    elif kind == TRAIN_JOB:
        made = _of_train_job(spec, runtimes)
    else:
        raise UnknownJobError(
            f"{kind[1] or 'an object without a kind'} of {kind[0] or 'no group'} cannot be converted; a PyTorchJob of kubeflow.org "
            "and a TrainJob of trainer.kubeflow.org can"
        )
    spec.finish()
    head = mapping(job.get("metadata"))
    kept = {
        key: deepcopy(head[key])
        for key in ("name", "generateName", "namespace", "labels", "annotations")
        if head.get(key)
    }
    kept.get("annotations", {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": kept, "spec": made}, sorted(lost)


def _of_pytorch_job(spec: Fields) -> dict[str, Any]:
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
        per_node = _launched(template, f"{group.path}.template", spec.lost, per_node)
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
    return _finished(made, run, found)


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
    run.lose(
        "schedulingPolicy", "gangs need no scheduler of their own; for quota, label the job kueue.x-k8s.io/queue-name"
    )
    run.lose("managedBy", "the operator manages every HyperPodPyTorchJob")
    run.finish()
    return made


def _of_train_job(spec: Fields, runtimes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    name = text(mapping(spec.take("runtimeRef")).get("name"))
    runtime = mapping(mapping(runtimes.get(name)).get("spec"))
    template, policy = _runtime_template(runtime), mapping(runtime.get("mlPolicy"))
    trainer = spec.block("trainer")
    container = _container(template)
    for field_name in ("image", "command", "args", "env"):
        if (value := trainer.take(field_name)) is not None:
            container[field_name] = [*container.get("env", ()), *value] if field_name == "env" else deepcopy(value)
    if resources := trainer.take("resourcesPerNode"):
        container["resources"] = deepcopy(resources)
    if not container.get("image"):
        container["image"] = "SET-AN-IMAGE"
        spec.lost.append(
            f"spec.runtimeRef: the image comes from the runtime {name}; add its manifest to FILE, or set spec.trainer.image"
        )
    nodes, per_node = trainer.take("numNodes"), trainer.take("numProcPerNode")
    trainer.finish()
    made_of = mapping(policy.get("torch"))
    per_node = _launched(template, "spec.trainer", spec.lost, per_node or made_of.get("numProcPerNode"))
    run = {key: value for key in ("suspend", "activeDeadlineSeconds") if (value := spec.take(key)) is not None}
    spec.lose("initializer", "load data and model in an init container of the template, or before the job")
    for overrides in ("podTemplateOverrides", "podSpecOverrides", "runtimePatches"):
        spec.lose(overrides, "write it into spec.replicaSpecs[0].template")
    spec.lose("managedBy", "the operator manages every HyperPodPyTorchJob")
    for labels in ("labels", "annotations"):
        if value := spec.take(labels):
            template.setdefault("metadata", {})[labels] = deepcopy(value)
    count = nodes or policy.get("numNodes") or 1
    return _finished(
        {"nprocPerNode": str(per_node or "auto")}, run, [{"name": "node", "replicas": count, "template": template}]
    )


def _runtime_template(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Give the pod template with which a runtime trains; an empty one without a runtime."""
    for job in mappings(mapping(mapping(runtime.get("template")).get("spec")).get("replicatedJobs")):
        if job.get("name") == "node":
            template = mapping(mapping(mapping(job.get("template")).get("spec")).get("template"))
            return deepcopy({key: template[key] for key in ("metadata", "spec") if key in template})
    return {"spec": {"containers": [{"name": "node"}]}}


def _container(template: dict[str, Any]) -> dict[str, Any]:
    """Give the container that trains: the one that Kubeflow calls pytorch or node, else the first."""
    containers: list[dict[str, Any]] = template.setdefault("spec", {}).setdefault("containers", [])
    named = [one for one in containers if one.get("name") in ("pytorch", "node")]
    return (named or containers or [{}])[0]


def _launched(template: dict[str, Any], path: str, lost: list[str], per_node: Any) -> Any:
    """Have the training container start hyperpodrun; gives the workers in each pod.

    Plain python started one process in each pod, and so does what it becomes.
    """
    container = _container(template)
    words = [str(word) for word in [*(container.get("command") or ()), *(container.get("args") or ())]]
    found = _with_agent(words)
    if found is None:
        lost.append(f"{path}: no torchrun and no python in its command; have the container start hyperpodrun")
        return per_node
    container.pop("args", None)
    container["command"] = found
    if not _LAUNCHES.search(" ".join(words)):
        return per_node if per_node not in (None, "auto") else 1
    return per_node or next(_written_per_node(words), None)


def _with_agent(words: list[str]) -> list[str] | None:
    """Give a command line with hyperpodrun in place of what started the workers; None where nothing of the kind is in it."""
    if not words:
        return None
    if _SHELL.fullmatch(words[0]):
        made = [_LAUNCHES.sub("hyperpodrun", word) for word in words]
        return made if made != words else None
    if re.fullmatch(r"(?:.*/)?torchrun", words[0]):
        return ["hyperpodrun", *words[1:]]
    if not _PYTHON.fullmatch(words[0]):
        return None
    rest = words[1:]
    while rest and rest[0] in ("-u", "-B", "-O"):
        rest = rest[1:]
    if rest[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
        rest = rest[2:]
    return ["hyperpodrun", *rest]


def _written_per_node(words: Sequence[str]) -> Iterator[str]:
    """Give the number of workers that a command line of torchrun asks for."""
    for match in re.finditer(r"--nproc[-_]per[-_]node[= ](\S+)", " ".join(words)):
        yield match[1]


def _finished(made: dict[str, Any], run: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if run:
        made["runPolicy"] = run
    first = mappings(mapping(groups[0]["template"].get("spec")).get("containers"))
    agent = text(_container(groups[0]["template"]).get("name"))
    if first and first[0].get("name") != agent:
        made["elastipod"] = {"container": agent}
    return {**made, "replicaSpecs": list(groups)}
