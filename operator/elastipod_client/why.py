"""`elastipod why JOB`: one paragraph on what a job does, what it waits for, since when, and what to do."""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser
from collections.abc import Sequence
from shutil import get_terminal_size

from .explanation import Explanation, explain
from .observing import observe
from .options import ATTENTION, OK, add_job, add_output, kubectl_of, parser_of, run, structured, table
from .spans import span_text
from .terminal import printable, say

MAX_WIDTH = 120


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = parser_of("why", "Say what a job does, what it waits for, since when, and what to do about it.")
    add_job(found)
    add_output(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    args = parser().parse_args(argv)

    def why() -> int:
        explanation = explain(observe(kubectl_of(args), args.job))
        say(shown(explanation, args.output))
        return ATTENTION if explanation.needs_attention else OK

    return run("why", why)


def shown(explanation: Explanation, form: str) -> str:
    """Give an explanation in one of the formats of -o."""
    if form in ("json", "yaml"):
        return structured(explanation.as_json(), form)
    width = min(MAX_WIDTH, get_terminal_size().columns)
    text = textwrap.fill(printable(explanation.text), width, break_long_words=False, break_on_hyphens=False)
    if form == "wide" and explanation.blockers:
        rows = [
            (blocker.severity.value, str(blocker.reason), blocker.where, _age(explanation, at))
            for at, blocker in enumerate(explanation.blockers)
        ]
        text += "\n\n" + table([("SEVERITY", "REASON", "WHERE", "SINCE"), *rows])
    return text


def _age(explanation: Explanation, at: int) -> str:
    since = explanation.blockers[at].since
    return span_text(explanation.now - since) if since is not None else "unknown"
