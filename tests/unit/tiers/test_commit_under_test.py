"""Reports name their commit where there is one, and cost no run where there is none; a test can have the files of an earlier one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.commit_under_test import commit_under_test, unpack_commit


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of one commit."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    (tmp_path / "README.md").write_text("# One\n")
    for command in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message=one"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_the_commit_is_named_and_marked_where_files_differ(checkout: Path) -> None:
    clean = commit_under_test(checkout)
    (checkout / "README.md").write_text("# Two\n")
    assert len(clean) >= 7
    assert commit_under_test(checkout) == f"{clean}-dirty"


@pytest.mark.needs_root
def test_a_checkout_of_another_user_has_its_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `sudo make demo`, or in a container that mounts the checkout."""
    clean = commit_under_test(checkout)
    for name in ("SUDO_UID", "SUDO_GID"):
        monkeypatch.delenv(name, raising=False)  # git lets those read it
    for path in (checkout, *checkout.rglob("*")):
        os.chown(path, 1000, 1000)
    assert commit_under_test(checkout) == clean


def test_a_folder_that_is_no_checkout_has_no_commit(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    assert commit_under_test(checkout) == ""


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit_under_test(checkout) == ""


def test_the_files_of_a_commit_are_unpacked_as_they_were(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (checkout / "README.md").write_text("# Two\n")
    (checkout / "new.py").write_text("pass\n")
    folder = tmp_path_factory.mktemp("unpacked")
    unpack_commit(checkout, "HEAD", folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"README.md": "# One\n"}


def test_a_commit_that_the_history_lacks_cannot_be_unpacked(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        unpack_commit(checkout, "0" * 40, tmp_path / "unpacked")
