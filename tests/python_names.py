"""Write docs/reference/python.md: every public name of the library with the first paragraph of its docstring (`make generate`)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

MODULES = ("elastipod", "elastipod.audit", "elastipod.checkpoint", "elastipod.testing")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "python.md"
HEAD = """<!-- Generated from the docstrings of agent/elastipod by `make generate`; edits are lost. -->
# Python names

For those who write training scripts: every public name of the library, where it is imported from, and what it is for.
`help(NAME)` in Python shows its arguments, and what it raises. The [user guide](../user-guide.md) shows most of them at work.
"""


def described(module: str) -> Iterator[tuple[str, str]]:
    """Give each public name of a module with the first paragraph of its docstring. Raises ValueError for a name without one."""
    content = importlib.import_module(module)
    for name in sorted(content.__all__, key=str.lower):
        text = getattr(content, name).__doc__  # a class must say for itself what it is for
        if not text:
            raise ValueError(f"{module}.{name} has no docstring")
        first = re.split(r"\n\s*\n", text.strip())[0]
        yield name, " ".join(first.replace("``", "`").replace("|", "\\|").split())


def render() -> str:
    """Give the page."""
    parts = [HEAD]
    for module in MODULES:
        parts.append(f"\n## {module}\n\n| name | what it is |\n|---|---|\n")
        parts += [f"| `{name}` | {text} |\n" for name, text in described(module)]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
