"""Reading mutants from a module as mutmut wrote it, and which of them no unit test has to notice."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

# Log lines of expected events: calls of these methods of these objects.
LOGS, LOG_METHODS = frozenset({"log", "logger"}), frozenset({"debug", "info"})
# Names of threads and tasks, by the function or class that takes them.
LABELS = {"Thread": ("name",), "ThreadPoolExecutor": ("thread_name_prefix",), "create_task": ("name",)}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted mistake. outcome: killed, timeout, survived, untested (no test runs the function) or not tried."""

    name: str
    module: str
    is_exempt: bool
    diff: str
    outcome: str = "not tried"

    @property
    def is_found(self) -> bool:
        return self.outcome in ("killed", "timeout")


def _mutants_of(source: str, module: str) -> Iterator[Mutant]:
    """Read the mutants from a module as mutmut wrote it: each is a copy of its function beside the original."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}
    for name, changed in functions.items():
        stem, mark, number = name.rpartition("__mutmut_")
        if not mark or number == "orig":
            continue
        original = functions[f"{stem}__mutmut_orig"]
        changed.name = original.name
        yield Mutant(f"{module}.{name}", module, _is_exempt(original, changed), _diff(original, changed))


def _diff(original: ast.AST, changed: ast.AST) -> str:
    before, after = ast.unparse(original).splitlines(), ast.unparse(changed).splitlines()
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _is_exempt(original: ast.AST, changed: ast.AST) -> bool:
    """Whether two versions of a function differ only in something that no unit test has to hold (docs/design/testing.md).

    That is within one sentence for people, in what a log line of an expected event says, in the name of a thread or task, in the
    spelling of the default encoding, in what `cast` tells the type checker, or in a comparison of Python's version.
    """
    if _is_sentence(original) or _is_exempt_call(original, changed) or _asks_for_the_version(original):
        return True
    pair = _only_difference(original, changed)
    return pair is not None and _is_exempt(*pair)


def _asks_for_the_version(node: ast.AST) -> bool:
    """Whether a node compares the version of Python, of which a run sees only one."""
    return isinstance(node, ast.Compare) and ast.unparse(node.left) == "sys.version_info"


def _is_exempt_call(original: ast.AST, changed: ast.AST) -> bool:
    if not isinstance(original, ast.Call) or not isinstance(changed, ast.Call):
        return False
    if ast.dump(original.func) != ast.dump(changed.func):
        return False
    callee = original.func
    if isinstance(callee, ast.Attribute) and callee.attr in LOG_METHODS and _name_of(callee.value) in LOGS:
        return True
    if _name_of(callee) == "cast":
        return ast.dump(original.args[-1]) == ast.dump(changed.args[-1]) and len(original.args) == len(changed.args)
    return _without_labels(original, original) == _without_labels(changed, original)


def _without_labels(call: ast.Call, original: ast.Call) -> str:
    """Give a call without the name of the thread or task that it makes, and without the encoding, if the original names UTF-8."""
    labels = {*LABELS.get(_name_of(call.func), ()), "encoding"}
    is_utf8 = any(_is_utf8(one) for one in original.args)
    args = [one for one in call.args if not (is_utf8 and (_is_utf8(one) or _is_constant(one, None)))]
    return ast.dump(ast.Call(call.func, args, [one for one in call.keywords if one.arg not in labels]))


def _is_utf8(node: ast.AST) -> bool:
    return _is_constant(node, "utf-8") or _is_constant(node, "UTF-8")


def _is_constant(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def _name_of(node: ast.AST) -> str:
    """Give the last part of a name, such as `log` of `self._runtime.log`, without underscores before it."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def _is_sentence(node: ast.AST) -> bool:
    """Whether a node is a text of several words; codes, reasons and names of fields have no blanks."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value for part in parts)


def _only_difference(original: ast.AST, changed: ast.AST) -> tuple[ast.AST, ast.AST] | None:
    """Give the one pair of children in which two nodes of the same kind differ; None when there is no single one."""
    if type(original) is not type(changed):
        return None
    before, after = list(ast.iter_child_nodes(original)), list(ast.iter_child_nodes(changed))
    if len(before) != len(after):
        return None
    pairs = [pair for pair in zip(before, after, strict=True) if ast.dump(pair[0]) != ast.dump(pair[1])]
    return pairs[0] if len(pairs) == 1 else None
