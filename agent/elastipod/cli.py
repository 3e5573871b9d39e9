"""The command `elastipod`: finds the part that a subcommand belongs to and hands the arguments on.

Only the part that is asked for is imported, so that `elastipod audit` works in an image without the operator's
packages, and the operator's image needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Command:
    """One subcommand: where its `main(argv)` lives, what it does, which extra installs it and which Python it needs."""

    module: str
    summary: str
    extra: str | None = None
    python: tuple[int, int] = (3, 10)


COMMANDS = {
    "agent": Command("elastipod_agent.status_command", "inside a pod: what its agent and workers do (agent status)"),
    "audit": Command(
        "elastipod.audit.report", "check from the sample logs of a run that every sample was trained exactly once"
    ),
    "local": Command(
        "elastipod_local.cli", "a real Kubernetes cluster on this machine: up, down, status, node", "local", (3, 11)
    ),
    "operator": Command(
        "elastipod_operator.app", "run the operator (what the chart's Deployment does)", "operator", (3, 11)
    ),
    "tokens": Command("elastipod.data.tokens_command", "make token files from text to train on, and look at them"),
}

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and give its exit status: 0 done, 1 the answer is no, 2 wrong use or a missing part."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if args else USAGE_ERROR
    if args[0] == "--version":
        print(f"elastipod {_version()}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        print(f"elastipod: no command {name!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE_ERROR
    return _run(name, COMMANDS[name], rest)


def help_text() -> str:
    """Say what each command does and how to see more of it."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: elastipod COMMAND ...",
            "",
            "Elastic PyTorch training on Kubernetes: jobs that grow, shrink and recover without losing their place.",
            "",
            "commands:",
            *lines,
            "",
            "`elastipod COMMAND --help` explains one command. In a pod, `hyperpodrun` starts the training script",
            "in the place of torchrun; `hyperpodrun --help` lists its options.",
        ]
    )


def _run(name: str, command: Command, argv: list[str]) -> int:
    if sys.version_info < command.python:
        needed, found = (".".join(map(str, version[:2])) for version in (command.python, sys.version_info))
        print(f"elastipod {name}: needs Python {needed} or newer; this is Python {found}", file=sys.stderr)
        return USAGE_ERROR
    try:
        part: Callable[[list[str]], int | None] = import_module(command.module).main
    except ModuleNotFoundError as missing:
        extra = f"'elastipod[{command.extra}]'" if command.extra else "elastipod"
        print(
            f"elastipod {name}: this installation lacks the package {missing.name!r}; install it with: pip install {extra}",
            file=sys.stderr,
        )
        return USAGE_ERROR
    return part(argv) or 0


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("elastipod")
    except PackageNotFoundError:
        return "(not installed, run from its source)"


if __name__ == "__main__":
    sys.exit(main())
