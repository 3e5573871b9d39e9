"""Mutation testing: mutmut plants small mistakes in one part of the product, and that part's unit tests must notice.

All work is done on a copy in a temporary folder, never on the checkout. There the packages lie at the top (where `operator/`
would hide the standard library's module), and what the unit tests do not need is left out: the leak checks and plugins
of tests/conftest.py, and random choices (hypothesis is made to repeat itself). mutmut makes the mutants. The tests are
collected once (tests/mutants_plugin.py): a fork for each test shows which functions it runs, and a fork for each mutant runs the
tests of its function until one fails. mutmut's own runner has a single process for all tests, which one of them may end, and
collects them anew for each mutant, which takes several times as long. `docs/design/testing.md` gives the rules."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomllib
from tests.mutation_diff import Mutant, _mutants_of
from tests.mutation_parts import Part

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
# A process namespace of its own; who is not root needs a user namespace around it.
NAMESPACE = (
    "unshare", *(() if os.geteuid() == 0 else ("--map-current-user",)), "--pid", "--fork", "--mount-proc", "--kill-child",
)  # fmt: skip
OUTCOMES = {"killed", "timeout", "survived", "untested"}
SETTINGS = """\
[tool.mutmut]
source_paths = {sources}

[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "--import-mode=importlib -p no:cacheprovider -p pytest_asyncio.plugin"
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
filterwarnings = ["error"]
markers = {markers}
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
        settings = SETTINGS.format(sources=json.dumps([_path_of(self._part.package)]), markers=json.dumps(_markers()))
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


def _markers() -> list[str]:
    """Give the marks that tests of the checkout may have; `timeout` is that of a plugin which the copy leaves out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [*settings["tool"]["pytest"]["ini_options"]["markers"], "timeout"]


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
