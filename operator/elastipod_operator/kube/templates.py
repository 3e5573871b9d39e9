"""Checks of pod templates that their schema cannot make. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..api import JobSpec
from ..core.sizes import SizeError
from .containers import agent_container
from .reading import mapping

# Resources that torch counts as devices when nprocPerNode is auto or gpu.
DEVICE = re.compile(r"/(gpu|neuron|neuroncore|neurondevice|gaudi)$")
FLAG = re.compile(r"--nproc[-_]per[-_]node(?:[= ]+)(\S+)")


def check_worker_counts(spec: JobSpec, container: str) -> None:
    """Reject templates that start different numbers of workers. Raises SizeError with one sentence."""
    counts = {s.name: _workers(spec.nproc_per_node, _container(s.template, container)) for s in spec.replica_specs}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise SizeError(
            f"the templates of spec.replicaSpecs start different numbers of workers ({said}); give all pods the same number of devices"
        )


def worker_count(spec: JobSpec, container: str) -> int | None:
    """Give the number of workers that each pod starts, or None if the spec does not say: `auto` without devices, or `cpu`."""
    said = _workers(spec.nproc_per_node, _container(spec.replica_specs[0].template, container))
    number, _, of_device = said.partition(" x ")
    return int(number) if number.isdecimal() and int(number) and " " not in of_device else None


def _workers(nproc: str, container: Mapping[str, Any]) -> str:
    """Say how many workers a container starts according to its template: `nproc`, an override, or its devices."""
    wish = _overridden(container) or nproc
    if wish not in ("auto", "gpu"):
        return wish
    resources = container.get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    devices = {key: str(value) for key, value in asked.items() if DEVICE.search(key) and str(value) != "0"}
    return " ".join(f"{value} x {key}" for key, value in sorted(devices.items())) or wish


def _overridden(container: Mapping[str, Any]) -> str:
    for entry in container.get("env") or ():
        if entry.get("name") == "NPROC_PER_NODE" and entry.get("value"):
            return str(entry["value"])
    return _in_command(container)


def _in_command(container: Mapping[str, Any]) -> str:
    """Give the worker count in the command; empty if there is none or it is a variable."""
    words: Iterable[Any] = [*(container.get("command") or ()), *(container.get("args") or ())]
    found = FLAG.search(" ".join(map(str, words)))
    return found.group(1) if found and not found.group(1).startswith("$") else ""


def _container(template: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    containers: list[Mapping[str, Any]] = (template.get("spec") or {}).get("containers") or []
    return agent_container(containers, name) or {}


def named_agent_port(template: Mapping[str, Any], container: str) -> int | None:
    """Give the port named agent of the container that runs the agent; None for none. Ports of sidecars may have that name too."""
    for port in _container(template, container).get("ports") or ():
        number = port.get("containerPort")
        if port.get("name") == "agent" and isinstance(number, int) and 0 < number < 65536:
            return number
    return None


def template_warnings(spec: JobSpec, container: str, agent_port: int) -> tuple[str, ...]:
    """Warn of settings in templates that have no effect. container: the one that runs the agent, at agent_port."""
    return tuple(
        f"spec.replicaSpecs[{s.name}].template {text}"
        for s in spec.replica_specs
        for text in _template_warnings(s.template, spec.nproc_per_node, container, agent_port)
    )


def _template_warnings(template: Mapping[str, Any], nproc: str, container: str, agent_port: int) -> Iterator[str]:
    wish = mapping(template.get("spec")).get("restartPolicy")
    if wish not in (None, "", "Never"):
        yield f"sets restartPolicy {wish}; pods run with Never, and the operator replaces them"
    if mapping(template.get("metadata")).get("finalizers"):
        yield "has metadata.finalizers, which pods do not get because nothing would remove them"
    told = _in_command(_container(template, container))
    if told.isdecimal() and nproc.isdecimal() and int(told) != int(nproc):
        yield f"starts hyperpodrun with --nproc-per-node {told}, which overrides spec.nprocPerNode {nproc}; remove one of them"
    if (port := named_agent_port(template, container)) not in (None, agent_port):
        yield (
            f"has the container port agent {port}, which has no effect: agents of all templates use port {agent_port}, which the "
            "first template or spec.elastipod.agentPort sets"
        )


def snooze_warnings(spec: JobSpec) -> tuple[str, ...]:
    """Warn of a snooze in a job that cannot grow."""
    snooze = spec.run_policy.restart_policy.scale_up_snooze_time_in_seconds
    if not snooze or spec.elastic_policy is not None:
        return ()
    return (
        f"spec.runPolicy.restartPolicy.scaleUpSnoozeTimeInSeconds {snooze} has no effect: the job has only one size; set "
        "spec.elasticPolicy with a maxReplicas above its minReplicas to let it grow",
    )
