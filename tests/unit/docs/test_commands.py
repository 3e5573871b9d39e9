"""Every command, option, make target and long run that the documentation names exists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from tests.long_runs import long_names
from tests.nonempty import some
from tests.unit.docs.pages import ROOT, Page, page, pages

from elastipod import cli as elastipod_command
from elastipod_agent.arguments import build_parser

PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.path))
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")
# What follows these words is a command of somebody else, with options of its own.
OTHERS = re.compile(r"\| |&& | -- elastipod")
# Options whose values are written for the reader: `--rdzv-*` stands for several.
FAMILIES = ("--rdzv-", "--master-")


def makefile_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    tiers = re.findall(r"^TIERS := (.*)$", text, re.MULTILINE)[0].split()
    return {*re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE), *(f"test-{tier}" for tier in tiers)}


def make_targets(page: Page) -> set[str]:
    return {name for line in page.commands() for name in re.findall(r"\bmake ([a-z][a-z0-9-]*)", line)}


@PAGES
def test_make_targets_exist(page: Page) -> None:
    assert make_targets(page) <= makefile_targets()


def test_every_make_target_is_explained_by_make_help() -> None:
    text = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"^([a-z][a-z-]*):.*## ", text, re.MULTILINE))
    assert {name for name in makefile_targets() if not name.startswith("test-")} - {"env"} <= explained


def named_runs(page: Page) -> set[tuple[str, bool]]:
    """Give what NAME= names on a page, and whether the line says that it is a benchmark."""
    return {
        (name[1], "make bench" in line)
        for line in page.commands()
        if (name := re.search(r"\bNAME=([a-z][a-z_-]*)", line))
    }


@cache
def benchmarks_and_long_runs() -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(path.stem for path in (ROOT / "bench").glob("[a-z]*.py")), frozenset(long_names())


@PAGES
def test_long_runs_and_benchmarks_exist(page: Page) -> None:
    benchmarks, long_runs = benchmarks_and_long_runs()
    known = {True: benchmarks, False: benchmarks | long_runs}
    assert [name for name, is_bench in named_runs(page) if name not in known[is_bench]] == []


@cache
def help_of(*words: str) -> str:
    """Give the help of `elastipod words...`; empty where there is no such command."""
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = elastipod_command.main([*words, "--help"])
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
    return text.getvalue() if status == 0 else ""


def command_words(arguments: str) -> list[list[str]]:
    """Give the subcommand that stands at the beginning of some arguments; `up|down` is two."""
    words: list[str] = []
    for word in arguments.split():
        if not re.fullmatch(r"[a-z]+(\|[a-z]+)*", word) or len(words) == 3:
            break
        words.append(word)
    found = [words]
    for at, word in enumerate(words):
        if "|" in word:
            found = [[*words[:at], choice] for choice in word.split("|")]
            break
    return found


def longest_command(words: list[str]) -> list[str]:
    """Leave out trailing words that are no subcommand but an argument (a file, a node)."""
    while len(words) > 1 and not help_of(*words):
        words = words[:-1]
    return words


def elastipod_arguments(page: Page) -> set[str]:
    matches = (re.search(r"(?:^|-- |\()elastipod ([a-z].*)", line) for line in page.commands())
    return {match[1] for match in matches if match}


def wrong_words(arguments: str) -> Iterator[str]:
    """Give what of a command line of elastipod does not exist."""
    for words in command_words(arguments):
        command = longest_command(words)
        text = help_of(*command)
        has_subcommands = re.search(r"^(commands|positional arguments):\n +([A-Z]+$|\{)", text, re.MULTILINE)
        if not text or (command != words and has_subcommands):
            yield f"elastipod {' '.join(words)}"
        for option in OPTION.findall(OTHERS.split(arguments)[0]):
            if option not in OPTION.findall(text):
                yield f"{option} of elastipod {arguments}"


@PAGES
def test_commands_of_elastipod_and_their_options_exist(page: Page) -> None:
    assert [wrong for arguments in elastipod_arguments(page) for wrong in wrong_words(arguments)] == []


def test_words_of_a_command_line_that_do_not_exist_are_found() -> None:
    assert list(wrong_words("local sideways")) == ["elastipod local sideways"]
    assert list(wrong_words("local up --sideways")) == ["--sideways of elastipod local up --sideways"]


def hyperpodrun_options() -> set[str]:
    return {option for action in build_parser({})._actions for option in action.option_strings}


def named_options(page: Page) -> set[str]:
    """Give the options of hyperpodrun in the command lines of a page."""
    matches = (re.search(r"(?:^|\s)hyperpodrun (.*)", line) for line in page.commands())
    before_scripts = (re.split(r"\s[\w/]+\.py\b", match[1])[0] for match in matches if match)
    return {option for text in before_scripts for option in OPTION.findall(text) if not option.endswith("-")}


@PAGES
def test_options_of_hyperpodrun_exist(page: Page) -> None:
    assert named_options(page) <= hyperpodrun_options()


def test_the_options_on_the_agents_page_exist() -> None:
    spans = [span for span in page("docs/agent.md").spans() if span.startswith("--") and not span.startswith(FAMILIES)]
    named = {OPTION.findall(span)[0] for span in spans if span not in ("--watch", "--json")}
    assert len(named) >= 10, "the pattern finds few where the page has a table of them"
    assert named <= hyperpodrun_options()


@pytest.mark.parametrize("found", [make_targets, named_runs, elastipod_arguments, named_options])
def test_the_pages_are_searched_with_success(found: Callable[[Page], set[Any]]) -> None:
    assert len({one for page in pages() for one in found(page)}) >= 5, (
        "a page that names nothing passes every test here"
    )


def test_the_agents_page_names_every_option_of_hyperpodrun_itself() -> None:
    text = page("docs/agent.md").text
    (group,) = [group for group in build_parser({})._action_groups if group.title == "hyperpodrun's own options"]
    options = {
        o for action in group._group_actions for o in action.option_strings if o.startswith("--") and "_" not in o
    }
    assert {option for option in some(options) if option not in text} == set()
