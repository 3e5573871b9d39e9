"""What the gates read: every text file under version control, parsed at most once."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath

from tests.commit_under_test import git_output

ROOT = Path(__file__).resolve().parents[2]
TEXT_SUFFIXES = frozenset({".py", ".md", ".yaml", ".tpl", ".toml", ".json", ".txt", ".c", ".in", ".mod"})
TEXT_NAMES = frozenset({"Makefile", "Dockerfile", "run", "environment"})
# Folders that .gitignore names, and git's own.
GENERATED = (".git", ".venv", ".run", ".hypothesis", "__pycache__", "build", "dist", ".*_cache", "*.egg-info")

# What begins with # outside of a string. The standard library's tokenizer takes 20 times as long.
COMMENT_OR_STRING = re.compile(
    r"""#[^\n]*|\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""", re.DOTALL
)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One sentence for a person: where it is, what is wrong, and what to write instead."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Source:
    """One file. path: relative to the repository, with slashes."""

    path: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_markdown(self) -> bool:
        return self.path.endswith(".md")

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        """Every syntax node of a Python file; none of any other file."""
        return list(ast.walk(ast.parse(self.text))) if self.is_python else []

    @cached_property
    def comments(self) -> Sequence[tuple[int, str]]:
        """The comments of a Python file, each with its line."""
        found: list[tuple[int, str]] = []
        number, at = 1, 0
        for match in COMMENT_OR_STRING.finditer(self.text if self.is_python and "#" in self.text else ""):
            if match[0].startswith("#"):
                number += self.text.count("\n", at, match.start())
                at = match.start()
                found.append((number, match[0]))
        return found

    @cached_property
    def docstrings(self) -> Sequence[tuple[int, str]]:
        """The docstrings of a Python file, also those under fields, line by line."""
        return [
            (node.lineno + offset, line)
            for node in self.nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for offset, line in enumerate(node.value.value.split("\n"))
        ]

    def lines(self) -> Iterator[tuple[int, str]]:
        """Give every line with its number."""
        return enumerate(self.text.split("\n"), start=1)


class Repository:
    """The files under version control, and which paths exist."""

    def __init__(self, sources: Sequence[Source], paths: Sequence[str]) -> None:
        self.sources = sources
        self._paths = frozenset(paths)
        self._folders = frozenset(str(parent) for path in paths for parent in PurePosixPath(path).parents)
        self._tails = frozenset(_tails(paths))

    @cached_property
    def python(self) -> Sequence[Source]:
        return [source for source in self.sources if source.is_python]

    def has(self, path: str) -> bool:
        """Whether there is a file or folder at exactly this path."""
        return path in self._folders or path in self._paths

    def exists(self, path: str) -> bool:
        """Whether a file or folder of this path is under version control. A path may leave out its first folders."""
        return path.strip("/") in self._tails


def _tails(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            for start in range(end):
                yield "/".join(parts[start:end])


def read_repository(root: Path = ROOT) -> Repository:
    """Read the text files that git tracks or would track (new ones count, ignored ones do not).

    Where git cannot say, as in an unpacked archive, all files count but those in the folders that runs and tools make.
    """
    listed = git_output(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = _files_below(root) if listed is None else listed.split("\0")
    paths = sorted(path for path in names if path and (root / path).is_file())
    texts = [path for path in paths if Path(path).suffix in TEXT_SUFFIXES or Path(path).name in TEXT_NAMES]
    return Repository([Source(path, (root / path).read_text(encoding="utf-8")) for path in texts], paths)


def _files_below(root: Path) -> Iterator[str]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not any(fnmatch(name, pattern) for pattern in GENERATED)]
        yield from (str((Path(folder) / file).relative_to(root)) for file in files)
