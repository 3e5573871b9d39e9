"""What `import elastipod` offers: every error that a docstring promises, and no import circle behind it."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nonempty import every, some

import elastipod
import elastipod.audit
import elastipod.testing

PACKAGE = Path(elastipod.__file__).parent
ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Timeout)\b")


def docstrings_of(name: str) -> Iterator[str]:
    found = getattr(elastipod, name)
    yield found.__doc__ or ""
    if inspect.isclass(found):
        members = {"__init__": found.__init__, **{key: value for key, value in vars(found).items() if key[0] != "_"}}
        yield from (inspect.getdoc(member) or "" for member in members.values() if hasattr(member, "__doc__"))


@pytest.mark.parametrize("name", elastipod.__all__)
def test_every_error_that_a_docstring_promises_can_be_imported(name: str) -> None:
    promised = {error for text in docstrings_of(name) for error in ERROR.findall(text)}
    assert [error for error in sorted(promised) if not hasattr(elastipod, error) and not hasattr(builtins, error)] == []


def test_all_errors_of_the_library_are_exported() -> None:
    from elastipod import errors

    defined = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    assert every(getattr(elastipod, name) is getattr(errors, name) for name in defined)


def test_the_proof_tools_have_packages_of_their_own() -> None:
    for package in (elastipod.audit, elastipod.testing):
        for name in some(set(package.__all__) & set(elastipod.__all__)):
            assert getattr(package, name) is getattr(elastipod, name)


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """Give the modules of the library that a file imports, wherever in it, also for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & set(modules)


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {
        ".".join(["elastipod", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    del modules["elastipod"]  # it names everything, and loads it when it is first used
    left = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    while free := [name for name, needed in left.items() if not needed & set(left)]:
        for name in free:
            del left[name]
    assert sorted(left) == [], "these modules import each other, or import modules that do"
