"""Rules for code that ruff does not have: short functions, no lost exceptions, tensors on a device, names that mean one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from tests.lint.sources import Finding, Repository, Source

MAX_FUNCTION_LINES = 70
# Longer functions, each with the reason.
LONG: Mapping[tuple[str, str], str] = {
    ("tests/e2e/lost_rank_cases.py", "lose_ranks"): "a case with the training function that its workers run",
}
# Packages whose public classes and modules have a name each: what is read together. path prefix -> family
FAMILIES: Mapping[str, str] = {
    "operator/elastipod_operator/": "the operator",
    "agent/": "agent and library",
    "operator/elastipod_client/": "the users' commands",
    "localcluster/": "the local cluster",
}
LIBRARY = "agent/elastipod/"
# Functions of torch that make a tensor on the default device, which a script may have set, unless they are told another.
MAKES_TENSOR = frozenset(
    {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint"}
    | {"randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}
)
# Names that two may share, each with the reason.
SHARED: Mapping[str, str] = {
    "ipc": "hyperpod_elastic_agent has the original's module names, and nothing else in them",
}


def check(repository: Repository) -> Iterator[Finding]:
    """Give what breaks a rule in any Python file."""
    for source in repository.python:
        yield from long_functions(source)
        if not source.path.startswith("tests/"):
            yield from lost_exceptions(source)
        if source.path.startswith(LIBRARY):
            yield from tensors_on_the_default_device(source)
    yield from shared_names(repository.python, set(SHARED))


def long_functions(source: Source) -> Iterator[Finding]:
    """Find functions of more lines than fit on a screen."""
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES and (source.path, node.name) not in LONG:
                yield Finding(
                    source.path,
                    node.lineno,
                    f"{node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}; take parts out that have a name of their own",
                )


def lost_exceptions(source: Source) -> Iterator[Finding]:
    """Find exceptions of which nothing is left, and handlers of every exception, that no comment explains.

    The comment stands above the handler, on its line, or in its body. A handler that raises again needs none.
    """
    losing = [(node, what) for node in source.nodes if (what := _loses(node))]
    explained = {number for number, text in source.comments if _says_why(text)} if losing else set()
    for node, what in losing:
        assert isinstance(node, (ast.ExceptHandler, ast.With))
        last = node.body[-1].end_lineno or node.lineno if isinstance(node, ast.ExceptHandler) else node.lineno
        if explained.isdisjoint(range(node.lineno - 1, last + 1)):
            yield Finding(source.path, node.lineno, f"{what}; say in a comment why that is right, or handle it")


def tensors_on_the_default_device(source: Source) -> Iterator[Finding]:
    """Find calls that make a tensor without a device: it would lie on an accelerator in a script that has set one as default."""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or any(each.arg == "device" for each in node.keywords):
            continue
        module, _, name = ast.unparse(node.func).partition(".")
        if module == "torch" and name in MAKES_TENSOR:
            text = f'torch.{name} makes a tensor on the script\'s default device; say device="cpu", or which one it is'
            yield Finding(source.path, node.lineno, text)


def _says_why(comment: str) -> bool:
    """Whether a comment has words of its own beside markers for tools."""
    return len(re.sub(r"#\s*(noqa|type|fmt|pragma):\s*[^\s]*", "", comment).strip("# ").split()) > 1


def _loses(node: ast.AST) -> str:
    """Say what a handler loses; empty for any other node."""
    if isinstance(node, ast.ExceptHandler):
        if all(isinstance(statement, (ast.Pass, ast.Continue)) for statement in node.body):
            return "an exception is dropped here"
        if _is_broad(node.type) and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
            return "every exception is caught here"
    elif isinstance(node, ast.With) and any(_suppresses_all(item.context_expr) for item in node.items):
        return "every exception is dropped here"
    return ""


def _is_broad(kind: ast.expr | None) -> bool:
    return kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))


def _suppresses_all(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("suppress"):
        return False
    return any(_is_broad(name) for name in call.args)


def shared_names(sources: Sequence[Source], allowed: set[str]) -> Iterator[Finding]:
    """Find public classes, and modules, of one family that have the same name."""
    places: dict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
    for source in sources:
        family = next((name for prefix, name in FAMILIES.items() if source.path.startswith(prefix)), None)
        if family is None:
            continue
        places[family, "module", PurePosixPath(source.path).stem].append((source.path, 1))
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                places[family, "class", node.name].append((source.path, node.lineno))
    for (family, kind, name), found in places.items():
        if len(found) > 1 and not name.startswith("_") and name not in allowed:
            (first, at), *others = found
            for path, line in others:
                yield Finding(
                    path,
                    line,
                    f"the {kind} {name} exists in {first}:{at} too; of two in {family} each needs a name of its own",
                )
