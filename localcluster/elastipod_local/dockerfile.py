"""Reads a Dockerfile into stages and instructions. Pure: text in, records out; `imagebuild` carries them out.

Understood are the instructions and forms that images of this project need; anything else is refused by name, because an
instruction that is quietly left out would make an image that differs from the one that `docker build` makes.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from elastipod_local.errors import LocalClusterError


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. words: its arguments (for RUN the command as one word); flags: its --name=value options."""

    name: str
    words: tuple[str, ...]
    line: int
    flags: tuple[tuple[str, str], ...] = ()

    def flag(self, name: str) -> str | None:
        return dict(self.flags).get(name)


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and what follows it. base: another stage's name or an image's."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


KNOWN_FLAGS: Mapping[str, frozenset[str]] = {"COPY": frozenset({"from", "chown"})}
EXEC_FORM_ONLY = frozenset({"ENTRYPOINT", "CMD"})
KNOWN = frozenset({"FROM", "RUN", "COPY", "ENV", "ARG", "WORKDIR", "USER", "LABEL", "EXPOSE"}) | EXEC_FORM_ONLY


def parse(text: str) -> dict[str, Stage]:
    """Give the stages by name (their number where they have none), in their order.

    Raises LocalClusterError with the line's number for what is not understood.
    """
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    for instruction in _instructions(text):
        if instruction.name == "FROM":
            base, name = _from(instruction, len(stages))
            stages[name] = Stage(name, expand(base, arguments), ())
        elif instruction.name == "ARG" and not stages:
            arguments |= pairs(instruction.words)  # their defaults; they are for FROM alone
        elif not stages:
            raise LocalClusterError(
                f"Dockerfile line {instruction.line}: {instruction.name} stands before the first FROM"
            )
        else:
            last = next(reversed(stages.values()))
            stages[last.name] = Stage(last.name, last.base, (*last.instructions, instruction))
    return stages


def needed(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """Give the stages that `target` is built from, in the order of building, itself last."""
    if target not in stages:
        raise LocalClusterError(f"the Dockerfile has no stage {target!r}; it has {', '.join(stages)}")
    names: list[str] = []

    def visit(name: str) -> None:
        if name in names or name not in stages:
            return
        stage = stages[name]
        visit(stage.base)
        for instruction in stage.instructions:
            visit(instruction.flag("from") or "")
        names.append(name)

    visit(target)
    return [stages[name] for name in names]


def expand(text: str, values: Mapping[str, str]) -> str:
    """Put values in place of $NAME, ${NAME} and ${NAME:-default}; an unknown name is empty, as in docker build."""

    def value(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        return values.get(name) or match["default"] or ""

    return re.sub(r"\$(?:(?P<plain>\w+)|\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\})", value, text)


def pairs(words: tuple[str, ...]) -> dict[str, str]:
    """Read NAME=value words, as of ENV, LABEL and ARG; an ARG without a value gives an empty one."""
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _from(instruction: Instruction, number: int) -> tuple[str, str]:
    match instruction.words:
        case (base,):
            return base, str(number)
        case (base, keyword, name) if keyword.upper() == "AS":
            return base, name
    raise LocalClusterError(f"Dockerfile line {instruction.line}: expected FROM image [AS name]")


def _instructions(text: str) -> list[Instruction]:
    found = []
    for line, logical in _logical_lines(text):
        name, _, rest = logical.partition(" ")
        name = name.upper()
        if name not in KNOWN:
            raise LocalClusterError(
                f"Dockerfile line {line}: {name} is not understood; known are {', '.join(sorted(KNOWN))}"
            )
        found.append(_instruction(name, rest.strip(), line))
    return found


def _instruction(name: str, rest: str, line: int) -> Instruction:
    flags = []
    while match := re.match(r"--([a-z-]+)(?:=(\S+))?\s+", rest):
        if match[1] not in KNOWN_FLAGS.get(name, frozenset()):
            raise LocalClusterError(f"Dockerfile line {line}: {name} --{match[1]} is not understood")
        flags.append((match[1], match[2]))
        rest = rest[match.end() :]
    if name in EXEC_FORM_ONLY:
        return Instruction(name, _exec_form(name, rest, line), line, tuple(flags))
    words = (rest,) if name == "RUN" else tuple(shlex.split(rest))
    if not words or not words[0] or (name == "RUN" and rest.startswith(("[", "<<"))):
        raise LocalClusterError(f"Dockerfile line {line}: this form of {name} is not understood")
    return Instruction(name, words, line, tuple(flags))


def _exec_form(name: str, rest: str, line: int) -> tuple[str, ...]:
    try:
        words = json.loads(rest)
    except ValueError as wrong:
        raise LocalClusterError(f'Dockerfile line {line}: write {name} in the form ["word", "word"]') from wrong
    return tuple(str(word) for word in words)


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Join continued lines and drop comments (also those between continued lines); gives (line number, text)."""
    joined: list[tuple[int, str]] = []
    parts: list[str] = []
    began = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("#") or (not line and not parts):
            continue
        began = began if parts else number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            joined.append((began, " ".join(filter(None, parts))))
            parts = []
    if parts:
        joined.append((began, " ".join(filter(None, parts))))
    return joined
