"""The pages of the documentation, and the code words in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GENERATED = frozenset(
    {
        "docs/api-reference.md",
        "docs/design/fields.md",
        "docs/reference/reasons.md",
        "docs/reference/benchmarks.md",
        "docs/reference/proven.md",
        "docs/reference/python.md",
    }
)
SPAN = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of Markdown. path: relative to the repository."""

    path: str
    text: str

    def blocks(self, language: str | None = None) -> Iterator[str]:
        """Give the code blocks, of one language or of any."""
        return (body for kind, body in BLOCK.findall(self.text) if language is None or kind == language)

    def spans(self) -> Iterator[str]:
        """Give every piece of inline code."""
        return iter(SPAN.findall(BLOCK.sub("", self.text)))

    def commands(self) -> Iterator[str]:
        """Give the command lines: lines of plain or shell blocks without their comments, and inline code."""
        for language in ("", "sh", "bash", "console"):
            for block in self.blocks(language):
                for line in block.replace("\\\n", " ").splitlines():
                    yield re.split(r"\s#\s", line)[0].strip()
        yield from self.spans()

    def table_rows(self, heading: str) -> Iterator[list[str]]:
        """Give the rows of the tables below a heading, down to the next one of the same level."""
        level = heading.split(" ")[0]
        after = self.text.split(f"\n{heading}\n", 1)[1]
        section = re.split(rf"^{level} ", after, maxsplit=1, flags=re.MULTILINE)[0]
        for line in section.splitlines():
            if line.startswith("|") and not line.startswith("|---"):
                yield [cell.strip() for cell in line.strip("|").split(" | ")]


def page(path: str) -> Page:
    """Read one page."""
    return Page(path, (ROOT / path).read_text())


def pages() -> list[Page]:
    """Read every page that people write by hand."""
    found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), ROOT / "bench" / "README.md"]
    found += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    paths = sorted(str(path.relative_to(ROOT)) for path in found)
    return [page(path) for path in paths if path not in GENERATED]


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> str:
    """Give the text of all files of some folders, in one piece."""
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes)
    return "\n".join(path.read_text() for path in files)
