"""`elastipod timeline JOB`: the changes of a job's size with their causes, and where its time went."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from html import escape

from .life import Life, as_json, life_of, rows, spans_of, sums_text, timeline_of
from .observing import observe
from .options import (
    ATTENTION,
    INSTALL_EXTRA,
    OK,
    UsageError,
    add_job,
    add_output,
    kubectl_of,
    parser_of,
    run,
    structured,
    table,
)
from .situation import job_facts
from .terminal import say

PICTURES = ("svg", "html")
FORMATS = ("text", "json", "yaml", *PICTURES)


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = parser_of("timeline", "Show when and why a job changed its size or recovered, and where its time went.")
    add_job(found)
    add_output(found, FORMATS)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code: 1 if the job has no history yet."""
    args = parser().parse_args(argv)

    def timeline() -> int:
        situation = observe(kubectl_of(args), args.job)
        life = life_of(job_facts(situation.job, situation.now), situation.events, situation.now)
        if not life.job.history and args.output not in ("json", "yaml"):
            say(f"job {args.job} has not started to train; see: elastipod why {args.job}")
            return ATTENTION
        if args.output in PICTURES and not spans_of(life):
            say(
                f"the clock of this machine has not reached the first step of job {args.job}; without -o, its changes are listed"
            )
            return ATTENTION
        say(shown(life, args.output))
        return OK

    return run("timeline", timeline)


def shown(life: Life, form: str) -> str:
    """Give a life in one of the formats of -o. Raises UsageError without the package that draws."""
    if form in ("json", "yaml"):
        return structured(as_json(life), form)
    if form == "text":
        return "\n\n".join(part for part in (table(rows(life)), sums_text(life)) if part)
    try:
        from .picture import svg

        picture = svg(timeline_of(life))
    except ModuleNotFoundError as error:
        raise UsageError(f"-o {form} needs the package {error.name}; {INSTALL_EXTRA}") from error
    return picture if form == "svg" else page(life, picture)


def page(life: Life, picture: str) -> str:
    """Give a page that needs no other file: the picture, the table, the sums."""
    heads, *lines = rows(life)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(life.job.name)}</title>
<style>body {{ font-family: sans-serif; margin: 2em; }} td, th {{ padding: 0.2em 1em 0.2em 0; text-align: left; }}
svg {{ max-width: 100%; height: auto; }}</style></head>
<body>
{picture[picture.index("<svg") :]}
<p>{escape(sums_text(life))}</p>
<table><tr>{"".join(f"<th>{escape(head)}</th>" for head in heads)}</tr>
{body}
</table></body></html>"""
