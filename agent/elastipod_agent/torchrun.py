"""The installed torch's launcher: its options, and running it. Never imports torch in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from elastipod_agent.arguments import CommandLine
from elastipod_agent.options import OWN_OPTIONS, TORCHRUN_OPTIONS, Option

_LIST_OPTIONS = """
import json
from torch.distributed.run import get_args_parser
print(json.dumps([[a.option_strings, a.nargs == 0] for a in get_args_parser()._actions if a.option_strings]))
"""
_CHILD_LIMIT_S = 120


class TorchMissing(RuntimeError):
    """This interpreter has no torch that can be used."""


def installed_options() -> list[Option]:
    """Give the options of the installed torch's launcher that the table does not name; takes as long as importing torch.

    The list is empty if torch cannot be imported; an unknown option is an error then.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_OPTIONS], capture_output=True, text=True, timeout=_CHILD_LIMIT_S, check=True
        )
        listed = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
    known = {name for option in (*TORCHRUN_OPTIONS, *OWN_OPTIONS) for name in option.spellings} | {"-h", "--help"}
    return [
        Option(
            tuple(dict.fromkeys(n.replace("_", "-") for n in names)),
            kind=None if is_flag else str,
            unused="it is newer than this agent, which does not know it",
        )
        for names, is_flag in listed
        if not set(names) & known
    ]


def torchrun_arguments(command_line: CommandLine, *, has_shutdown_timeout: bool) -> list[str]:
    """Give torchrun's arguments for this command line, without hyperpodrun's own options.

    has_shutdown_timeout: the installed torch has a --shutdown-timeout with the same meaning.
    """
    ours = {option.dest for option in OWN_OPTIONS}
    if has_shutdown_timeout:
        ours.discard("shutdown_timeout")
    arguments: list[str] = []
    for option, value in command_line.given:
        if option.dest in ours or (option.dest == "rdzv_backend" and value == "hyperpod"):
            continue
        name = max(option.names, key=len)
        arguments.append(name if value is None else f"{name}={value}")
    return [*arguments, command_line.script, *command_line.script_args]


def hand_over(command_line: CommandLine) -> NoReturn:
    """Replace this process by torchrun, with torchrun's arguments. Raises TorchMissing."""
    launcher = _launcher_source()
    arguments = torchrun_arguments(
        command_line, has_shutdown_timeout='"--shutdown-timeout"' in launcher.read_text("utf-8")
    )
    _become_torchrun(arguments)


def print_completion(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by ``torchrun --print-completion``. Raises TorchMissing."""
    _launcher_source()
    _become_torchrun(arguments)


def _become_torchrun(arguments: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])  # noqa: S606  # no shell is wanted


def _launcher_source() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise TorchMissing(f"torch is not installed for {sys.executable}; install it, or use an image that has it")
    return Path(spec.origin).parent / "distributed" / "run.py"
