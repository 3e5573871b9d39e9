"""References that lead nowhere: to documents outside the repository, and to files that do not exist (any more)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.lint.sources import Finding, Repository, Source

OUTSIDE = re.compile(r"\b(?:(?:[Dd]ecisions?|[Ss]pec) \d+|\d\d-decisions\b|[Ss]pecs? \d{2}\b)")
# Old entries of the changelog speak of files as they were.
HISTORY = frozenset({"CHANGELOG.md"})
PATH = re.compile(r"(?<![\w/.~$<{*@:-])((?:[\w.-]+/)+[\w.-]*[\w/]|[\w-]+\.(?:py|md))(?![\w*<{(-])")
TEST = re.compile(r"(?<![\w/.])((?:[\w-]+/)*test_\w+\.py)::(\w+)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?)\s*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# A path is only judged when it begins like one of ours; anything else may be a path of a node, a pod or another project.
OURS = frozenset(
    {
        "operator",
        "agent",
        "localcluster",
        "tests",
        "docs",
        "charts",
        "crds",
        "examples",
        "bench",
        "design",
        "core",
    }
)
# Files that are spoken of and are not in the repository, each with its reason.
ELSEWHERE = {
    "docs/reference/proven.md": "is written by make proven, where reports of runs are",
}
# The gate itself and its tests speak of what they forbid.
ABOUT_REFERENCES = ("tests/lint/", "tests/unit/lint/")


def check(repository: Repository) -> Iterator[Finding]:
    """Give the stale references of all files."""
    for source in repository.sources:
        if source.path in HISTORY:
            continue
        if not source.path.startswith(ABOUT_REFERENCES):
            yield from documents_outside(source)
        yield from missing_files(source, repository)
        if source.is_markdown:
            yield from broken_links(source, repository)


def documents_outside(source: Source) -> Iterator[Finding]:
    """Find numbers of documents that readers of the repository do not have."""
    for number, line in source.lines() if OUTSIDE.search(source.text) else ():
        for match in OUTSIDE.finditer(line):
            yield Finding(
                source.path,
                number,
                f"'{match[0]}' is not in the repository; name the page of docs/design that says it, or leave it out",
            )


def missing_files(source: Source, repository: Repository) -> Iterator[Finding]:
    """Find paths in comments, docstrings and pages of documentation at which there is no file."""
    for number, line in _prose(source):
        for match in PATH.finditer(line):
            path = match[1].removeprefix("./")
            if _is_ours(path) and not repository.exists(path) and path not in ELSEWHERE:
                yield Finding(
                    source.path, number, f"there is no {path} in the repository; name the file as it is called now"
                )


def _prose(source: Source) -> Iterator[tuple[int, str]]:
    if source.is_python:
        yield from source.comments
        yield from source.docstrings
    elif source.is_markdown:
        yield from source.lines()


def _is_ours(path: str) -> bool:
    if "/" not in path:
        return path.endswith((".py", ".md"))
    return path.split("/")[0] in OURS and not path.startswith("operator/operator")


def broken_links(source: Source, repository: Repository) -> Iterator[Finding]:
    """Find links of a page to files or headings that do not exist."""
    anchors = {other.path: headings(other.text) for other in repository.sources if other.is_markdown}
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), source.text)
    for number, line in enumerate(text.split("\n"), start=1):
        for match in LINK.finditer(line):
            target, _, anchor = match[1].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            path = _resolve(source.path, target) if target else source.path
            if target and not repository.has(path) and path not in ELSEWHERE:
                yield Finding(source.path, number, f"the link {match[1]} leads to no file; {path} does not exist")
            elif anchor and anchor not in anchors.get(path, ()):
                yield Finding(source.path, number, f"the link {match[1]} leads to no heading of {path}")


def _resolve(page: str, target: str) -> str:
    parts = page.split("/")[:-1]
    for part in target.rstrip("/").split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def headings(text: str) -> frozenset[str]:
    """Give the anchors of a page's headings as GitHub makes them."""
    plain = (re.sub(r"[`*]|\[|\]\([^)]*\)", "", title).lower() for title in HEADING.findall(FENCE.sub("", text)))
    return frozenset(re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain)
