"""Tests that could pass without having tested anything: checks of nothing, and of a thing against itself."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence

from tests.lint.sources import Finding, Repository, Source

# Calls that give as many items as their arguments have.
KEEPING = frozenset({"enumerate", "reversed", "sorted", "list", "tuple", "set", "zip", "product"})
EXPECTING = ("raises", "warns", "fail")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def check(repository: Repository) -> Iterator[Finding]:
    """Give the checks that cannot fail of every Python file below tests/."""
    for source in repository.python:
        if source.path.startswith("tests/"):
            yield from checks_of_nothing(source)
            yield from loops_over_nothing(source)
            yield from comparisons_with_itself(source)


def checks_of_nothing(source: Source) -> Iterator[Finding]:
    """Find `assert all(...)` over what may be empty, and asserts that allow an empty list."""
    for node in _asserts(source):
        for inner in ast.walk(node.test):
            if _is_all(inner) and not _has_items(inner.args[0].generators[0].iter):  # type: ignore[attr-defined]
                yield Finding(source.path, node.lineno, "all() of nothing is true; write every() of tests/nonempty.py")
            if isinstance(inner, ast.Compare) and isinstance(inner.ops[-1], ast.In) and _allows_empty(inner):
                yield Finding(source.path, node.lineno, "an empty list passes too; assert what must have been seen")


def loops_over_nothing(source: Source) -> Iterator[Finding]:
    """Find tests that assert only within loops that may have no iteration."""
    for node in source.nodes:
        if isinstance(node, Function) and node.name.startswith("test_") and not _draws_examples(node):
            loops = [inner for inner in ast.walk(node) if isinstance(inner, ast.For) and _may_skip_asserts(inner)]
            if loops and not _asserts_surely(node.body):
                yield Finding(
                    source.path,
                    loops[0].lineno,
                    f"{node.name} asserts nothing if this loop has no iteration; write `in some(...)` of tests/nonempty.py",
                )


def comparisons_with_itself(source: Source) -> Iterator[Finding]:
    """Find asserts that compare an expression with the same one, where nothing is called that could give something else."""
    for node in _asserts(source):
        for inner in ast.walk(node.test):
            if isinstance(inner, ast.Compare):
                sides = [inner.left, *inner.comparators]
                for left, right in itertools.pairwise(sides):
                    if ast.dump(left) == ast.dump(right) and not any(
                        isinstance(n, ast.Call | ast.Await) for n in ast.walk(left)
                    ):
                        yield Finding(source.path, node.lineno, f"{ast.unparse(left)} is compared with itself")


def _draws_examples(test: Function) -> bool:
    """Whether hypothesis draws what the test loops over: among many examples, an empty one is welcome."""
    return any("given" in ast.unparse(decorator).split("(")[0] for decorator in test.decorator_list)


def _asserts(source: Source) -> Iterator[ast.Assert]:
    return (node for node in source.nodes if isinstance(node, ast.Assert))


def _is_all(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "all":
        return False
    return bool(node.args) and isinstance(node.args[0], ast.GeneratorExp | ast.ListComp)


def _allows_empty(compare: ast.Compare) -> bool:
    allowed = compare.comparators[-1]
    if not isinstance(allowed, ast.Tuple | ast.List):
        return False
    return any(
        isinstance(one, ast.List | ast.Tuple | ast.Dict) and not ast.unparse(one).strip("[](){}")
        for one in allowed.elts
    )


def _has_items(node: ast.expr) -> bool:
    """Whether something has items for whoever reads it: literals, constants, ranges, what some() gives, and what keeps those."""
    match node:
        case ast.List() | ast.Tuple() | ast.Set():
            return bool(node.elts)
        case ast.Dict():
            return bool(node.keys)
        case ast.Constant():
            return bool(node.value)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper() or name[:1].isupper()  # a constant, or the members of an enum
        case ast.Call(func=ast.Attribute(value=value, attr="items" | "values" | "keys")):
            return _has_items(value)
        case ast.Call():
            name = ast.unparse(node.func).split(".")[-1]
            return name in ("range", "some", "split") or (name in KEEPING and any(map(_has_items, node.args)))
    return False


def _may_skip_asserts(loop: ast.For) -> bool:
    return not _has_items(loop.iter) and any(isinstance(inner, ast.Assert) for inner in ast.walk(loop))


def _asserts_surely(statements: Sequence[ast.stmt]) -> bool:
    """Whether every way through the statements asserts something, a call with a name that is no test's aside."""
    return any(map(_asserts_in, statements))


def _asserts_in(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assert() | ast.Raise() | ast.Match():
            return True
        case ast.With() | ast.AsyncWith():
            return any(_expects(item.context_expr) for item in statement.items) or _asserts_surely(statement.body)
        case ast.For() | ast.AsyncFor():
            return _has_items(statement.iter) and _asserts_surely(statement.body)
        case ast.Try():
            return any(map(_asserts_surely, (statement.body, statement.orelse, statement.finalbody)))
        case ast.If():
            return _asserts_surely(statement.body) and _asserts_surely(statement.orelse)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _asserts_surely(statement.body)  # a scenario that the test hands on
    return False


def _expects(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and ast.unparse(context.func).split(".")[-1] in EXPECTING
