"""Where programs come from: what counts as the right version, and when something is built anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_local import binaries, golang
from elastipod_local.errors import LocalClusterError
from elastipod_local.golang import needed_version, parse_version


def fake_program(folder: Path, name: str, says: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of KUBEBUILDER_ASSETS, and an empty cache."""
    folder = tmp_path / "assets"
    folder.mkdir()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_a_program_of_the_right_version_is_used_where_it_lies(assets: Path) -> None:
    program = fake_program(assets, "kubelet", f"Kubernetes {binaries.KUBERNETES_VERSION}")
    assert binaries.ensure(["kubelet"]) == {"kubelet": program}


@pytest.mark.parametrize(
    "says", ["Kubernetes v1.33.0", f"Kubernetes {binaries.KUBERNETES_VERSION}0", "", "1.34.4-rc.1"]
)
def test_another_version_is_not_used(assets: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    fake_program(assets, "kubelet", says)
    built: list[str] = []
    monkeypatch.setattr(binaries, "build_module", lambda module, progress: built.append(module))
    binaries.ensure(["kubelet", "etcd", "helm"])
    assert built == ["kubernetes", "helm"]


def test_a_program_that_tells_no_version_is_built(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_program(assets, "kueue", f"kueue {binaries.KUEUE_VERSION}")
    built: list[str] = []
    monkeypatch.setattr(binaries, "build_module", lambda module, progress: built.append(module))
    binaries.ensure(["kueue"])
    assert built == ["kueue"]


def test_what_lies_beside_a_program_is_kept_with_it(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chart = tmp_path / "source" / "charts" / "kueue"
    chart.mkdir(parents=True)
    (chart / "values.yaml").write_text("replicas: 1\n")
    for path in (chart / "values.yaml", chart):
        path.chmod(0o555)  # as Go keeps its modules
    go = fake_program(assets, "go", str(tmp_path / "source"))
    monkeypatch.setattr(binaries, "go_program", lambda progress: go)
    binaries.build_module("kueue")
    assert (binaries.beside("kueue") / "values.yaml").read_text() == "replicas: 1\n"
    assert binaries.beside("kueue").stat().st_mode & 0o200


def test_a_built_program_is_not_built_again(assets: Path) -> None:
    folder = binaries.module_cache("helm")
    folder.mkdir(parents=True)
    (folder / "helm").touch()
    assert binaries.build_module("helm") == folder
    assert binaries.ensure(["helm"]) == {"helm": folder / "helm"}


def test_a_build_that_fails_says_so_and_leaves_no_half(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = fake_program(assets, "go", "nothing")
    go.write_text("#!/bin/sh\necho 'example.com/package' >&2\necho 'cannot reach the proxy' >&2\nexit 1\n")
    monkeypatch.setattr(binaries, "go_program", lambda progress: go)
    with pytest.raises(LocalClusterError, match="cannot reach the proxy"):
        binaries.build_module("helm")
    assert not binaries.module_cache("helm").exists()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.4 linux/amd64", (1, 26, 4)),
        ("go version go1.26 linux/amd64", (1, 26, 0)),
        ("go 1.24.0", (1, 24, 0)),
        ("gopher", (0, 0, 0)),
    ],
)
def test_parse_version(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


def test_the_fetched_toolchain_satisfies_our_modules() -> None:
    assert parse_version(golang.WHEEL.replace("-bin==", " ")) >= needed_version() > (1, 20, 0)
