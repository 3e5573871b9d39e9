"""The slim wheel for users' images: what it contains, and how it works in an environment with nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests import peers
from tests.free_ports import free_port
from tests.patience import PATIENCE_S

from elastipod_local.host import wait_until

if sys.version_info >= (3, 11):
    import tomllib

IN_IMAGES = {"elastipod", "elastipod_agent", "hyperpod_elastic_agent"}


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S, **more)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels by the name of their distribution, built as a release builds them."""
    folder = tmp_path_factory.mktemp("wheels")
    done = run(peers.ROOT / ".ci" / "wheels", folder, env={**os.environ, "PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def clean(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the slim wheel and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    uv = [sys.executable, "-m", "uv", "--offline"]
    assert run(*uv, "venv", "--python", sys.executable, folder).returncode == 0
    done = run(*uv, "pip", "install", "--python", folder / "bin/python", wheels["elastipod-agent"])
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^ \+ (\S+)==", done.stderr, re.MULTILINE) == ["elastipod-agent"]
    return folder / "bin"


def packages(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name.split("/")[0] for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheels_contain_what_they_should(wheels: dict[str, Path]) -> None:
    assert packages(wheels["elastipod-agent"]) == IN_IMAGES
    assert packages(wheels["elastipod"]) == {*IN_IMAGES, "elastipod_client", "elastipod_local", "elastipod_operator"}
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            assert [name for name in archive.namelist() if name.endswith("licenses/LICENSE")] != []


def test_both_wheels_say_the_same_of_themselves() -> None:
    whole, slim = (
        tomllib.loads((peers.ROOT / path).read_text())["project"] for path in ("pyproject.toml", "agent/pyproject.toml")
    )
    for entry in ("version", "requires-python", "license", "classifiers", "dependencies"):
        assert slim[entry] == whole[entry], entry
    extras = slim["optional-dependencies"]
    renamed = {
        name: [one.replace("elastipod-agent[", "elastipod[") for one in wanted] for name, wanted in extras.items()
    }
    assert renamed == {name: whole["optional-dependencies"][name] for name in extras}
    assert slim["scripts"].items() <= whole["scripts"].items()


def test_it_names_itself_and_says_what_it_lacks(clean: Path) -> None:
    assert run(clean / "elastipod", "--version").stdout == "elastipod 0.1.0\n"
    for command in ("operator", "local", "why"):
        done = run(clean / "elastipod", command)
        assert done.returncode == 2
        assert "the wheel elastipod-agent has no such command" in done.stderr


def test_every_module_of_the_agent_can_be_imported_without_any_other_package(clean: Path) -> None:
    code = (
        "import importlib, pkgutil, elastipod_agent, hyperpod_elastic_agent, sys\n"
        "names = [m.name for m in pkgutil.walk_packages(elastipod_agent.__path__, 'elastipod_agent.')]\n"
        "names = [name for name in names if not name.endswith(('__main__', 'fork_server.bootstrap'))]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names), sorted({n.split('.')[0] for n in sys.modules} & {'torch', 'elastipod_operator', 'aiohttp'}))\n"
    )
    done = run(clean / "python", "-I", "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 80
    assert done.stdout.split(maxsplit=1)[1] == "[]\n"


def test_the_agent_serves_in_a_clean_environment(clean: Path, tmp_path: Path) -> None:
    """As in a pod: it listens, and is READY for the operator's /start."""
    script, port = tmp_path / "train.py", free_port()
    script.write_text("print('trained')\n")
    environment = {"PATH": f"{clean}:/usr/bin:/bin", "HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    environment |= {"ELASTIPOD_AGENT_PORT": str(port)}
    command = [str(clean / "hyperpodrun"), "--nproc-per-node=1", f"--server-port={port}", str(script)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        status: list[str | Path] = [clean / "elastipod", "agent", "status", "--json"]
        wait_until(
            lambda: process.poll() is not None or '"READY"' in run(*status, env=environment).stdout,
            deadline_s=PATIENCE_S,
            what="the agent to be ready",
        )
        assert process.poll() is None, (tmp_path / "log").read_text()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
