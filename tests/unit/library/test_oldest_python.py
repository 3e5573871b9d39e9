"""Agent and library import nothing from the standard library that the oldest supported Python lacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mypy
import pytest
from tests.nonempty import some

OLDEST = (3, 10)
AGENT = Path(__file__).resolve().parents[3] / "agent"
ASKED_FOR_FIRST = {("sys", "last_exc")}  # used where sys.version_info says that it is there
STUBS = Path(mypy.__file__).with_name("typeshed") / "stdlib"  # they say since which version each name is there


@cache
def newer(module: str) -> frozenset[str]:
    """Give the names of a module of the standard library that came after the oldest Python; none for other modules."""
    path = next(
        (
            p
            for p in (STUBS / module.replace(".", "/") / "__init__.pyi", STUBS / f"{module.replace('.', '/')}.pyi")
            if p.exists()
        ),
        None,
    )
    if path is None:
        return frozenset()
    old: set[str] = set()
    new: set[str] = set()
    _collect(ast.parse(path.read_text(encoding="utf-8")).body, module, old, new, is_new=False)
    return frozenset(new - old)


def _collect(body: list[ast.stmt], module: str, old: set[str], new: set[str], *, is_new: bool) -> None:
    for one in body:
        if isinstance(one, ast.If):
            since = _since(one.test)
            _collect(one.body, module, old, new, is_new=is_new or (since is not None and since > OLDEST))
            _collect(one.orelse, module, old, new, is_new=is_new)
        elif isinstance(one, ast.ImportFrom) and one.names[0].name == "*" and one.level == 1:
            path = STUBS / module.replace(".", "/") / f"{one.module}.pyi"
            _collect(ast.parse(path.read_text(encoding="utf-8")).body, module, old, new, is_new=is_new)
        else:
            (new if is_new else old).update(_names(one))


def _since(test: ast.expr) -> tuple[int, ...] | None:
    """Give the version of `sys.version_info >= (3, 11)`."""
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.GtE)
        and isinstance(test.comparators[0], ast.Tuple)
    ):
        return tuple(ast.literal_eval(test.comparators[0]))
    return None


def _names(one: ast.stmt) -> Iterator[str]:
    if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield one.name
    elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
        yield one.target.id
    elif isinstance(one, ast.Assign):
        yield from (target.id for target in one.targets if isinstance(target, ast.Name))
    elif isinstance(one, ast.ImportFrom):
        yield from (name.asname or name.name for name in one.names)


def used(source: str) -> Iterator[tuple[str, str]]:
    """Give what a file takes from other modules: (module, name)."""
    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {name.asname or name.name: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, name.name) for name in node.names)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def test_it_knows_what_is_newer() -> None:
    assert "StrEnum" in newer("enum")
    assert "UTC" in newer("datetime")
    assert "timeout" in newer("asyncio")
    assert "Enum" not in newer("enum")
    assert list(used("import datetime as d\nfrom enum import StrEnum\nd.UTC")) == [
        ("enum", "StrEnum"),
        ("datetime", "UTC"),
    ]


@pytest.mark.slow
def test_nothing_newer_is_used() -> None:
    found = [
        f"{path.relative_to(AGENT)} uses {module}.{name}"
        for path in some(sorted(AGENT.rglob("*.py")))
        for module, name in used(path.read_text(encoding="utf-8"))
        if name in newer(module) and (module, name) not in ASKED_FOR_FIRST
    ]
    assert found == []
