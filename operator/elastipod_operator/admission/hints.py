"""Hints about templates that may be right: they are given once, when a job is applied, and never become a condition. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..kube.containers import agent_container, wanted_container
from ..kube.reading import mapping, mappings, text

# Volumes that end with their pod, or that hold no checkpoints.
PASSING = frozenset({"emptyDir", "configMap", "secret", "downwardAPI", "projected", "image", "ephemeral", "name"})

Body = Mapping[str, Any]


def template_hints(spec: Body) -> Iterator[str]:
    """Give sentences about the templates of a spec."""
    specs = [(one, mapping(one.get("template"))) for one in mappings(spec.get("replicaSpecs"))]
    named, first = text(mapping(spec.get("elastipod")).get("container")), specs[0][1] if specs else {}
    wanted = wanted_container(named, first)
    for one, template in specs:
        pod = mapping(template.get("spec"))
        agent = agent_container(mappings(pod.get("containers")), wanted) or {}
        container = text(agent.get("name"))
        where = f"spec.replicaSpecs[{text(one.get('name'))}].template"
        words = [str(word) for key in ("command", "args") for word in agent.get(key) or ()]
        if words and not _may_start_agent(words):
            yield (
                f"{where} does not start hyperpodrun in container {container}, and without its agent the job never starts; put "
                "hyperpodrun in front of the script, as torchrun would be"
            )
        if not _keeps_checkpoints(pod, agent, words):
            yield (
                f"{where} mounts nothing in container {container} that outlives the pod, so checkpoints are lost with it; mount a volume "
                "that all pods share (persistentVolumeClaim, nfs, csi), or write checkpoints to a bucket"
            )


def _may_start_agent(words: list[str]) -> bool:
    """Whether the words name hyperpodrun, or a shell script that may do so."""
    return any("hyperpodrun" in word or word.endswith(".sh") or "$" in word for word in words)


def _keeps_checkpoints(pod: Body, agent: Body, words: list[str]) -> bool:
    """Whether the agent's container mounts a lasting volume, or seems to know the URL of a bucket."""
    if any("://" in word for word in words + [text(one.get("value")) for one in mappings(agent.get("env"))]):
        return True
    lasting = {text(one.get("name")) for one in mappings(pod.get("volumes")) if not PASSING.issuperset(one)}
    return any(text(one.get("name")) in lasting for one in mappings(agent.get("volumeMounts")))
