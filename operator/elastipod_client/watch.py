"""`elastipod watch JOB`: what `why` says, with the pods, live until the job ends."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from shutil import get_terminal_size

from elastipod_operator.kube.reading import name_of

from .frame import frame, has_ended, headline
from .kubectl import Kubectl, KubectlError, NotFoundError, UnknownKindError
from .observing import observe
from .options import ATTENTION, OK, add_job, kubectl_of, parser_of, run
from .situation import Situation, job_facts
from .spans import time_text
from .terminal import one_line, say

# The cursor goes home, and each line ends what was there before: a screen that is cleared first would flicker.
HOME, END_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
CLEAR = "\x1b[2J"
LEAST_S = 1.0
# An API server that is upgraded or a laptop that changes its network is back by then.
PATIENCE_S = 300.0


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = parser_of("watch", "Show a job live until it ends: what it does and waits for, and its pods.")
    add_job(found)
    found.add_argument("--interval", type=_seconds, default=2.0, metavar="SECONDS", help="default: 2, at least 1")
    found.add_argument("--once", action="store_true", help="print one snapshot")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code: 0 when the job completed or the user left, 1 when it failed, 3 when it was deleted."""
    args = parser().parse_args(argv)
    return run("watch", lambda: follow(kubectl_of(args), args.job, args.interval, is_once=args.once), if_left=OK)


def follow(
    kubectl: Kubectl,
    name: str,
    interval_s: float,
    *,
    is_once: bool,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Show a job until it ends; gives the exit code. Without a terminal, what has not changed is not printed again.

    Once the job has been read, a read that fails is said and tried again. Raises KubectlError if the first one fails or all
    fail for PATIENCE_S, NotFoundError if the job is deleted.
    """
    is_live = sys.stdout.isatty() and not is_once
    print(CLEAR if is_live else "", end="")
    seen = observe(kubectl, name)
    printed: Situation | str | None = None
    trouble = ""
    failing_since: float | None = None
    while True:
        if is_live:
            _redraw(seen, trouble)
        elif trouble:
            printed = _print_trouble(trouble, printed)
        else:
            printed = _print_news(seen, printed)
        ended = has_ended(seen)
        if ended or is_once:
            return ATTENTION if ended == "Failed" else OK
        sleep(interval_s)
        try:
            seen, trouble, failing_since = observe(kubectl, name), "", None
        except KubectlError as error:
            now = clock()
            failing_since = now if failing_since is None else failing_since
            _check_patience(error, seen, now - failing_since)
            trouble = f"the job could not be read: {error}"


def _redraw(seen: Situation, trouble: str) -> None:
    """Draw a picture over the last one, cut to the terminal: a line that is wrapped would move all lines below it."""
    size = get_terminal_size()
    lines = [*([trouble] if trouble else []), *frame(seen, size.columns)][: size.lines - 1]
    shown = "".join(f"{one_line(line)[: size.columns]}{END_OF_LINE}\n" for line in lines)
    print(HOME + shown + REST_OF_SCREEN, end="", flush=True)


def _print_trouble(trouble: str, printed: Situation | str | None) -> str:
    """Print why the job could not be read, if that is new; gives what is printed last now."""
    if trouble != printed:
        say(trouble)
    return trouble


def _print_news(seen: Situation, printed: Situation | str | None) -> Situation:
    """Print a picture if something else than the time has changed; gives the situation that is printed last now."""
    width = get_terminal_size().columns
    if isinstance(printed, Situation) and frame(replace(seen, now=printed.now), width) == frame(printed, width):
        return printed
    say("\n".join(frame(seen, width)))
    return seen


def _check_patience(error: KubectlError, seen: Situation, failing_s: float) -> None:
    """Raise KubectlError if it is of no use to go on watching. seen: the last time that the job could be read."""
    if isinstance(error, NotFoundError) and not isinstance(error, UnknownKindError):
        job, at = job_facts(seen.job, seen.now), time_text(seen.now, datetime.now(UTC))
        raise NotFoundError(
            f"job {name_of(seen.job)} was deleted; at {at} it was last seen: {headline(job)}"
        ) from error
    if failing_s >= PATIENCE_S:
        raise KubectlError(f"the job could not be read for {failing_s // 60:.0f} min: {error}") from error


def _seconds(written: str) -> float:
    try:
        seconds = float(written)
    except ValueError:
        seconds = 0.0
    if not LEAST_S <= seconds < 3600:
        raise ArgumentTypeError(f"{written!r} is no interval; it must be a number of seconds from 1 to 3600")
    return seconds
