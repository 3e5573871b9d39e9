"""Stubs for what the original's checkpointless library imports and a test on CPUs does not have: NeMo, its kin, devices.

They are there to be imported and for nothing else: every module of these packages exists, and any name in it is an empty class.
Packages that are installed are taken before their stubs.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

PACKAGES = frozenset({"cloudpickle", "lightning", "megatron", "nemo", "tenacity", "transformer_engine", "viztracer"})


class _StubType(ABCMeta):
    """The type of all stubs; names in them are stubs too. It is an ABCMeta because the library mixes some with abstract classes."""

    def __getattr__(cls, name: str) -> Any:
        return _stub(name)


def _stub(name: str) -> Any:
    if name.startswith("__"):  # what Python itself looks for, such as __wrapped__
        raise AttributeError(name)
    return _StubType(name, (), {})


class _Stubs(MetaPathFinder, Loader):
    """Finds PACKAGES and all modules below them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_known = fullname.partition(".")[0] in PACKAGES
        return ModuleSpec(fullname, self, is_package=True) if is_known else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _stub


def install() -> None:
    """Make the stubs importable, and let threads choose a device that is not there."""
    sys.meta_path.append(_Stubs())
    torch.cuda.set_device = lambda device: None
