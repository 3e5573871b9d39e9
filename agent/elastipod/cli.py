"""The command `elastipod`: imports the module of a subcommand and calls its ``main`` with the arguments.

Only that module is imported, so `elastipod audit` works in an image without the operator's packages, and the operator's
image needs no torch.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from elastipod.distribution import SLIM, checkout_advice, distribution, install_advice, installed_version


@dataclass(frozen=True)
class Command:
    """One subcommand: the module with its ``main(argv)``, its summary, the extra that installs it, the oldest Python."""

    module: str
    summary: str
    extra: str | None = None
    python: tuple[int, int] = (3, 10)


COMMANDS = {
    "agent": Command(
        "elastipod_agent.status_command", "show the state of the agent and workers of this pod (agent status)"
    ),
    "audit": Command(
        "elastipod.audit.command", "check from the sample logs of a job that every sample was trained exactly once"
    ),
    "bundle": Command(
        "elastipod_client.bundle",
        "write an archive that explains a job; what looks like a secret is removed",
        python=(3, 11),
    ),
    "checkpoint": Command(
        "elastipod.checkpoint.export_command",
        "write the weights of a checkpoint to a safetensors file (checkpoint export)",
        "export",
    ),
    "completion": Command("elastipod_client.completion", "print the completion script of a shell", python=(3, 11)),
    "doctor": Command(
        "elastipod_client.doctor", "check the cluster, the operator and its rights, Kueue and quotas", python=(3, 11)
    ),
    "import": Command(
        "elastipod_client.import_command", "print the job of a Kubeflow PyTorchJob or TrainJob", "cli", (3, 11)
    ),
    "local": Command(
        "elastipod_local.cli",
        "run a real Kubernetes cluster on this machine (up, down, status, node)",
        "local",
        (3, 11),
    ),
    "logs": Command("elastipod_client.logs", "print the logs of a job, or of its first failure", python=(3, 11)),
    "operator": Command(
        "elastipod_operator.app", "run the operator, as the Deployment of the Helm chart does", "operator", (3, 11)
    ),
    "recipe": Command(
        "elastipod.recipes.recipe_command",
        "render the job of a HyperPod recipe, with the configuration of every size",
        "recipes",
    ),
    "resume": Command("elastipod_client.resume", "let a suspended job train again", python=(3, 11)),
    "scale": Command("elastipod_client.scale", "set the largest size of a job", python=(3, 11)),
    "sizes": Command(
        "elastipod_operator.sizes_command",
        "show the sizes at which a job may train, with the quota of each",
        "operator",
        (3, 11),
    ),
    "suspend": Command("elastipod_client.suspend", "stop the workers of a job after a checkpoint", python=(3, 11)),
    "timeline": Command(
        "elastipod_client.timeline", "show when and why a job changed its size, and where its time went", python=(3, 11)
    ),
    "tokens": Command(
        "elastipod.data.tokens_command", "build token files from text for training, and show what they contain"
    ),
    "watch": Command("elastipod_client.watch", "show a job live until it ends", python=(3, 11)),
    "why": Command("elastipod_client.why", "say what a job does, what it waits for, and what to do", python=(3, 11)),
}

USAGE_ERROR = 2
OUTPUTS = (1, 2)  # file descriptors
# Packages that images for training do not need.
NOT_IN_IMAGES = ("elastipod_client", "elastipod_local", "elastipod_operator")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and give its exit status: 0 success, 1 a negative result or an error, 2 wrong usage or a missing package.

    A command whose reader has gone, as in `elastipod watch JOB | grep -m1 Running`, ends quietly: with 0 if it still ran.
    """
    try:
        return _main(argv)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # a connection of the command broke
        return 0
    finally:
        _finish_output()


def _main(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if args else USAGE_ERROR
    if args[0] == "--version":
        print(f"elastipod {_version()}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        print(f"elastipod: no command {name!r}; commands are: {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE_ERROR
    return _run(name, COMMANDS[name], rest)


def _reader_is_gone() -> bool:
    """Whether the program behind the pipe of standard output or standard error has ended."""
    outputs = select.poll()
    for descriptor in OUTPUTS:
        outputs.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in outputs.poll(0))


def _finish_output() -> None:
    """Write what is left. What nobody reads is dropped here, because Python would complain about it at its end."""
    for stream, descriptor in zip((sys.stdout, sys.stderr), OUTPUTS, strict=True):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def help_text() -> str:
    """Give the text of ``elastipod --help``."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: elastipod COMMAND ...",
            "",
            "Elastic PyTorch training on Kubernetes: jobs that grow, shrink and recover without losing their place in the data.",
            "",
            "commands:",
            *lines,
            "",
            "`elastipod COMMAND --help` explains one command. In a pod, `hyperpodrun` starts the training script",
            "in place of torchrun; `hyperpodrun --help` lists its options.",
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
        print(f"elastipod {name}: {_remedy(command, missing.name or '')}", file=sys.stderr)
        return USAGE_ERROR
    return part(argv) or 0


def _remedy(command: Command, missing: str) -> str:
    if distribution() == SLIM and missing.partition(".")[0] in NOT_IN_IMAGES:
        return f"the wheel {SLIM} has no such command; on your own machine, {checkout_advice(None)}"
    return f"this installation lacks the package {missing!r}; {install_advice(command.extra)}"


def _version() -> str:
    return installed_version(distribution()) or "(not installed; run from source)"


if __name__ == "__main__":
    sys.exit(main())
