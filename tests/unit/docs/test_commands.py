"""Every command, option, make target and long run that the documentation names exists."""

from __future__ import annotations

import re
from functools import cache

import pytest
from tests.unit.docs.pages import ROOT, Page, page, pages, sources

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


@PAGES
def test_make_targets_exist(page: Page) -> None:
    named = {name for line in page.commands() for name in re.findall(r"\bmake ([a-z][a-z0-9-]*)", line)}
    assert named <= makefile_targets()


def test_every_make_target_is_explained_by_make_help() -> None:
    text = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"^([a-z][a-z-]*):.*## ", text, re.MULTILINE))
    assert {name for name in makefile_targets() if not name.startswith("test-")} - {"env"} <= explained


@PAGES
def test_long_runs_and_benchmarks_exist(page: Page) -> None:
    runs = set(re.findall(r'mark\.long\("([a-z-]+)"\)', sources("tests")))
    benches = {path.stem for path in (ROOT / "bench").glob("[a-z]*.py")}
    for line in page.commands():
        if name := re.search(r"\bNAME=([a-z][a-z-]*)", line):
            assert name[1] in (benches if "make bench" in line else runs | benches), line


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


@PAGES
def test_commands_of_elastipod_and_their_options_exist(page: Page) -> None:
    for line in page.commands():
        if not (match := re.search(r"(?:^|-- |\()elastipod ([a-z].*)", line)):
            continue
        for words in command_words(match[1]):
            command = longest_command(words)
            text = help_of(*command)
            assert text, f"elastipod {' '.join(words)}"
            has_subcommands = re.search(r"^(commands|positional arguments):\n +([A-Z]+$|\{)", text, re.MULTILINE)
            assert command == words or not has_subcommands, f"elastipod {' '.join(words)}"
            for option in OPTION.findall(OTHERS.split(match[1])[0]):
                assert option in OPTION.findall(text), f"elastipod {match[1]}"


def hyperpodrun_options() -> set[str]:
    return {option for action in build_parser({})._actions for option in action.option_strings}


@PAGES
def test_options_of_hyperpodrun_exist(page: Page) -> None:
    for line in page.commands():
        if match := re.search(r"(?:^|\s)hyperpodrun (.*)", line):
            before_script = re.split(r"\s[\w/]+\.py\b", match[1])[0]
            assert {o for o in OPTION.findall(before_script) if not o.endswith("-")} <= hyperpodrun_options(), line


def test_the_options_on_the_agents_page_exist() -> None:
    for span in page("docs/agent.md").spans():
        if span.startswith("--") and not span.startswith(FAMILIES) and span not in ("--watch", "--json"):
            assert OPTION.findall(span)[0] in hyperpodrun_options(), span


def test_the_agents_page_names_every_option_of_hyperpodrun_itself() -> None:
    text = page("docs/agent.md").text
    (group,) = [group for group in build_parser({})._action_groups if group.title == "hyperpodrun's own options"]
    options = {
        o for action in group._group_actions for o in action.option_strings if o.startswith("--") and "_" not in o
    }
    assert {option for option in options if option not in text} == set()
