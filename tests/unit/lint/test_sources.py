"""What the gates read: what git knows, or what lies there where git cannot say."""

from __future__ import annotations

import io
import subprocess
import tokenize
from pathlib import Path

import pytest
from tests.lint.sources import Source, read_repository

GENERATED = (
    ".venv/a.py",
    ".run/b.md",
    "pkg/__pycache__/c.py",
    ".mypy_cache/d.json",
    "one.egg-info/e.txt",
    "build/f.py",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two files of ours among generated ones, in no checkout."""
    for name in ("README.md", "pkg/one.py", *GENERATED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def paths_of(root: Path) -> list[str]:
    return [source.path for source in read_repository(root).sources]


def test_in_a_tar_ball_the_files_that_lie_there_are_read(tree: Path) -> None:
    assert paths_of(tree) == ["README.md", "pkg/one.py"]


def test_without_git_the_files_that_lie_there_are_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert paths_of(tree) == ["README.md", "pkg/one.py"]


def test_in_a_checkout_what_git_ignores_is_not_read(tree: Path) -> None:
    subprocess.run(["git", "-C", str(tree), "init", "--quiet"], check=True)
    (tree / ".gitignore").write_text("/.*/\n__pycache__/\n*.egg-info/\n/build/\nscratch.md\n")
    (tree / "scratch.md").write_text("")
    assert paths_of(tree) == ["README.md", "pkg/one.py"]


TRICKY = r'''# first
a = "# no" + '# no' + "\"# no" + r'\'  # second
b = """
# no " \""" # no
"""  # third
c = f"{a!r:#>4}" + (
    "it's"  # fourth
    ''  # fifth
)
d = """'"""  # sixth
'''


def test_comments_are_those_that_the_standard_library_finds() -> None:
    tokens = tokenize.generate_tokens(io.StringIO(TRICKY).readline)
    wanted = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    assert [text for _, text in wanted] == ["# first", "# second", "# third", "# fourth", "# fifth", "# sixth"]
    assert Source("one.py", TRICKY).comments == wanted
    assert Source("one.md", TRICKY).comments == []
