"""The command line: torchrun's options, ours, and the user's script with its arguments.

torchrun's options stand here as a table, because asking torch for its parser means importing torch, which would cost
the agent of every pod hundreds of MiB and seconds. A test compares the table with the installed torch's own parser;
and an option that only a newer torch knows is learned from that torch in a child process (`torchrun.installed_options`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

PROG = "hyperpodrun"
EPILOG = """\
In a pod of a HyperPodPyTorchJob the ranks, the world size and the master always come from the operator, whatever
--nnodes and --rdzv-backend say. Outside a pod, or with --standalone, hyperpodrun hands over to torchrun.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the table. Names carry dashes; the spelling with underscores is always accepted too."""

    names: tuple[str, ...]
    default: Any = None
    kind: Callable[[str], Any] | None = str  # None: a flag that takes no value
    help: str = ""
    choices: tuple[str, ...] | None = None

    @property
    def dest(self) -> str:
        """The attribute under which the parsed value is found."""
        return max(self.names, key=len).lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        """All names, with dashes and with underscores."""
        long = [name for name in self.names if name.startswith("--")]
        underscored = ["--" + name[2:].replace("-", "_") for name in long]
        return [*self.names, *(name for name in underscored if name not in self.names)]


TORCHRUN_OPTIONS = (
    Option(("--nnodes",), "1:1", help="number of pods, or MIN:MAX; outside a pod only"),
    Option(
        ("--nproc-per-node",), "1", help="workers per pod: auto, cpu, gpu or a number (default: $NPROC_PER_NODE or 1)"
    ),
    Option(("--rdzv-backend",), "static", help="rendezvous backend; in a pod it is always hyperpod"),
    Option(("--rdzv-endpoint",), "", help="rendezvous endpoint; outside a pod only"),
    Option(("--rdzv-id",), "none", help="run id that workers see in TORCHELASTIC_RUN_ID"),
    Option(("--rdzv-conf",), "", help="rendezvous configuration; outside a pod only"),
    Option(("--standalone",), False, None, help="run on this machine alone, as torchrun does, also in a pod"),
    Option(
        ("--max-restarts",), 0, int, help="restarts by torchrun; in a pod the operator decides, workers see the value"
    ),
    Option(("--monitor-interval",), 0.1, float, help="outside a pod only; in a pod exits are noticed at once"),
    Option(("--start-method",), "spawn", choices=("spawn", "fork", "forkserver"), help="outside a pod only"),
    Option(("--event-log-handler",), "null", help="outside a pod only"),
    Option(("--role",), "default", help="role of the workers, part of the prefix of their lines"),
    Option(("-m", "--module"), False, None, help="the script is a module, run as python -m"),
    Option(("--no-python",), False, None, help="the script is a command of its own, run without python"),
    Option(("--run-path",), False, None, help="run the script with runpy.run_path in the worker's interpreter"),
    Option(("--log-dir",), None, help="where files of --redirects, --tee and error reports go"),
    Option(("-r", "--redirects"), "0", help="streams into files only: 0 none, 1 out, 2 err, 3 both, or RANK:N,..."),
    Option(("-t", "--tee"), "0", help="streams into files and to the console, values as for --redirects"),
    Option(
        ("--log-line-prefix-template",),
        "",
        help="prefix of worker lines with ${role_name}, ${rank}, ${local_rank} (default: [${role_name}${local_rank}]:)",
    ),
    Option(("--local-ranks-filter",), "", help="only these local ranks' lines go to the console, e.g. 0,1"),
    Option(("--duplicate-stdout-filters",), "", help="outside a pod only"),
    Option(("--duplicate-stderr-filters",), "", help="outside a pod only"),
    Option(("--node-rank",), 0, int, help="outside a pod only"),
    Option(("--master-addr",), "127.0.0.1", help="outside a pod only"),
    Option(("--master-port",), None, int, help="outside a pod only"),
    Option(("--local-addr",), None, help="outside a pod only"),
    Option(("--logs-specs",), None, help="outside a pod only"),
    Option(
        ("--numa-binding",), None, choices=("node", "socket", "exclusive", "core-complex"), help="outside a pod only"
    ),
    Option(("--signals-to-handle",), "SIGTERM,SIGINT,SIGHUP,SIGQUIT", help="outside a pod only"),
    Option(("--virtual-local-rank",), False, None, help="outside a pod only"),
    Option(("--print-completion",), None, choices=("bash", "zsh", "tcsh"), help="print torchrun's shell completion"),
)
OWN_OPTIONS = (
    Option(
        ("--shutdown-signal",),
        "SIGKILL",
        choices=("SIGKILL", "SIGTERM"),
        help="signal that ends workers in a stop that is not graceful (default: SIGKILL)",
    ),
    Option(("--shutdown-timeout",), 15, int, help="seconds from that signal to SIGKILL (default: 15)"),
    Option(("--server-host",), "0.0.0.0", help="address of the control server (default: 0.0.0.0)"),  # noqa: S104 the operator calls from another pod
    Option(("--server-port",), None, int, help="its port (default: $ELASTIPOD_AGENT_PORT or 8080)"),
    Option(
        ("--server-log-level",),
        "info",
        str.lower,
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        help="what the control server logs: refused calls from info on, every call from debug on (default: info)",
    ),
    Option(("--server-shutdown-timeout",), 300, int, help="seconds that leaving may take at most (default: 300)"),
    Option(("--pre-train-script",), None, help="run before the workers at every start; its failure is a fault"),
    Option(("--pre-train-args",), "", help="its arguments, in one string"),
    Option(("--post-train-script",), None, help="run once all workers have completed"),
    Option(("--post-train-args",), "", help="its arguments, in one string"),
    Option(
        ("--inprocess-restart",),
        False,
        None,
        help="start the workers at once and keep them over faults: they wait at a barrier for the next start",
    ),
    Option(
        ("--inprocess-timeout",),
        600,
        int,
        help="seconds that all workers may take to come (back) to that barrier before they are started anew (default: 600)",
    ),
    Option(
        ("--no-warm-workers",),
        False,
        None,
        help="start every worker with a fresh interpreter instead of forking one that has torch loaded",
    ),
    Option(
        ("--preload",), "", help="modules that warm workers have imported already, beside torch, e.g. transformers,timm"
    ),
    Option(
        ("--hang-timeout",),
        "auto",
        help="seconds without a step after which workers that report steps are a fault; 0 = never "
        "(default: auto = 10 times the median step, at least 600)",
    ),
    Option(("--metrics-port",), 0, int, help="port of the Prometheus metrics; 0 = none (default: 0)"),
)

# What a user may give and what changes nothing where the operator decides.
OUTSIDE_ONLY = frozenset(option.dest for option in TORCHRUN_OPTIONS if option.help == "outside a pod only")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The parsed command line. ``given`` lists what stood there, in order, as (option, value or None for a flag)."""

    values: argparse.Namespace
    given: tuple[tuple[Option, str | None], ...]
    script: str
    script_args: tuple[str, ...]


class _Store(argparse.Action):
    """Store a value and remember that it was given, in the spelling that torchrun takes."""

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


class _Parser(argparse.ArgumentParser):
    """argparse, except that an abbreviation that fits both spellings of one option is not ambiguous."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        return list({id(match[0]): match for match in found}.values())


class UnknownOption(Exception):
    """The command line holds an option that the table does not name; a newer torch may."""


class _StrictParser(_Parser):
    def error(self, message: str) -> NoReturn:
        if "unrecognized arguments" in message:
            raise UnknownOption(message)
        super().error(message)


def parse(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, *, learned: Sequence[Option] | None = None
) -> CommandLine:
    """Parse the command line. ``PET_<OPTION>`` in the environment gives torchrun's options other defaults, as there.

    learned: options of the installed torch beyond the table. While it is None an unknown option raises UnknownOption;
    afterwards it ends the process like any other mistake, with a sentence and exit code 2.
    """
    parser = build_parser(environ, learned=learned or (), strict=learned is None)
    values = parser.parse_args(arguments)
    return CommandLine(
        values=values,
        given=tuple(getattr(values, "_given", ())),
        script=values.training_script,
        script_args=tuple(values.training_script_args),
    )


def build_parser(
    environ: Mapping[str, str], *, learned: Sequence[Option] = (), strict: bool = False
) -> argparse.ArgumentParser:
    """Build the parser over torchrun's options, our own and those learned from the installed torch."""
    kind = _StrictParser if strict else _Parser
    parser = kind(
        prog=PROG,
        usage="%(prog)s [options] script [arguments of the script]",
        description="Run the workers of one pod of an elastic training job, as the operator says.",
        epilog=EPILOG,
    )
    ours = parser.add_argument_group("hyperpodrun's own options")
    for option in OWN_OPTIONS:
        _add(ours, option, option.default)
    torchruns = parser.add_argument_group("torchrun's options")
    for option in (*TORCHRUN_OPTIONS, *learned):
        _add(torchruns, option, _env_default(option, environ))
    parser.add_argument("training_script", help="the training script, module (-m) or command (--no-python)")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _add(group: argparse._ArgumentGroup, option: Option, default: Any) -> None:
    extra: dict[str, Any] = {"nargs": 0} if option.kind is None else {"type": option.kind, "choices": option.choices}
    help_text = option.help.replace("%", "%%")
    group.add_argument(
        *option.spellings, dest=option.dest, action=_Store, option=option, default=default, help=help_text, **extra
    )


def _env_default(option: Option, environ: Mapping[str, str]) -> Any:
    text = environ.get(f"PET_{option.dest.upper()}")
    if text is None:
        return option.default
    if option.kind is None:
        return text.strip() not in ("", "0")
    return text
