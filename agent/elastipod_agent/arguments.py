"""The command line: torchrun's options, hyperpodrun's own, and the user's script with its arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from elastipod_agent.options import OWN_OPTIONS, TORCHRUN_OPTIONS, Option
from elastipod_agent.workers.failure import write_termination_message

PROG = "hyperpodrun"
EPILOG = """\
examples:
  hyperpodrun --nproc-per-node=auto train.py --lr 1e-3
  hyperpodrun --nproc-per-node=8 --tee=3 --log-dir=/shared/logs -m my_package.train
  hyperpodrun --pre-train-script=stage-data.sh --shutdown-signal=SIGTERM train.py

Options may be written with dashes or underscores and abbreviated if unambiguous. PET_<OPTION> in the environment sets
the default of a torchrun option. Outside a pod, or with --standalone, hyperpodrun runs torchrun.
Exit codes: 0 completed, drained or shut down; 1 a fault or a system error; 2 a bad command line; 128 + signal.
"""
_HELP_WIDTH = 118
_HELP_COLUMN = 34


class BadUsage(ValueError):
    """The command line or the environment is invalid; the sentence names the option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The parsed command line. given: the options in order, each with its value, or None for a flag."""

    values: argparse.Namespace
    given: tuple[tuple[Option, str | None], ...]
    script: str
    script_args: tuple[str, ...]


class _Store(argparse.Action):
    """Stores a value and records that the option was given."""

    def __init__(self, *args: Any, option: Option, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.option = option

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        is_flag = self.option.kind is None
        setattr(namespace, self.dest, True if is_flag else values)
        given = list(getattr(namespace, "_given", ()))
        namespace._given = [*given, (self.option, None if is_flag else str(values))]


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with one spelling per option, on one line where it fits."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=min(_HELP_WIDTH, _columns()))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not isinstance(action, _Store):
            return super()._format_action_invocation(action)
        names = ", ".join(action.option.names)
        value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else action.dest.upper())
        return names if action.nargs == 0 else f"{names} {value}"


class _Parser(argparse.ArgumentParser):
    """An argparse parser that resolves abbreviations as torchrun does, and leaves the error in the termination message."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        matches = list({id(match[0]): match for match in found}.values())  # both spellings are the same option
        torchruns = [match for match in matches if isinstance(match[0], _Store) and _is_torchruns(match[0].option)]
        return torchruns if len(torchruns) == 1 else matches

    def error(self, message: str) -> NoReturn:
        write_termination_message(f"{self.prog}: {message}")
        super().error(message)


def _is_torchruns(option: Option) -> bool:
    return option.dest == "shutdown_timeout" or option not in OWN_OPTIONS


class UnknownOption(Exception):
    """The command line has an option that the table does not name; a newer torch may have it."""


class _StrictParser(_Parser):
    def error(self, message: str) -> NoReturn:
        if "unrecognized arguments" in message:
            raise UnknownOption(message)
        super().error(message)


def parse(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, *, learned: Sequence[Option] | None = None
) -> CommandLine:
    """Parse the command line. ``PET_<OPTION>`` in the environment sets the default of a torchrun option, as in torchrun.

    learned: options of the installed torch that are not in the table. If it is None an unknown option raises UnknownOption, else it ends
    the process like any other error, with a sentence and exit code 2.
    """
    parser = build_parser(environ, learned=learned or (), strict=learned is None)
    values = parser.parse_args(arguments)
    _check_choices(parser, values)
    return CommandLine(
        values=values,
        given=tuple(getattr(values, "_given", ())),
        script=values.training_script,
        script_args=tuple(values.training_script_args),
    )


def build_parser(
    environ: Mapping[str, str], *, learned: Sequence[Option] = (), strict: bool = False
) -> argparse.ArgumentParser:
    """Build the parser from torchrun's options, hyperpodrun's own, and those learned from the installed torch."""
    kind = _StrictParser if strict else _Parser
    parser = kind(
        prog=PROG,
        usage="%(prog)s [options] script [arguments of the script]",
        description="Run the workers of one pod of an elastic training job under the control of the operator.",
        epilog=EPILOG,
        formatter_class=_Help,
    )
    torchruns = parser.add_argument_group("torchrun's options")
    for option in TORCHRUN_OPTIONS:
        if not option.unused:
            _add(torchruns, option, _env_default(option, environ))
    ours = parser.add_argument_group("hyperpodrun's own options")
    for option in OWN_OPTIONS:
        _add(ours, option, option.default)
    outside = parser.add_argument_group("torchrun's options that have no effect inside a pod, and why")
    for option in (*TORCHRUN_OPTIONS, *learned):
        if option.unused or option in learned:
            _add(outside, option, _env_default(option, environ))
    parser.add_argument("training_script", help="the training script, module (-m) or command (--no-python)")
    rest = parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    rest.required = False
    return parser


def _add(group: argparse._ArgumentGroup, option: Option, default: Any) -> None:
    extra: dict[str, Any] = {"nargs": 0}
    if option.kind is not None:
        extra = {"type": option.kind, "choices": option.choices, "metavar": option.metavar}
    help_text = (option.help or option.unused).replace("%", "%%")
    group.add_argument(
        *option.spellings, dest=option.dest, action=_Store, option=option, default=default, help=help_text, **extra
    )


def _env_default(option: Option, environ: Mapping[str, str]) -> Any:
    text = environ.get(variable(option))
    if text is None or (option.choices and not text):
        return option.default
    if option.kind is None:
        return text.strip() not in ("", "0")
    return text


def _check_choices(parser: argparse.ArgumentParser, values: argparse.Namespace) -> None:
    """Refuse a value of PET_<OPTION> that the option does not have; argparse checks only values of the command line."""
    for option in TORCHRUN_OPTIONS:
        value = getattr(values, option.dest)
        if option.choices and not option.unused and value not in (None, *option.choices):
            parser.error(f"{variable(option)} is {value!r}; it must be one of {', '.join(option.choices)}")


def variable(option: Option) -> str:
    """Name the variable that sets the default of one of torchrun's options."""
    return f"PET_{option.dest.upper()}"


def _columns() -> int:
    try:
        return os.get_terminal_size().columns - 2
    except OSError:
        return _HELP_WIDTH
