"""The files that the example of streams makes once, though whoever makes them may be killed at any point."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.examples.scripts import load_script


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Any:
    package = ModuleType("datasets")  # not installed here; making files does not need it
    monkeypatch.setattr(package, "load_dataset", None, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return load_script("streaming", monkeypatch)


def test_a_data_set_of_somebody_else_stays_as_it_is(streaming: Any, tmp_path: Path) -> None:
    (tmp_path / "part-00000.jsonl").touch()
    streaming.make_files(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_data_set_that_was_made_in_part_is_completed(streaming: Any, tmp_path: Path) -> None:
    streaming.make_files(tmp_path)
    whole = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(whole) == streaming.FILES
    for name in ("part-2.jsonl", "part-7.jsonl"):
        (tmp_path / name).unlink()
    kept = tmp_path / "part-3.jsonl"
    before = kept.stat().st_mtime_ns
    streaming.make_files(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == whole
    assert kept.stat().st_mtime_ns == before
