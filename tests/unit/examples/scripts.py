"""Scripts of the examples as modules: each is named `train`, so they are loaded by their path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def load_script(example: str, monkeypatch: pytest.MonkeyPatch, name: str = "train") -> Any:
    """Give the module of examples/<example>/<name>.py, made anew."""
    spec = importlib.util.spec_from_file_location(f"examples_{example}_{name}", EXAMPLES / example / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
