"""Phrases that are not idiomatic English, or that the glossary replaces, in everything that a user or a developer reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tests.lint.sources import Finding, Repository, Source

# What is wrong -> what to write instead. Only phrases that are never right: a gate that has to be argued with is not kept.
INSTEAD: Mapping[str, str] = {
    r"\b(?:re)?ma(?:de|ke|kes|king) anew\b": "recreated, recreate",
    r"\banew\b": "again, from the beginning",
    r"\bwhoever\b": "the client that, the code that, any ... that",
    r"\bnothing of it\b": "none of its ...",
    r"\bin wait\b": "pending, waiting",
    r"\bbe it\b": "even if, whether",
    r"\bjust so\b": "in this way",
    r"\ban own\b": "its own",
    r"\bnobody's\b": "no other ...'s",
    r"\bcalled back\b": "evicted, returned to the barrier",
    r"\blook(?:s|ed)? after\b": "reconcile, manage",
    r"\ball or nothing of\b": "atomic",
    r"\bappears? whole\b": "atomic",
    r"\bas ever\b": "as before, as always",
    r"\b(?:is|are|was|were|be) at hand\b": "available",
    r"\bcom(?:e|es|ing) about\b": "happen",
    r"\btrain(?:s|ing)? on(?=[.,;:)]| (?:and|while|with|from|in|at|without|until|when)\b)": "continue training",
    r"\bin no time\b": "at once",
    r"(?<![\d.])\b1 (?:replicas|pods|agents|workers|nodes|restarts)\b": "the singular",
}
RULES = tuple((re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in INSTEAD.items())
# Old entries of the changelog stay as they are; tests are read by developers of the tests, and quote what they test;
# the glossary names what it replaces; the rest is generated from sources that are checked.
LEFT_OUT = (
    "CHANGELOG.md",
    "tests/",
    "docs/glossary.md",
    "LICENSE",
    "requirements/",
    "crds/",
    "charts/elastipod/templates/crd.yaml",
)
TEXTS = (".py", ".md", ".yaml", ".tpl", ".txt", ".toml")


def check(repository: Repository) -> Iterator[Finding]:
    """Give the phrases in the texts of the product and of the documentation."""
    for source in repository.sources:
        if source.path.endswith(TEXTS) and not source.path.startswith(LEFT_OUT):
            yield from phrases(source)


def phrases(source: Source) -> Iterator[Finding]:
    """Find the phrases in a file, each line for itself."""
    for number, line in source.lines():
        for rule, instead in RULES:
            found = rule.search(line)
            if found:
                yield Finding(source.path, number, f"'{found[0]}' reads as translated; write: {instead}")
                break
