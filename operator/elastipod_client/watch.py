"""`elastipod watch JOB`: what `why` says, with the pods, live until the job ends."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from shutil import get_terminal_size

from .frame import frame, has_ended
from .kubectl import Kubectl
from .observing import observe
from .options import ATTENTION, OK, add_job, kubectl_of, parser_of, run

# The cursor goes home, and each line ends what was there before: a screen that is cleared first would flicker.
HOME, END_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
CLEAR = "\x1b[2J"
LEAST_S = 1.0


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = parser_of("watch", "Show a job live until it ends: what it does and waits for, and its pods.")
    add_job(found)
    found.add_argument("--interval", type=_seconds, default=2.0, metavar="SECONDS", help="default: 2, at least 1")
    found.add_argument("--once", action="store_true", help="print one snapshot")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code: 0 when the job completed or the user left, 1 when it failed."""
    args = parser().parse_args(argv)
    return run("watch", lambda: follow(kubectl_of(args), args.job, args.interval, is_once=args.once))


def follow(
    kubectl: Kubectl, name: str, interval_s: float, *, is_once: bool, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Show a job until it ends; gives the exit code. Without a terminal, what has not changed is not printed again."""
    before: list[str] = []
    is_live = sys.stdout.isatty() and not is_once
    print(CLEAR if is_live else "", end="")
    while True:
        situation = observe(kubectl, name)
        size = get_terminal_size()
        lines = frame(situation, size.columns)
        if is_live:
            shown = lines[: size.lines - 1]
            print(HOME + "".join(f"{line}{END_OF_LINE}\n" for line in shown) + REST_OF_SCREEN, end="", flush=True)
        elif lines != before:
            print("\n".join(lines), flush=True)
        before = lines
        ended = has_ended(situation)
        if ended or is_once:
            return ATTENTION if ended == "Failed" else OK
        sleep(interval_s)


def _seconds(written: str) -> float:
    try:
        seconds = float(written)
    except ValueError:
        seconds = 0.0
    if not LEAST_S <= seconds < 3600:
        raise ArgumentTypeError(f"{written!r} is no interval; it must be a number of seconds from 1 to 3600")
    return seconds
