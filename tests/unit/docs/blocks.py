"""The code blocks of the pages: manifests, Python, and command lines of a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml
from tests.unit.docs.pages import Page

HEREDOC = re.compile(r"<<END\n(.*?)^END$", re.MULTILINE | re.DOTALL)
SHELL_VARIABLE = re.compile(r"\$([A-Z_]+)")


def manifests(page: Page) -> list[dict[str, Any]]:
    """Give every whole object of a page: of its YAML blocks, and those that its shell blocks pass to kubectl."""
    texts = [*page.blocks("yaml")]
    texts += [
        SHELL_VARIABLE.sub("registry.example.com", text)
        for block in page.blocks("sh")
        for text in HEREDOC.findall(block)
    ]
    whole = [text for text in texts if "{...}" not in text]  # a sketch, which nobody can paste
    documents = [body for text in whole for body in yaml.safe_load_all(text)]
    return [body for body in documents if isinstance(body, dict) and {"apiVersion", "kind"} <= body.keys()]


def commands(page: Page) -> Iterator[list[str]]:
    """Give the command lines of a page's `sh` blocks in words; each part of a pipe is one."""
    for block in page.blocks("sh"):
        text = HEREDOC.sub("", block).replace("\\\n", " ")
        for line in text.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set("|;&"):
                    if words:
                        yield words
                    words = []
                else:
                    words.append(word)
