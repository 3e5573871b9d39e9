"""Integrations whose packages are not installed here, with stand-ins for what they take from them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import elastipod.integrations
from elastipod.integrations import packages

NAME = "elastipod.integrations.accelerate"


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The integration, with what it takes from the package."""
    package, scheduler, utils = (ModuleType(f"accelerate{name}") for name in ("", ".scheduler", ".utils"))
    monkeypatch.setattr(scheduler, "AcceleratedScheduler", type("AcceleratedScheduler", (), {}), raising=False)
    monkeypatch.setattr(utils, "send_to_device", lambda inputs, device: inputs, raising=False)
    for module in (package, scheduler, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(packages, "installed_version", lambda name: "1.15.0")
    yield importlib.import_module(NAME)
    del sys.modules[NAME]
    delattr(elastipod.integrations, "accelerate")


@pytest.fixture
def trainer_integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The integration of Hugging Face's Trainer, with what it takes from the package."""
    name, package = "elastipod.integrations.transformers", ModuleType("transformers")
    for kind in ("Trainer", "TrainerCallback"):
        monkeypatch.setattr(package, kind, type(kind, (), {}), raising=False)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(packages, "installed_version", lambda name: "5.23.0")
    yield importlib.import_module(name)
    del sys.modules[name]
    delattr(elastipod.integrations, "transformers")
