"""`elastipod logs JOB`: the logs of its pods, or with --first-failure what the first failing worker printed."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

from elastipod_operator.core.names import LABEL_JOB

from .first_failure import show_first_failure
from .kubectl import require_kubectl
from .log_reading import IGNORE_ERRORS, is_unreadable, streams_of
from .observing import JOBS
from .options import ATTENTION, OK, UNREACHABLE, UsageError, add_job, kubectl_of, parser_of, run
from .terminal import say

# Each followed log is a connection that the API server and a kubelet keep open.
MAX_FOLLOWED = 512
READER_GONE = -13  # kubectl was ended by SIGPIPE


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = parser_of("logs", "Print the logs of a job's agents and workers, each line with its pod.")
    add_job(found)
    found.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    found.add_argument("--tail", type=int, default=20, metavar="N", help="last lines of each pod (default: 20)")
    found.add_argument(
        "--first-failure",
        action="store_true",
        help="print the traceback of the worker that failed first in the newest fault",
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code: 1 if there was a failure to show, or a log that could not be read."""
    args = parser().parse_args(argv)
    if args.follow and args.first_failure:
        return run("logs", _refuse_both)
    if args.first_failure:
        return run("logs", lambda: show_first_failure(kubectl_of(args), args.job))
    return run("logs", lambda: _all(args), if_left=OK if args.follow else None)


def _refuse_both() -> int:
    raise UsageError("--follow and --first-failure exclude each other")


def _all(args: Namespace) -> int:
    kubectl = kubectl_of(args)
    job = kubectl.get(JOBS, args.job)
    selector = f"--selector={LABEL_JOB}={args.job}"
    pods = kubectl.items("pods", selector)
    if not pods:
        say(f"job {args.job} has no pods; see: elastipod why {args.job}", sys.stderr)
        return OK
    containers, count = streams_of(job, pods)
    if args.follow and count > MAX_FOLLOWED:
        raise UsageError(
            f"job {args.job} has {count} logs, and --follow reads at most {MAX_FOLLOWED} at once; leave it out, "
            "or follow a pod: kubectl logs -f POD"
        )
    follow = ["--follow", f"--max-log-requests={MAX_FOLLOWED}"] if args.follow else []
    options = [selector, "--prefix", f"--tail={args.tail}", IGNORE_ERRORS, *containers, *follow]
    return _printed(kubectl.command("logs", *options))


def _printed(command: Sequence[str]) -> int:
    """Print the lines of kubectl as they come, what it could not read to standard error; gives the exit code."""
    require_kubectl()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as kubectl:
        assert kubectl.stdout is not None
        try:
            has_unreadable = _copy(kubectl.stdout)
        except BaseException:
            kubectl.terminate()  # it would go on until it has a line that nobody reads
            raise
    if kubectl.returncode not in (0, READER_GONE):
        return UNREACHABLE
    return ATTENTION if has_unreadable else OK


def _copy(lines: Iterable[bytes]) -> bool:
    """Copy the lines of kubectl; gives whether a log could not be read. Logs are printed as they are, as kubectl does it."""
    has_unreadable = False
    for line in lines:
        if is_unreadable(shown := line.decode(errors="replace")):
            has_unreadable = True
            say(f"elastipod logs: {shown.rstrip()}", sys.stderr)
        else:
            sys.stdout.write(shown)
            sys.stdout.flush()
    return has_unreadable
