"""Terms that the glossary replaces. Its last column names what no name may carry (in `code style`) and what no page says (the rest)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tests.lint.sources import Finding, Repository, Source

GLOSSARY = "docs/glossary.md"
# Terms that names still carry; each goes from here with the last of them.
# (term, name) that is right all the same, with the reason.
ALLOWED: Mapping[tuple[str, str], str] = {}
# Words of the last column that have another meaning too, which a gate cannot tell.
OTHER_MEANINGS = frozenset({"step", "memory", "round", "seen", "level", "launcher", "scaling"})
NOTE = re.compile(r"\([^)]*\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Term:
    """A term that is not used, in words of lower case, and the glossary's own term for the concept.

    is_class: it is written with a capital, and so forbidden in names of classes and modules only: `share` is a plain word.
    """

    words: tuple[str, ...]
    instead: str
    is_class: bool = False

    def __str__(self) -> str:
        return "_".join(self.words)


def words_of(name: str) -> tuple[str, ...]:
    """Split a name at underscores, capitals and figures: `AgentBoard` and `agent_board` give agent, board."""
    return tuple(word.lower() for word in WORD.findall(name))


def terms_of(page: str) -> Sequence[Term]:
    """Read the glossary's tables: the terms in `code style` of the last column, each with the first one of its row."""
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|"))
    return [
        Term(words_of(old), cells[0], old[0].isupper())
        for cells in rows
        if len(cells) == 3
        for old in CODE.findall(cells[2])
    ]


def spoken_terms_of(page: str) -> Mapping[str, str]:
    """Read the glossary's tables: the plain words of the last column that pages do not say, each with what they say instead."""
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|"))
    return {
        word: cells[0]
        for cells in rows
        if len(cells) == 3 and cells[2] != "not"
        for word in (part.strip() for part in NOTE.sub("", CODE.sub("", cells[2])).split(","))
        if word.strip("- ") and word not in OTHER_MEANINGS
    }


def check(repository: Repository) -> Iterator[Finding]:
    """Give every name that is defined with a term of the last column, and every page that says one."""
    page = next(source.text for source in repository.sources if source.path == GLOSSARY)
    terms, spoken = terms_of(page), spoken_terms_of(page)
    for source in repository.python:
        yield from forbidden_names(source, terms)
    for source in repository.sources:
        if source.is_markdown and source.path not in (GLOSSARY, "CHANGELOG.md"):
            yield from forbidden_words(source, spoken)


def forbidden_words(source: Source, spoken: Mapping[str, str]) -> Iterator[Finding]:
    """Find the terms in the prose of a page: not in its code."""
    prose = FENCED.sub(lambda block: "\n" * block[0].count("\n"), source.text)
    for number, line in enumerate(prose.split("\n"), start=1):
        for term, instead in spoken.items():
            if re.search(rf"\b{re.escape(term)}\b", CODE.sub("", line), re.IGNORECASE):
                yield Finding(source.path, number, f"the page says '{term}'; the glossary's term is: {instead}")


def forbidden_names(source: Source, terms: Sequence[Term]) -> Iterator[Finding]:
    """Find the terms in a file's own name and in the names that it defines."""
    first = {term.words[0] for term in terms}
    stem = PurePosixPath(source.path).stem
    for number, name, is_class in [(1, stem, True), *_defined(source)]:
        words = words_of(name)
        if first.isdisjoint(words):
            continue
        for term in terms:
            if term.is_class and not is_class:
                continue
            if _holds(words, term.words) and (str(term), name) not in ALLOWED:
                yield Finding(
                    source.path, number, f"the name {name} says '{term}'; the glossary's term is: {term.instead}"
                )


def _holds(words: tuple[str, ...], term: tuple[str, ...]) -> bool:
    return any(words[at : at + len(term)] == term for at in range(len(words)))


def _defined(source: Source) -> Iterator[tuple[int, str, bool]]:
    """Give the names that a file defines, with their lines and whether they are classes. Tests: those of classes alone."""
    is_test = source.path.startswith("tests/")
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name, True
        elif is_test:
            continue
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name, False
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, False
