"""Each threat of the security page names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest
from tests.unit.docs.pages import ROOT, page

ROWS = list(page("docs/security.md").table_rows("## Threats and tests"))[1:]


def test_the_threats_are_listed() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0])[:60])
def test_each_threat_has_a_test(row: list[str]) -> None:
    named = re.findall(r"`(tests/[^`]+)`", row[2])
    assert named != []
    for name in named:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in functions if function else any(one.startswith("test_") for one in functions), name
