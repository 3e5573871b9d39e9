"""Options and exit codes that the commands share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .kubectl import Kubectl, KubectlError
from .terminal import one_line, say

OK, ATTENTION, USAGE_ERROR, UNREACHABLE = 0, 1, 2, 3
INTERRUPTED = 130  # as shells report a program that SIGINT ended
EXIT_CODES = """\
exit codes: 0 nothing needs attention, or done; 1 something needs attention; 2 wrong usage or a missing package;
3 the cluster could not be queried or refused the change, or the job does not exist; 130 interrupted"""
# What the commands can do without is in the extra `cli`.
INSTALL_EXTRA = "in a checkout of elastipod, run: pip install '.[cli]'"
FORMATS = ("text", "wide", "json", "yaml")


class UsageError(Exception):
    """The command cannot be carried out as it was given; the text says why in one sentence."""


def parser_of(
    name: str, description: str, namespace: str = "namespace of the job (default: kubectl's)"
) -> argparse.ArgumentParser:
    """Give the parser of a command with the options that all have. namespace: what -n means to it."""
    parser = argparse.ArgumentParser(
        prog=f"elastipod {name}",
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--namespace", default="", help=namespace)
    parser.add_argument("--context", default="", help="context of the kubeconfig (default: the current one)")
    parser.add_argument("--kubeconfig", default="", help="kubeconfig file (default: kubectl's)")
    return parser


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the argument JOB."""
    parser.add_argument("job", metavar="JOB", type=_job_name, help="name of the job")


def add_output(parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS) -> None:
    """Add the option -o; the first format is the default."""
    parser.add_argument("-o", "--output", choices=formats, default=formats[0], help=f"default: {formats[0]}")


def _job_name(written: str) -> str:
    """Read the name of a job; `kubectl get -o name` writes its kind in front."""
    kind, _, name = written.rpartition("/")
    if kind and kind.split(".")[0] not in ("hpjob", "hyperpodjob", "hyperpodpytorchjob", "hyperpodpytorchjobs"):
        raise argparse.ArgumentTypeError(f"{written!r} names a {kind}, not a job; use -n for the namespace")
    return name


def kubectl_of(args: argparse.Namespace) -> Kubectl:
    """Give the way to the API server that the options name."""
    return Kubectl(namespace=args.namespace, context=args.context, kubeconfig=args.kubeconfig)


def run(name: str, command: Callable[[], int], *, if_left: int | None = None) -> int:
    """Run a command; gives its exit code, and prints what went wrong as one sentence.

    if_left: the exit code after Ctrl-C of a command that users leave so; others were interrupted.
    """
    try:
        return command()
    except UsageError as error:
        say(f"elastipod {name}: {error}", sys.stderr)
        return USAGE_ERROR
    except KubectlError as error:
        say(f"elastipod {name}: {error}", sys.stderr)
        return UNREACHABLE
    except KeyboardInterrupt:
        return INTERRUPTED if if_left is None else if_left


def structured(found: Mapping[str, Any], form: str) -> str:
    """Give data as JSON or YAML. Raises UsageError if YAML is asked for and cannot be written here."""
    if form == "json":
        return as_json(found)
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise UsageError(f"-o yaml needs the package yaml; {INSTALL_EXTRA}") from error
    return str(yaml.safe_dump(dict(found), sort_keys=False, allow_unicode=True, width=120)).rstrip()


def as_json(found: Any) -> str:
    """Give data as JSON in which every character can be seen: the others are escaped, so nothing is lost."""
    return "".join(
        one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1]
        for one in json.dumps(found, indent=2, ensure_ascii=False)
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Give rows in columns, the first row being their heads, each on one line. The last column is not filled up."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    lines = [
        "   ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
