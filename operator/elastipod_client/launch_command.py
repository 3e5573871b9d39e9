"""The container that trains, and the command that starts its workers: torchrun and python become hyperpodrun. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

_LAUNCHES = re.compile(r"(?<![\w/.-])(?:torchrun|python3?(?:\.\d+)? -m torch\.distributed\.(?:run|launch))(?![\w.-])")
_PYTHON = re.compile(r"(?:.*/)?python3?(\.\d+)?")
_SHELL = re.compile(r"(?:.*/)?(ba|da)?sh")


def training_container(template: dict[str, Any]) -> dict[str, Any]:
    """Give the container that trains: the one that Kubeflow calls pytorch or node, else the first; an empty one without any."""
    spec = template.get("spec")
    listed = spec.get("containers") if isinstance(spec, dict) else None
    containers = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    named = [one for one in containers if one.get("name") in ("pytorch", "node")]
    return (named or containers or [{}])[0]


def launched(template: dict[str, Any], path: str, lost: list[str], per_node: Any) -> Any:
    """Have the training container start hyperpodrun; gives the workers in each pod.

    Plain python started one process in each pod, and so does what it becomes.
    """
    container = training_container(template)
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
