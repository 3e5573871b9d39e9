"""The corpus of examples/lm, which every start of a worker reads: the order of its modules is that of their paths."""

from __future__ import annotations

import importlib
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    "a/z.py",
    "a.py",
    "a-b.py",
    "ab.py",
    "a/c/d.py",
    "a/c.py",
    "b/site-packages/no.py",
    "b/__pycache__/no.py",
    "c.txt",
)


def test_the_corpus_is_the_modules_in_the_order_of_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "lm"))
    corpus = importlib.import_module("corpus")
    for name in MODULES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    wanted = sorted(name for name in MODULES if name.endswith(".py") and not name.endswith("no.py"))
    assert bytes(corpus.read_corpus(1, 4096).data).decode().split() == wanted
    assert bytes(corpus.read_corpus(1, 12).data) == "".join(f"{name}\n" for name in wanted).encode()[:12]
