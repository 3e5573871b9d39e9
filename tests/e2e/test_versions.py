"""Our agent and library beside other Pythons and torches than the project's own, and what installing them moves there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests import peers
from tests.e2e.versions_run import build_wheel, find_python, install, make_environment, run_job, uv, versions_of
from tests.long_runs import LongRun

from elastipod_local.paths import cache_dir


@dataclass(frozen=True)
class Combination:
    """A Python, a torch, and the numpy of that time."""

    python: str
    torch: str
    numpy: str
    shards_on_cpu: bool = True  # before torch 2.6 FSDP2 asks for CUDA streams whatever its mesh

    def __str__(self) -> str:
        return f"python {self.python}, {self.torch}"


COMBINATIONS = [
    Combination("3.10", "torch==2.4.1", "numpy==1.26.4", shards_on_cpu=False),
    Combination("3.11", "torch==2.7.1", "numpy==1.26.4"),
    Combination("3.12", "torch==2.9.*", "numpy<2.3"),
    Combination("3.13", "torch", "numpy"),
]
TOOLS = ("pytest>=8", "pytest-timeout", "pytest-asyncio", "hypothesis", "psutil", "prometheus-client", "torchdata")
UNIT = (
    "--hypothesis-profile=ci",
    "tests/unit/agent",
    "tests/unit/checkpoint",
    "tests/unit/library",
)  # no deadlines: the machine may be busy
# Without the e2e tier's own conftest: the local cluster needs a newer Python than the agent does.
E2E = (
    *("-p", "tests.conftest", "--noconftest"),
    *(
        f"tests/e2e/test_{name}.py"
        for name in ("agent_process", "warm_workers", "warm_server", "inprocess", "log_rules", "hang", "checkpoints")
    ),
    *(  # the S3 server needs that newer Python too
        f"--deselect=tests/e2e/test_checkpoints.py::test_{name}"
        for name in (
            "worlds_of_several_sizes_share_a_bucket",
            "a_replaced_generation_cannot_commit_to_a_bucket",
            "damage_in_a_bucket_is_passed_over_and_keys_are_not_told",
        )
    ),
)
SHARDED_ON_CPU = (
    "--deselect=tests/e2e/test_checkpoints.py::test_one_state_goes_through_every_way_of_sharding[sharded]",
    "--deselect=tests/e2e/test_checkpoints.py::test_memory_of_nodes_outlives_processes_and_one_node",
)
# What compares us with the newest torchrun, option for option, since older ones lack some of its options and modules; and
# what compares the output of workers that compile: torch 2.4's own exit hangs at times after that, 2.9's prints warnings.
FOR_NEWEST_TORCH = (
    "--deselect=tests/e2e/test_forked_workers.py::test_forked_workers_train_as_executed_ones_do",
    "--ignore=tests/unit/agent/test_numa.py",
    *(
        f"--deselect=tests/unit/agent/test_arguments.py::test_{name}"
        for name in (
            "the_table_has_the_installed_torchs_option",
            "every_abbreviation_that_torchrun_takes_means_the_same_here",
            "torchrun_gets_its_own_options_only",
        )
    ),
)
# torch 2.4's own checkpoints warn of torch's own doings.
WARNINGS = ("-Wignore:TypedStorage is deprecated:UserWarning", "-Wignore:You are using `torch.load`:FutureWarning")
PYTEST_LIMIT_S = 1200


@pytest.mark.long("versions")
def test_a_job_runs_on_an_older_torch(tmp_path: Path) -> None:
    """Warm and with FSDP2, where most of torch is used; the long run has the other ways to start, and other torches."""
    python = peers.peer_python("torch211")
    assert versions_of(python)["torch"] == "2.11.0"
    assert versions_of(Path(sys.executable))["torch"] != "2.11.0"
    run_job(python, tmp_path / "job", is_warm=True, parallel="fsdp2")
    printed = [log.read_text() for log in (tmp_path / "job").glob("agent-*.log")]
    assert [re.findall(r"torch (\S+?)[+ ]", text) for text in printed] == [["2.11.0", "2.11.0"]] * 2


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, as it is published."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_installing_it_needs_nothing_but_the_users_own_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    needed = [
        re.fullmatch(r"(.+?)\s*;\s*extra == ['\"](\w+)['\"]", one) for one in metadata.get_all("Requires-Dist", [])
    ]
    assert None not in needed, "something is needed without an extra"
    assert [found[1] for found in needed if found and found[2] == "agent"] == ["torch>=2.4"]
    assert metadata["Requires-Python"] == ">=3.10"


@pytest.mark.parametrize("extra", ["", "[agent]"])
def test_installing_it_moves_nothing(wheel: Path, extra: str) -> None:
    """Said by the installer, for an environment whose torch and numpy are not the newest."""
    python = peers.peer_python("torch211")
    said = uv("pip", "install", "--dry-run", "--offline", "--python", str(python), f"{wheel}{extra}")
    changes = re.findall(r"^ [-+~] ([\w.-]+)", said, re.MULTILINE)
    assert changes == ["elastipod"], said


@pytest.fixture(params=COMBINATIONS, ids=str)
def combination(request: pytest.FixtureRequest, long_run: LongRun) -> Combination:
    """One for which this machine has the Python."""
    wanted: Combination = request.param
    if find_python(wanted.python) is None:
        long_run.count(**{f"pythons {wanted.python} found": 0})
        pytest.skip(f"needs Python {wanted.python}; install it (on the path, or with pyenv) to include it")
    long_run.count(**{f"pythons {wanted.python} found": 1})
    return wanted


@pytest.fixture
def environment(combination: Combination, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The interpreter of an environment with its torch and numpy. Gigabytes: it goes when the test ends, downloads too."""
    folder = cache_dir() / "versions"
    shutil.rmtree(folder, ignore_errors=True)
    monkeypatch.setenv("UV_CACHE_DIR", str(folder / "downloads"))
    base = find_python(combination.python)
    assert base is not None
    try:
        python = make_environment(base, folder / "environment")
        install(python, combination.torch, combination.numpy)
        yield python
    finally:
        shutil.rmtree(folder)


@pytest.mark.timeout(3600)
@pytest.mark.long("versions")
def test_it_runs_on_other_pythons_and_torches(
    combination: Combination, environment: Path, wheel: Path, tmp_path: Path, long_run: LongRun
) -> None:
    before = versions_of(environment)
    install(environment, f"{wheel}[agent]")
    with_ours = versions_of(environment)
    assert with_ours.pop("elastipod")
    assert with_ours == before, "installing it moved something"

    what = f"python {combination.python}, torch {before['torch']}"
    for is_warm in (True, False):
        for parallel in ("ddp", "fsdp2") if combination.shards_on_cpu else ("ddp",):
            run_job(environment, tmp_path / f"{parallel}-{is_warm}", is_warm=is_warm, parallel=parallel)
            long_run.count(**{f"{what}: {parallel} jobs, {'warm' if is_warm else 'cold'}": 1})

    install(environment, *TOOLS)
    assert versions_of(environment).items() >= before.items(), "the tests must not see another torch or numpy"
    is_newest = before["torch"] == versions_of(Path(sys.executable))["torch"]
    left_out = (*(() if is_newest else FOR_NEWEST_TORCH), *(() if combination.shards_on_cpu else SHARDED_ON_CPU))
    long_run.count(**{f"{what}: unit tests": passed(environment, [*UNIT, *left_out], tmp_path)})
    long_run.count(**{f"{what}: e2e tests": passed(environment, [*E2E, *left_out], tmp_path)})


def passed(python: Path, arguments: Sequence[str], folder: Path) -> int:
    """Run tests with this interpreter and the checkout's agent and library; gives how many there were, all passed."""
    report = folder / "report.xml"
    options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}", *WARNINGS)
    done = subprocess.run(
        [str(python), "-m", "pytest", *options, *arguments],
        cwd=peers.ROOT, env={**os.environ, "PYTHONPATH": "agent", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PYTEST_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    return int(suite.attrib["tests"]) - int(suite.attrib["skipped"])
