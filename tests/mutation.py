"""Mutation testing of the operator's decisions: mutmut plants small mistakes in core/, and tests/unit/core must notice.

All work is done on a copy in a temporary folder, never on the checkout. There the package lies at the top (where `operator/`
would hide the standard library's module), and what the core's tests do not need is left out: the leak checks and plugins
of tests/conftest.py, and random choices (hypothesis is made to repeat itself). mutmut makes the mutants and sees which tests
run which functions; the tests are collected once (tests/mutants_plugin.py), and a fork for each mutant runs those of its
function until one fails. mutmut's own runner collects them anew for each mutant, which takes several times as long.
`docs/design/testing.md` tells the rules.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "elastipod_operator"
CORE = f"{PACKAGE}.core"
# Two properties over arbitrary facts and the cost of jobs of thousands of pods: seconds for each mutant, and they do not
# ask what comes out; and a test that holds the core against documents and other parts of the operator.
NOT_TAKEN = ("test_any_observation.py", "test_scale.py", "test_fields.py")
# mutmut makes the mutants of all modules whichever it is asked to try; this one has few.
SMALLEST = f"{CORE}.backoff.*"
OUTCOMES = {"killed", "timeout", "survived", "untested"}

SETTINGS = f"""\
[tool.mutmut]
source_paths = ["{PACKAGE}/core"]
also_copy = ["{PACKAGE}", "conftest.py", "mutants_plugin.py"]
pytest_add_cli_args_test_selection = ["tests/unit/core"]
track_dependencies = false
use_git_change_detection = false

[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "--import-mode=importlib -p no:cacheprovider"
filterwarnings = ["error"]
"""
CONFTEST = """\
from hypothesis import HealthCheck, settings

settings.register_profile(
    "mutation", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("mutation")
"""


class MutationError(RuntimeError):
    """mutmut or the tests could not be run; the message holds the end of what was said."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted mistake. outcome: killed, timeout, survived, untested (no test runs the function) or not tried."""

    name: str
    module: str
    is_wording: bool
    diff: str
    outcome: str = "not tried"

    @property
    def is_found(self) -> bool:
        return self.outcome in ("killed", "timeout")


class Workshop:
    """A folder in which mutants are made and tried on a copy of the core and its tests."""

    def __init__(self, folder: Path, *, root: Path = ROOT) -> None:
        self._folder = folder
        self._root = root
        self._mutated = folder / "mutants"

    def prepare(self) -> None:
        """Copy what is needed and have mutmut make the mutants and see which tests run which functions."""
        unwanted = shutil.ignore_patterns("__pycache__", *NOT_TAKEN)
        shutil.copytree(self._root / "operator" / PACKAGE, self._folder / PACKAGE, ignore=unwanted)
        tests = Path("tests", "unit", "core")
        shutil.copytree(self._root / tests, self._folder / tests, ignore=unwanted)
        shutil.copy(self._root / "tests" / "mutants_plugin.py", self._folder)
        (self._folder / "pyproject.toml").write_text(SETTINGS)
        (self._folder / "conftest.py").write_text(CONFTEST)
        self._run(self._folder, "mutmut", "run", "--max-children", "1", SMALLEST)

    def mutants(self) -> list[Mutant]:
        """Give every mutant that was made."""
        return [
            mutant
            for path in sorted((self._mutated / PACKAGE / "core").glob("*.py"))
            for mutant in _mutants_of(path.read_text(), f"{CORE}.{path.stem}")
        ]

    def try_out(self, mutants: list[Mutant]) -> list[Mutant]:
        """Run for each mutant the tests that run its function, the shortest first, until one fails; give the outcomes."""
        if not mutants:
            return []
        stats = json.loads((self._mutated / "mutmut-stats.json").read_text())
        tests, seconds = stats["tests_by_mangled_function_name"], stats["duration_by_test"]
        assert tests, "mutmut saw no test run any function"
        todo = {
            m.name: sorted(tests.get(_function_of(m.name), []), key=lambda test: (seconds[test], test)) for m in mutants
        }
        (self._mutated / "todo.json").write_text(json.dumps(todo))
        self._run(self._mutated, "pytest", "-q", "-p", "mutants_plugin", "--rootdir=.", "tests/unit/core")
        outcomes = dict(line.split() for line in (self._mutated / "outcomes").read_text().splitlines())
        assert set(outcomes) == set(todo)
        assert set(outcomes.values()) <= OUTCOMES
        return [replace(mutant, outcome=outcomes[mutant.name]) for mutant in mutants]

    def _run(self, folder: Path, *command: str) -> None:
        """Run a module of this environment in a folder; raises MutationError when it fails."""
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(folder)}
        log = self._folder / "log"
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=output, stderr=output, check=False
            )
        if done.returncode:
            raise MutationError(f"{command[0]} ended with {done.returncode}: {log.read_text()[-3000:]}")


def _function_of(name: str) -> str:
    return name.rpartition("__mutmut_")[0]


def choose(mutants: Iterable[Mutant], *, number: int, pattern: str, seed: int) -> list[Mutant]:
    """Give those that count and whose name contains `pattern`; of them a sample of `number`, or all for 0."""
    wanted = [mutant for mutant in mutants if not mutant.is_wording and pattern in mutant.name]
    return (
        sorted(random.Random(seed).sample(wanted, number), key=lambda m: m.name) if 0 < number < len(wanted) else wanted
    )


def share_found(mutants: list[Mutant]) -> float:
    """Give the share of mutants that the tests found."""
    return sum(mutant.is_found for mutant in mutants) / len(mutants)


def report(tried: list[Mutant]) -> dict[str, object]:
    """Give what `.run/long/mutation.json` tells besides the totals: the outcomes by module, and who survived."""
    modules: dict[str, Counter[str]] = {}
    for mutant in tried:
        modules.setdefault(mutant.module.removeprefix(f"{CORE}."), Counter())[mutant.outcome] += 1
    by_module = {
        name: {"found": round(_share(outcomes), 3), "total": outcomes.total(), **outcomes}
        for name, outcomes in modules.items()
    }
    survivors = [
        {"name": mutant.name, "outcome": mutant.outcome, "diff": mutant.diff.splitlines()}
        for mutant in tried
        if not mutant.is_found
    ]
    return {"modules": by_module, "survivors": survivors}


def _share(outcomes: Counter[str]) -> float:
    return (outcomes["killed"] + outcomes["timeout"]) / outcomes.total()


def _mutants_of(source: str, module: str) -> Iterator[Mutant]:
    """Read the mutants from a module as mutmut wrote it: each is a copy of its function beside the original."""
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    for name, changed in functions.items():
        stem, mark, number = name.rpartition("__mutmut_")
        if not mark or number == "orig":
            continue
        original = functions[f"{stem}__mutmut_orig"]
        changed.name = original.name
        yield Mutant(f"{module}.{name}", module, _is_wording(original, changed), _diff(original, changed))


def _diff(original: ast.AST, changed: ast.AST) -> str:
    before, after = ast.unparse(original).splitlines(), ast.unparse(changed).splitlines()
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _is_wording(original: ast.AST, changed: ast.AST) -> bool:
    """Whether two versions of a function differ only within one sentence for people, or in having it at all."""
    if _is_sentence(original):
        return True
    pair = _only_difference(original, changed)
    return pair is not None and _is_wording(*pair)


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
