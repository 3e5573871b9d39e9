"""Do the unit tests notice mistakes? The long run plants thousands; here also the rules by which they are counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long_runs import LongRun
from tests.mutation import PACKAGES, ROOT, MutationError, Workshop, choose, report, share_found
from tests.mutation_diff import Mutant, _mutants_of
from tests.mutation_parts import PARTS, Part

WANTED_SHARE = 0.85
HOURS = 3600

# As mutmut writes a function and its mutants.
MODULE = '''
def x_say__mutmut_orig(number):
    """Say it."""
    if number > 1:
        return "Several", f"{number} of them came"
    return "One", "one came"
def x_say__mutmut_1(number):
    """Say it."""
    if number >= 1:
        return "Several", f"{number} of them came"
    return "One", "one came"
def x_say__mutmut_2(number):
    """Say it."""
    if number > 1:
        return "Several", f"{number} OF THEM CAME"
    return "One", "one came"
def x_say__mutmut_3(number):
    """Say it."""
    if number > 1:
        return "XXSeveralXX", f"{number} of them came"
    return "One", "one came"
def x_say__mutmut_4(number):
    """Say it."""
    if number > 1:
        return "Several", f"{number} of them came"
    return "One", None
'''


def made() -> list[Mutant]:
    """Give the mutants of MODULE."""
    return list(_mutants_of(MODULE, "m"))


def test_what_changes_only_a_sentence_does_not_count() -> None:
    assert [mutant.is_exempt for mutant in made()] == [False, True, False, True]
    assert [mutant.name for mutant in choose(made(), number=0, pattern="", seed=1)] == [
        "m.x_say__mutmut_1",
        "m.x_say__mutmut_3",
    ]


@pytest.mark.parametrize(
    ("line", "changed", "is_exempt"),
    [
        ("self._log.info('ready', port=port)", "self._log.info('ready', port=None)", True),
        ("log.debug('%s', error)", "log.debug('%s')", True),
        ("log.warning('%s', error)", "log.warning('%s', None)", False),
        ("catalog.info(x)", "catalog.info(None)", False),
        ("Thread(target=run, name='reader')", "Thread(target=run, name=None)", True),
        ("Thread(target=run, name='reader')", "Thread(target=None, name='reader')", False),
        ("Volume(name='data')", "Volume(name=None)", False),
        ("open(path, 'w', encoding='utf-8')", "open(path, 'w')", True),
        ("open(path, 'w', encoding='utf-8')", "open(path, None, encoding='utf-8')", False),
        ("path.read_text('utf-8')", "path.read_text('UTF-8')", True),
        ("path.read_text('utf-8')", "path.read_text(None)", True),
        ("text.encode('utf-8', 'replace')", "text.encode('utf-8')", False),
        ("path.write_text(text, encoding='utf-8')", "path.write_text(None, encoding='utf-8')", False),
        ("cast('Loop', loop)", "cast(None, loop)", True),
        ("cast('Loop', loop)", "cast('Loop', None)", False),
        ("sys.version_info < (3, 14)", "sys.version_info < (3, 15)", True),
        ("version < (3, 14)", "version < (3, 15)", False),
    ],
)
def test_what_no_test_has_to_hold_does_not_count(line: str, changed: str, is_exempt: bool) -> None:
    module = f"def x_f__mutmut_orig(a):\n    x = {line}\ndef x_f__mutmut_1(a):\n    x = {changed}\n"
    assert [mutant.is_exempt for mutant in _mutants_of(module, "m")] == [is_exempt]


@pytest.mark.needs_root
def test_a_mutant_that_signals_everybody_reaches_only_its_own_processes(tmp_path: Path) -> None:
    """Kill every process that can be seen, as a mutated group or pid could; the namespace's are all there are."""
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        script = "import os\nassert os.getpid() == 1, os.getpid()\ntry:\n    os.kill(-1, 9)\nexcept ProcessLookupError:\n    pass\n"
        (tmp_path / "hit.py").write_text(script)
        Workshop(tmp_path, PARTS["agent"])._run("hit", is_alone=True)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


TESTS = """
import warnings
import pytest

@pytest.mark.filterwarnings("ignore:old")
def test_that_ignores_a_warning():
    warnings.warn("old", stacklevel=1)

def test_that_fails():
    assert False

def test_that_warns():
    warnings.warn("new", stacklevel=1)
"""


def test_a_test_in_a_fork_passes_and_fails_as_in_a_run_of_pytest(tmp_path: Path) -> None:
    """One that fails without a mistake too finds nothing."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n')
    names = ["test_that_ignores_a_warning", "test_that_fails", "test_that_warns"]
    todo = {f"m.x_{name}__mutmut_1": [f"test_it.py::{name}"] for name in names}
    (tmp_path / "todo.json").write_text(json.dumps(todo))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "mutants_plugin",
        "--rootdir=.",
        "-c",
        "pyproject.toml",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"failed without any mistake: {[f'test_it.py::{name}' for name in names[1:]]}" in done.stdout, done.stderr
    outcomes = [line.split()[1] for line in (tmp_path / "outcomes").read_text().splitlines()]
    assert outcomes == ["survived", "untested", "untested"]


@pytest.mark.needs_root
def test_a_test_that_cannot_be_collected_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import not_there\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    shutil.copy(ROOT / "tests" / "mutants_plugin.py", tmp_path)
    with pytest.raises(MutationError, match="No module named 'not_there'"):
        Workshop(tmp_path, Part(package="twice", tests=("test_it.py",))).see_which_tests_run()


TWICE = """
def twice(number):
    return 2 * number
"""
USES = """
import os
import signal
import subprocess
import sys

import twice


def test_that_runs_it():
    assert twice.twice(2) == 4

def test_that_ends_its_process():
    twice.twice(2)
    os.kill(os.getpid(), signal.SIGSEGV)

def test_that_has_it_run_by_another_process():
    assert subprocess.run([sys.executable, "-c", "import twice; print(twice.twice(3))"], capture_output=True).stdout == b"6\\n"

def test_that_has_it_run_by_a_fork():
    if not (child := os.fork()):
        os._exit(twice.twice(3) != 6)
    assert os.waitpid(child, 0)[1] == 0

def test_that_does_not_run_it():
    pass
"""


@pytest.mark.needs_root
def test_a_test_that_ends_its_process_does_not_keep_the_others_from_finding_mistakes(tmp_path: Path) -> None:
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "__init__.py").write_text(TWICE)
    (tmp_path / "test_it.py").write_text(USES)
    (tmp_path / "pyproject.toml").write_text('[tool.mutmut]\nsource_paths = ["twice"]\n[tool.pytest.ini_options]\n')
    shop = Workshop(tmp_path, Part(package="twice", tests=("test_it.py",)))
    shop.make()
    assert shop.see_which_tests_run() == ["test_it.py::test_that_ends_its_process"]
    outcomes = [mutant.outcome for mutant in shop.try_out(shop.mutants())]
    assert outcomes == ["killed"] * len(outcomes) != []
    todo = json.loads((tmp_path / "todo.json").read_text())
    ways = ("runs_it", "has_it_run_by_another_process", "has_it_run_by_a_fork")
    assert [sorted(tests) for tests in todo.values()] == [sorted(f"test_it.py::test_that_{way}" for way in ways)] * len(
        outcomes
    )


def test_a_diff_shows_the_changed_line_alone() -> None:
    assert made()[0].diff.splitlines() == ["-    if number > 1:", "+    if number >= 1:"]


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    many = [Mutant(f"m.x_f__mutmut_{n}", "m", is_exempt=False, diff="") for n in range(100)]
    first = choose(many, number=10, pattern="", seed=7)
    assert len(first) == 10
    assert first == choose(many, number=10, pattern="", seed=7)
    assert first != choose(many, number=10, pattern="", seed=8)
    assert choose(many, number=10, pattern="mutmut_99", seed=7) == [many[99]]


def test_who_was_not_run_by_any_test_has_not_been_found() -> None:
    outcomes = ["killed", "timeout", "survived", "untested"]
    tried = [Mutant(f"m.{o}", "m", is_exempt=False, diff="-a\n+b", outcome=o) for o in outcomes]
    assert share_found(tried) == 0.5
    assert [s["name"] for s in report(tried)["survivors"]] == ["m.survived", "m.untested"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_parts_name_modules_and_tests_that_exist(part: Part) -> None:
    modules = [part.package, *part.not_mutated]
    places = [ROOT / PACKAGES[module.partition(".")[0]] / module.replace(".", "/") for module in modules]
    missing = [place for place in places if not (place.is_dir() or place.with_suffix(".py").is_file())]
    missing += [ROOT / test for test in (*part.tests, *part.tests_left_out) if not (ROOT / test).exists()]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_the_tests_of_a_part_can_be_collected_in_its_copy(part: Part, tmp_path: Path) -> None:
    """The copy has settings of its own."""
    shop = Workshop(tmp_path, part)
    shop.copy()
    shop._run("pytest", "-q", "--collect-only", "--rootdir=.", *part.tests)


@pytest.mark.long("mutation")
@pytest.mark.timeout(6 * HOURS)
def test_unit_tests_find_planted_mistakes(long_run: LongRun, tmp_path: Path) -> None:
    """Try mutants of every part.

    $MUTANTS: how many of each part, chosen by the seed. $MUTATE: only those whose name contains it, such as `core.plan.`.
    $PARTS: only these parts, separated by commas.
    """
    shares = {}
    for name in os.environ.get("PARTS", ",".join(PARTS)).split(","):
        shares[name] = try_part(long_run, name, tmp_path / name)
    long_run.count(**{f"{name}_share_found": round(share, 4) for name, share in shares.items()})
    told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    assert min(shares.values()) >= WANTED_SHARE, (
        f"of the planted mistakes were found: {told}; see .run/long/mutation.json"
    )


def try_part(long_run: LongRun, name: str, folder: Path) -> float:
    """Plant mistakes in one part and record the outcomes; give the share that was found."""
    part = PARTS[name]
    folder.mkdir()
    shop = Workshop(folder, part)
    failed = shop.prepare()
    every = shop.mutants()
    number = int(os.environ.get("MUTANTS", str(part.sample)))
    tried = shop.try_out(choose(every, number=number, pattern=os.environ.get("MUTATE", ""), seed=long_run.seed))
    outcomes = [mutant.outcome for mutant in tried]
    counts = {
        "planted": len(tried), "killed": outcomes.count("killed"), "timeouts": outcomes.count("timeout"),
        "survived": outcomes.count("survived"), "untested": outcomes.count("untested"),
        "tests_failed_unchanged": len(failed), "exempt": sum(mutant.is_exempt for mutant in every), "made": len(every),
    }  # fmt: skip
    long_run.count(**{f"{name}_{what}": count for what, count in counts.items()})
    long_run.detail(**{name: {**report(tried), "tests_failed_unchanged": failed}})
    long_run.write()
    return share_found(tried)
