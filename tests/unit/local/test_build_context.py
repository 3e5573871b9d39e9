"""What COPY takes from a checkout: ignored files stay out, and the hash follows names, contents and x bits alone."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

import pytest

from elastipod_local.buildcontext import BuildContext
from elastipod_local.errors import LocalClusterError


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "src" / "__pycache__").mkdir(parents=True)
    (root / "src" / "__pycache__" / "a.pyc").touch()
    (root / "src" / "a.py").write_text("a = 1\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o700)
    (root / ".dockerignore").write_text("# made by machines\n.venv\n**/__pycache__\n**/*.egg-info\n")
    return root


def staged(checkout: Path, target: Path, *sources: str) -> tuple[str, list[str]]:
    target.mkdir()
    digest = BuildContext(checkout).stage(list(sources), target, 7)
    return digest, sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())


def test_ignored_files_stay_out_and_x_bits_stay(checkout: Path, tmp_path: Path) -> None:
    _, names = staged(checkout, tmp_path / "out", "src", "*.sh")
    assert names == ["run.sh", "src/a.py"]
    assert (tmp_path / "out" / "run.sh").stat().st_mode & 0o777 == 0o755


def test_only_what_enters_the_image_changes_the_hash(checkout: Path, tmp_path: Path) -> None:
    first, _ = staged(checkout, tmp_path / "1", "src", "run.sh")
    (checkout / "src" / "__pycache__" / "b.pyc").touch()
    os.utime(checkout / "src" / "a.py", (1, 1))
    assert staged(checkout, tmp_path / "2", "src", "run.sh")[0] == first
    (checkout / "src" / "a.py").write_text("a = 2\n")
    second, _ = staged(checkout, tmp_path / "3", "src", "run.sh")
    (checkout / "run.sh").chmod(0o600)
    third, _ = staged(checkout, tmp_path / "4", "src", "run.sh")
    assert len({first, second, third}) == 3


def test_a_source_that_does_not_exist_is_named_with_its_line(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match=r"line 7: 'nope' is not in"):
        staged(checkout, tmp_path / "out", "nope")


@pytest.mark.parametrize(
    ("name", "ignored"),
    [(".venv", True), ("a/.venv", False), ("a/b/__pycache__", True), ("a/x.egg-info", True), ("src/a.py", False)],
)
def test_ignores(checkout: Path, name: str, ignored: bool) -> None:
    assert BuildContext(checkout).ignores(PurePath(name)) is ignored
