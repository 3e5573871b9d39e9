"""Mutation testing: mutmut plants small mistakes in one part of the product, and that part's unit tests must notice.

All work is done on a copy in a temporary folder, never on the checkout. There the packages lie at the top (where `operator/`
would hide the standard library's module), and what the unit tests do not need is left out: the leak checks and plugins
of tests/conftest.py, and random choices (hypothesis is made to repeat itself). mutmut makes the mutants. The tests are
collected once (tests/mutants_plugin.py): a fork for each test shows which functions it runs, and a fork for each mutant runs the
tests of its function until one fails. mutmut's own runner has a single process for all tests, which one of them may end, and
collects them anew for each mutant, which takes several times as long. `docs/design/testing.md` gives the rules.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Where the packages lie in the checkout, by name; in the copy they all lie at the top.
PACKAGES = {
    "elastipod_operator": "operator", "elastipod": "agent", "elastipod_agent": "agent",
    "hyperpod_elastic_agent": "agent", "elastipod_client": "operator", "elastipod_local": "localcluster", "bench": ".",
}  # fmt: skip
# What runs in the copy, by the name that it has there.
TOOLS = {
    "mutants_maker.py": "mutants_maker.py", "mutants_plugin.py": "mutants_plugin.py", "mutants_sitecustomize.py": "sitecustomize.py",
}  # fmt: skip
# What tests read beside the packages.
BESIDE = ("tests", "docs", "crds", "charts", "examples", "requirements", "Dockerfile", "README.md")
# Log lines of expected events: calls of these methods of these objects.
LOGS, LOG_METHODS = frozenset({"log", "logger"}), frozenset({"debug", "info"})
# Names of threads and tasks, by the function or class that takes them.
LABELS = {"Thread": ("name",), "ThreadPoolExecutor": ("thread_name_prefix",), "create_task": ("name",)}
# A process namespace of its own; who is not root needs a user namespace around it.
NAMESPACE = (
    "unshare", *(() if os.geteuid() == 0 else ("--map-current-user",)), "--pid", "--fork", "--mount-proc", "--kill-child",
)  # fmt: skip
OUTCOMES = {"killed", "timeout", "survived", "untested"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the product and the unit tests that must notice mistakes in it.

    package: the package that is mutated. not_mutated: modules and packages in it that are not. tests: folders of tests.
    tests_left_out: files in them that are not run. sample: how many mutants are tried unless the caller asks for another number;
    0 for all. memory_gib: the address space of one try; torch's libraries reserve a lot of it.
    """

    package: str
    tests: tuple[str, ...]
    not_mutated: tuple[str, ...] = ()
    tests_left_out: tuple[str, ...] = ()
    sample: int = 300
    memory_gib: int = 3


PARTS = {
    # Left out: two properties over arbitrary facts and the cost of jobs of thousands of pods, which take seconds for each
    # mutant and do not ask what comes out; numbers of calls, which mutmut's own multiply; rules of
    # how the source is written; and a test that holds the core against documents and other parts of the operator.
    "core": Part(
        package="elastipod_operator.core",
        tests=("tests/unit/core",),
        tests_left_out=(
            "tests/unit/core/test_bounds.py",
            "tests/unit/core/test_plan_any_snapshot.py",
            "tests/unit/core/test_plan_scale.py",
            "tests/unit/core/test_reasons.py",
            "tests/unit/core/test_spec_fields.py",
        ),
        sample=0,
    ),
    "shell": Part(
        package="elastipod_operator",
        not_mutated=("elastipod_operator.core", "elastipod_operator.api"),
        tests=(
            "tests/unit/admission",
            "tests/unit/agents",
            "tests/unit/kube",
            "tests/unit/operator_shell",
            "tests/unit/queues",
            "tests/unit/core/test_spec_fields.py",  # each field of a spec in the policy
        ),
        tests_left_out=("tests/unit/kube/test_fuzz.py",),
    ),
    # Not mutated: scripts that an interpreter without the installed packages runs, and so without mutmut's own.
    "agent": Part(
        package="elastipod_agent",
        not_mutated=("elastipod_agent.workers.matcher_process", "elastipod_agent.fork_server.bootstrap"),
        tests=("tests/unit/agent",),
        tests_left_out=("tests/unit/agent/test_program_traceback.py",),  # mutmut's frames are in every traceback
        memory_gib=64,
    ),
    "library": Part(
        package="elastipod",
        # Their packages are not in this environment; tests/e2e/test_frameworks.py runs them.
        not_mutated=(
            "elastipod.integrations.accelerate",
            "elastipod.integrations.lightning",
            "elastipod.integrations.transformers",
        ),
        # Beside its own: tests of its client for the agent, which a real agent answers.
        tests=(
            "tests/unit/library",
            "tests/unit/checkpoint",
            "tests/unit/in_memory",
            "tests/unit/integrations",
            "tests/unit/recipes",
            "tests/unit/core/test_model_groups.py",  # sizes that keep groups of ranks whole, which both sides compute
            "tests/unit/agent/test_ipc.py",
            "tests/unit/agent/test_store_wait.py",
            "tests/unit/agent/test_ipc_names.py",
            "tests/unit/agent/test_worker_file.py",
        ),
        tests_left_out=(
            "tests/unit/library/test_imports.py",  # mutants import what mutmut needs
            "tests/unit/library/test_torch_names.py",  # it reads the source
            "tests/unit/integrations/test_packages.py",  # it reads pyproject.toml, which is mutmut's own there
        ),
        memory_gib=64,
    ),
}

SETTINGS = """\
[tool.mutmut]
source_paths = {sources}

[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "--import-mode=importlib -p no:cacheprovider -p pytest_asyncio.plugin"
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
filterwarnings = ["error"]
markers = ["long", "timeout", "needs_root", "cluster"]
"""
CONFTEST = """\
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "mutation", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("mutation")


@pytest.fixture
def seed():
    return 1


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.get_closest_marker("long") is None]
"""


class MutationError(RuntimeError):
    """mutmut or the tests could not be run; the message holds the end of what was said."""


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


class Workshop:
    """A folder in which mutants of one part are made and tried on a copy."""

    def __init__(self, folder: Path, part: Part, *, root: Path = ROOT) -> None:
        self._folder = folder
        self._part = part
        self._root = root
        self._hits = folder / "hits"  # which tests run which functions

    def prepare(self) -> list[str]:
        """Copy what is needed, make the mutants, and see which tests run which functions. Give the tests that are of no use."""
        self.copy()
        self.make()
        return self.see_which_tests_run()

    def make(self) -> None:
        """Put the mutants of each function beside it, in the copies of the modules."""
        for name, there in TOOLS.items():
            shutil.copy(ROOT / "tests" / name, self._folder / there)
        spared = [_path_of(module) for module in self._part.not_mutated]
        paths = [
            str(path)
            for path in (each.relative_to(self._folder) for each in self._modules())
            if not any(path.with_suffix("").is_relative_to(one) for one in spared)
        ]
        self._run("mutants_maker", *paths)

    def _modules(self) -> list[Path]:
        return sorted((self._folder / _path_of(self._part.package)).rglob("*.py"))

    def see_which_tests_run(self) -> list[str]:
        """Run every test once, and keep which functions it runs and how long it takes. Give those that fail without a mistake."""
        self._hits.touch()
        self._run_tests(MUTANTS_HITS=str(self._hits))
        failed: list[str] = self._unchanged()["failed"]
        return failed

    def _unchanged(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / "unchanged.json").read_text())
        return found

    def copy(self) -> None:
        """Copy packages and tests, and write the settings."""
        unwanted = shutil.ignore_patterns("__pycache__")
        copied = {name: self._root / place / name for name, place in PACKAGES.items()}
        copied |= {name: self._root / name for name in BESIDE}
        for name, source in copied.items():
            if source.is_dir():
                shutil.copytree(source, self._folder / name, ignore=unwanted)
            else:
                shutil.copy(source, self._folder)
        (self._folder / "tests" / "conftest.py").unlink()
        settings = SETTINGS.format(sources=json.dumps([_path_of(self._part.package)]))
        (self._folder / "pyproject.toml").write_text(settings)
        (self._folder / "conftest.py").write_text(f"{CONFTEST}\n\ncollect_ignore = {list(self._part.tests_left_out)}\n")

    def mutants(self) -> list[Mutant]:
        """Give every mutant that was made."""
        return [mutant for path in self._modules() for mutant in _mutants_of(path.read_text(), self._module_of(path))]

    def _module_of(self, path: Path) -> str:
        parts = path.relative_to(self._folder).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def try_out(self, mutants: list[Mutant]) -> list[Mutant]:
        """Run for each mutant the tests that run its function, the shortest first, until one fails; give the outcomes."""
        if not mutants:
            return []
        seconds: dict[str, float] = self._unchanged()["seconds"]
        tests: dict[str, list[str]] = {}
        for line in sorted(set(self._hits.read_text().splitlines())):
            test, function = line.split("\t")
            if test in seconds:
                tests.setdefault(function, []).append(test)
        assert tests, "no test runs any function"
        todo = {
            m.name: sorted(tests.get(_function_of(m.name), []), key=lambda test: (seconds[test], test)) for m in mutants
        }
        (self._folder / "todo.json").write_text(json.dumps(todo))
        self._run_tests()
        outcomes = dict(line.split() for line in (self._folder / "outcomes").read_text().splitlines())
        assert set(outcomes) == set(todo)
        assert set(outcomes.values()) <= OUTCOMES
        return [replace(mutant, outcome=outcomes[mutant.name]) for mutant in mutants]

    def _run_tests(self, **variables: str) -> None:
        limits = {"MUTANTS_MEMORY_BYTES": str(self._part.memory_gib << 30)}
        tests = ("pytest", "-q", "-p", "mutants_plugin", "--rootdir=.", *self._part.tests)
        self._run(*tests, is_alone=True, **limits, **variables)

    def _run(self, *command: str, is_alone: bool = False, **variables: str) -> None:
        """Run a module of this environment in the folder; raises MutationError when it fails.

        is_alone: in a process namespace of its own, so that a mutant that signals the wrong process reaches no other program.
        """
        environment = {
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(self._folder),
            **variables,
        }
        log = self._folder / "log"
        with log.open("a") as output:
            done = subprocess.run(
                [*(NAMESPACE if is_alone else ()), sys.executable, "-m", *command],
                cwd=self._folder,
                env=environment,
                stdout=output,
                stderr=output,
                check=False,
            )
        if done.returncode:
            raise MutationError(f"{command[0]} ended with {done.returncode}: {log.read_text()[-3000:]}")


def _path_of(module: str) -> str:
    return module.replace(".", "/")


def _function_of(name: str) -> str:
    return name.rpartition("__mutmut_")[0]


def choose(mutants: Iterable[Mutant], *, number: int, pattern: str, seed: int) -> list[Mutant]:
    """Give those that count and whose name contains `pattern`; of them a sample of `number`, or all for 0."""
    wanted = [mutant for mutant in mutants if not mutant.is_exempt and pattern in mutant.name]
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
        modules.setdefault(mutant.module, Counter())[mutant.outcome] += 1
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
