"""Packages are put into a folder by uv or by pip: what we say means the same to both."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_local import pip


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_both_tools_take_a_file_of_requirements(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "pip":
        monkeypatch.setattr(pip, "_uv", lambda: None)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# nothing\n")
    pip.install_into(tmp_path / "target", ["--no-deps", "--require-hashes", "-r", requirements])
