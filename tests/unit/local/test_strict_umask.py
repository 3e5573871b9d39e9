"""A root user whose umask keeps files private: what images, nodes and pods are made of is readable all the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from elastipod_local import bases, dockerfile, images, node_init, pip
from elastipod_local.buildcontext import BuildContext
from elastipod_local.buildstep import BuildStep
from elastipod_local.imagebuild import ImageBuilder
from elastipod_local.node_config import InitConfig
from elastipod_local.paths import PACKAGE
from elastipod_local.processes import isolated
from elastipod_local.registry_access import RegistryAccess

DOCKERFILE = "FROM base AS one\nRUN make it\n"


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.needs_root
def test_what_a_build_step_makes_is_readable(tmp_path: Path) -> None:
    for name in ("stage", "upper"):
        (tmp_path / name).mkdir()
    command = ("/bin/sh", "-c", "mkdir /made-by-test && touch /made-by-test/file")
    step = BuildStep(str(tmp_path / "stage"), ("/",), str(tmp_path / "upper"), command, {}, "/", "", {}, ())
    (tmp_path / "step.json").write_text(step.encode())
    done = subprocess.run(
        isolated([sys.executable, "-m", "elastipod_local.buildstep", str(tmp_path / "step.json")]),
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    made = tmp_path / "upper" / "made-by-test"
    assert (mode(made), mode(made / "file")) == (0o755, 0o644)


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that were carried out; none does anything."""
    steps: list[str] = []

    def perform(self: ImageBuilder, step: BuildStep, what: str) -> None:
        Path(step.stage).mkdir()
        steps.append(what)

    monkeypatch.setattr(ImageBuilder, "_perform", perform)
    return steps


def build(tmp_path: Path) -> Path:
    """Build the one layer and give its folder."""

    def base() -> Path:
        (tmp_path / "base").mkdir()
        return tmp_path / "base"

    builder = ImageBuilder(tmp_path / "cache", BuildContext(tmp_path), {"base": base}, RegistryAccess({}, {}), {})
    built = builder.build(dockerfile.parse(DOCKERFILE), ["one"])["one"]
    return tmp_path / "cache" / "layers" / built.key / "fs"


def test_a_layer_is_open_to_everybody(tmp_path: Path, performed: list[str]) -> None:
    layer = build(tmp_path)
    assert {mode(fs) for fs in layer.parents[1].glob("*/fs")} == {0o755}


def test_a_layer_that_an_earlier_version_made_private_is_made_anew_and_no_other_one(
    tmp_path: Path, performed: list[str]
) -> None:
    layer = build(tmp_path)
    assert build(tmp_path) == layer
    assert len(performed) == 1
    layer.chmod(0o700)
    (layer.parent / "layer.tar").touch()
    assert build(tmp_path) == layer
    assert (len(performed), mode(layer), (layer.parent / "layer.tar").exists()) == (2, 0o755, False)


def test_packages_for_pods_are_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv").write_text('#!/bin/sh\nfor word; do [ "$last" = --target ] && mkdir "$word"; last=$word; done\n')
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setattr(pip, "_uv", lambda: [str(tmp_path / "uv")])
    pip.install_into(tmp_path / "target", ["six"])
    assert mode(tmp_path / "target") == 0o755


def test_the_pause_program_can_be_run_by_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(command: list[str | Path]) -> None:
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(bases, "run", compile_nothing)
    root = bases.compile_pause(tmp_path)
    assert mode(root / "pause") == 0o755


def test_a_pause_program_that_an_earlier_version_kept_private_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []

    def compile_pause(scratch: Path) -> Path:
        (scratch / "pause").mkdir(exist_ok=True)
        (scratch / "pause" / "pause").touch()
        (scratch / "pause" / "pause").chmod(0o755 if compiled else 0o700)
        compiled.append(1)
        return scratch / "pause"

    monkeypatch.setattr(images, "compile_pause", compile_pause)
    for _ in range(3):
        images._pause(tmp_path)
    assert len(compiled) == 2


class BeginsToMount(Exception):
    """The node got as far as its mounts."""


def test_a_node_makes_what_its_pods_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as /etc/hosts, which kubelet writes as the umask lets it."""

    def begin(config: InitConfig) -> None:
        (tmp_path / "etc-hosts").touch()
        raise BeginsToMount

    (tmp_path / "init.json").write_text(InitConfig("node-1", "/n", "/l", "/s", (), (), {}).encode())
    monkeypatch.setattr(node_init, "enter_own_root", begin)
    monkeypatch.setattr(socket, "sethostname", lambda name: None)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(BeginsToMount):
        node_init.main(str(tmp_path / "init.json"))
    signal.signal(signal.SIGINT, before)
    assert mode(tmp_path / "etc-hosts") == 0o644
