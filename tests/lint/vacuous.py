"""Tests that could pass without having tested anything: checks of nothing, searches of nothing, a thing against itself."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence

from tests.lint.sources import Finding, Repository, Source

# Calls that give as many items as their arguments have.
KEEPING = frozenset({"enumerate", "reversed", "sorted", "list", "tuple", "set"})
PAIRING = frozenset({"zip", "product"})  # which have none where one of their arguments has none
EXPECTING = ("raises", "warns", "fail")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Counts = Callable[[ast.Assert], bool]


def check(repository: Repository) -> Iterator[Finding]:
    """Give the checks that cannot fail of every Python file below tests/."""
    for source in repository.python:
        if source.path.startswith("tests/"):
            yield from checks_of_nothing(source)
            yield from loops_over_nothing(source)
            yield from comparisons_with_itself(source)
            yield from absences_from_nothing(source)


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
        if not isinstance(node, Function) or not node.name.startswith("test_"):
            continue
        if _asserts_surely(node.body) or _draws_examples(node):
            continue
        loops = [inner for inner in ast.walk(node) if isinstance(inner, ast.For) and _may_skip_asserts(inner)]
        if loops:
            yield Finding(
                source.path,
                loops[0].lineno,
                f"{node.name} asserts nothing if this loop has no iteration; write `in some(...)` of tests/nonempty.py",
            )


def absences_from_nothing(source: Source) -> Iterator[Finding]:
    """Find tests whose asserts all say what a search did not find: a search of nothing finds nothing either.

    Of parametrized tests one case may have nothing to search, such as a page without commands.
    """
    for node in source.nodes:
        if not isinstance(node, Function) or not node.name.startswith("test_"):
            continue
        if _asserts_surely(node.body, _is_presence) or _has_cases(node):
            continue
        absences = [inner for inner in ast.walk(node) if isinstance(inner, ast.Assert) and _is_absence(inner.test)]
        if absences:
            yield Finding(
                source.path,
                absences[0].lineno,
                f"{node.name} asserts only what was not found; search `some(...)` of tests/nonempty.py, or assert what was found",
            )


def comparisons_with_itself(source: Source) -> Iterator[Finding]:
    """Find asserts that compare an expression with the same one, where nothing is called that could give something else."""
    for node in _asserts(source):
        for inner in ast.walk(node.test):
            if isinstance(inner, ast.Compare):
                sides = [inner.left, *inner.comparators]
                for left, right in itertools.pairwise(sides):
                    if _are_equal(left, right) and not any(isinstance(n, ast.Call | ast.Await) for n in ast.walk(left)):
                        yield Finding(source.path, node.lineno, f"{ast.unparse(left)} is compared with itself")


def _are_equal(left: ast.expr, right: ast.expr) -> bool:
    return type(left) is type(right) and ast.dump(left) == ast.dump(right)


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
            is_strict = any(word.arg == "strict" and ast.unparse(word.value) == "True" for word in node.keywords)
            if name in PAIRING and not is_strict:
                return all(map(_has_items, node.args))
            return name in ("range", "some", "split") or (name in KEEPING | PAIRING and any(map(_has_items, node.args)))
    return False


def _may_skip_asserts(loop: ast.For) -> bool:
    return not _has_items(loop.iter) and any(isinstance(inner, ast.Assert) for inner in ast.walk(loop))


def _asserts_surely(statements: Sequence[ast.stmt], counts: Counts = lambda _: True) -> bool:
    """Whether every way through the statements asserts something, a call with a name that is no test's aside."""
    return any(_asserts_in(statement, counts) for statement in statements)


def _asserts_in(statement: ast.stmt, counts: Counts) -> bool:
    match statement:
        case ast.Assert():
            return counts(statement)
        case ast.Raise() | ast.Match():
            return True
        case ast.With() | ast.AsyncWith():
            expects = any(_expects(item.context_expr) for item in statement.items)
            return expects or _asserts_surely(statement.body, counts)
        case ast.For() | ast.AsyncFor():
            return _has_items(statement.iter) and _asserts_surely(statement.body, counts)
        case ast.Try():
            return any(
                _asserts_surely(body, counts) for body in (statement.body, statement.orelse, statement.finalbody)
            )
        case ast.If():
            return _asserts_surely(statement.body, counts) and _asserts_surely(statement.orelse, counts)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _asserts_surely(statement.body, counts)  # a scenario that the test hands on
    return False


def _is_presence(statement: ast.Assert) -> bool:
    return not _is_absence(statement.test)


def _is_absence(test: ast.expr) -> bool:
    """Whether an assert holds if what it searches is empty: `not [...]`, `not any(...)`, `[...] == []`, `{...} <= known`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Name(id="any"), args=[searched])):
            return _searches_nothing(searched)
        case ast.UnaryOp(op=ast.Not(), operand=searched):
            return _searches_nothing(searched)
        case ast.Compare(left=searched, ops=[ast.Eq()], comparators=[ast.List(elts=[]) | ast.Tuple(elts=[])]):
            return _searches_nothing(searched)
        case ast.Compare(left=searched, ops=[ast.Eq()], comparators=[ast.Call(func=ast.Name(id="set"), args=[])]):
            return _searches_nothing(searched)
        case ast.Compare(left=searched, ops=[ast.LtE()]):
            return _searches_nothing(searched)
    return False


def _searches_nothing(node: ast.expr) -> bool:
    """Whether this is a selection from something that may have no items."""
    match node:
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return not _has_items(node.generators[0].iter)
        case ast.Call(func=ast.Name(id="set"), args=[found]):
            return not _has_items(found)
        case ast.Call(func=ast.Name(id="map"), args=[_, found]):
            return not _has_items(found)
    return False


def _has_cases(test: Function) -> bool:
    """Whether a test is parametrized, also by a mark that has a name (`@PAGES`)."""
    marks = [ast.unparse(decorator) for decorator in test.decorator_list]
    return _draws_examples(test) or any("parametrize" in mark or mark.isupper() for mark in marks)


def _expects(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and ast.unparse(context.func).split(".")[-1] in EXPECTING
