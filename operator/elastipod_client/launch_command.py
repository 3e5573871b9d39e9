"""The container that trains, and the command that starts its workers: torchrun and python become hyperpodrun. Pure."""

from __future__ import annotations

import re
from typing import Any

_LAUNCH = r"torch\.distributed\.launch"
_MODULE_OF_PYTHON = rf"python3?(?:\.\d+)?(?: -[uBO]+)* -m (?:torch\.distributed\.run|{_LAUNCH})"
_LAUNCHES = re.compile(rf"(?<![\w/.-])(?:[\w./-]*/)?(?:torchrun|{_MODULE_OF_PYTHON})(?![\w.-])")
_PYTHON_IN_A_SHELL = re.compile(r"(?<![\w/.-])(?:[\w./-]*/)?python3?(?:\.\d+)?\s")
_GAP = r"(?:\s|\\\n)+"
_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""
_OPTION = re.compile(rf"{_GAP}(--?[\w-]+)(=(?:{_WORD})?)?(?=\s|$)")
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node[=\s]\s*(\"[^\"]*\"|'[^']*'|\S+)")
# What python is told and a worker of hyperpodrun is told anyway, or does not need.
_NOT_NEEDED = re.compile(r"-[uBO]+")
# What the operator gives by itself. In a shell its variables would be empty, and the next word would be taken for the value.
_RENDEZVOUS = re.compile(r"--(nnodes|node[-_]rank|master[-_](addr|port)|rdzv[-_](endpoint|id|backend|conf))")
_FLAGS = re.compile(r"-m|--(module|no[-_]python|run[-_]path|standalone|virtual[-_]local[-_]rank|use[-_]env)")
_USE_ENV = re.compile(r"--use[-_]env")
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
        has_python = bool(words) and _SHELL.fullmatch(words[0]) and _PYTHON_IN_A_SHELL.search(" ".join(words))
        why = "its shell starts python itself" if has_python else "no torchrun and no python in its command"
        lost.append(f"{path}: {why}; have the container start hyperpodrun")
        return per_node
    container.pop("args", None)
    container["command"] = found
    line = " ".join(words)
    if not _LAUNCHES.search(line):
        return per_node if per_node not in (None, "auto") else 1
    if re.search(rf"-m {_LAUNCH}(?![\w.-])", line) and not _USE_ENV.search(line):
        lost.append(
            f"{path}: torch.distributed.launch gives --local-rank to the script, which is to read LOCAL_RANK from the environment instead"
        )
    return per_node or _written_per_node(line, path, lost)


def _with_agent(words: list[str]) -> list[str] | None:
    """Give a command line with hyperpodrun in place of what started the workers; None where nothing of the kind is in it."""
    if not words:
        return None
    if _SHELL.fullmatch(words[0]):
        made = [_launched_in_a_shell(word) for word in words]
        return made if made != words else None
    if re.fullmatch(r"(?:.*/)?torchrun", words[0]):
        return ["hyperpodrun", *words[1:]]
    if not _PYTHON.fullmatch(words[0]):
        return None
    rest = words[1:]
    while rest and _NOT_NEEDED.fullmatch(rest[0]):
        rest = rest[1:]
    if rest[:2] == ["-m", "torch.distributed.run"]:
        return ["hyperpodrun", *rest[2:]]
    if rest[:2] == ["-m", "torch.distributed.launch"]:
        return ["hyperpodrun", *_without_use_env(rest[2:])]
    if rest and rest[0].startswith("-") and rest[0] != "-m":
        return ["hyperpodrun", "--no-python", *words]  # options of python, which hyperpodrun does not have
    return ["hyperpodrun", *rest]


def _launched_in_a_shell(text: str) -> str:
    """Replace each launcher of a shell's text by hyperpodrun, without the options that it does not need."""
    made, rest = "", text
    while match := _LAUNCHES.search(rest):
        made, rest = f"{made}{rest[: match.start()]}hyperpodrun", rest[match.end() :]
        while option := _OPTION.match(rest):
            end = option.end()
            if option[2] is None and not _FLAGS.fullmatch(option[1]) and (value := re.match(_GAP + _WORD, rest[end:])):
                end += value.end()
            if not (_RENDEZVOUS.fullmatch(option[1]) or _USE_ENV.fullmatch(option[1])):
                made += rest[:end]
            rest = rest[end:]
    return made + rest


def _without_use_env(words: list[str]) -> list[str]:
    """Leave out an option that only torch.distributed.launch has, before the script; after it, it is the script's own."""
    for index, word in enumerate(words):
        if _USE_ENV.fullmatch(word):
            return words[:index] + words[index + 1 :]
        if not word.startswith("-") and not word.isdecimal():
            break
    return words


def _written_per_node(line: str, path: str, lost: list[str]) -> str | None:
    """Give the number of workers that a command line of torchrun asks for; None where it says nothing that can be read."""
    match = _PER_NODE.search(line)
    if match is None:
        return None
    asked = match[1].strip("\"'")
    if "$" in asked:
        lost.append(
            f"{path}: --nproc-per-node is {asked}, which only the pod knows; write the number there and into spec.nprocPerNode"
        )
        return None
    return asked
