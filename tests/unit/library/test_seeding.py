"""Seeding torch in each step: what `torch.manual_seed` does, without what it does for devices that nobody has."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastipod import torch_compat
from elastipod.torch_compat import seed_torch

SEED = 0x9E3779B97F4A7C15 >> 1


@pytest.fixture(autouse=True)
def looked_at_anew() -> Iterator[None]:
    answers = [torch_compat._has_cuda, torch_compat._has_other_devices_than_cuda]
    for each in answers:
        each.cache_clear()
    yield
    for each in answers:
        each.cache_clear()


def is_told(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(owner, name, found.append)
    return found


def test_numbers_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(SEED)
    expected = torch.rand(3)
    in_full = is_told(monkeypatch, torch, "manual_seed")
    seed_torch(SEED)
    assert torch.equal(torch.rand(3), expected)
    assert in_full == []


def test_no_stack_is_formatted_for_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps it for the moment in which a device is initialized; in each step that took 0.6 ms and looked at each source file."""
    formatted: list[str] = []

    def format_stack(*_: object) -> list[str]:
        formatted.append("a stack")
        return []

    monkeypatch.setattr(traceback, "format_stack", format_stack)
    torch.manual_seed(SEED)
    assert formatted, "this is what torch does"
    formatted.clear()
    seed_torch(SEED)
    assert formatted == []


@pytest.mark.parametrize("is_available", [True, False])
def test_cuda_is_seeded_where_it_is_or_may_come(monkeypatch: pytest.MonkeyPatch, is_available: bool) -> None:
    asked: list[str] = []

    def counted() -> bool:
        asked.append("cuda")
        return is_available

    monkeypatch.setattr(torch.cuda, "is_available", counted)
    seeded = is_told(monkeypatch, torch.cuda, "manual_seed_all")
    for _ in range(2):
        seed_torch(SEED)
    assert seeded == ([SEED, SEED] if is_available else [])
    assert torch.initial_seed() == SEED
    assert asked == ["cuda"], "the driver counts devices, which takes longer than the rest of a step's seeding"


@pytest.mark.parametrize("kind", ["mps", "xpu", "mtia"])
def test_any_other_device_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    asked: list[str] = []

    def is_available() -> bool:
        asked.append(kind)
        return True

    monkeypatch.setattr(getattr(torch, kind), "is_available", is_available)
    in_full = is_told(monkeypatch, torch, "manual_seed")
    for _ in range(2):
        seed_torch(SEED)
    assert (in_full, asked) == ([SEED, SEED], [kind]), "drivers are asked once"


@pytest.mark.parametrize(
    ("module", "is_left"),
    [
        pytest.param(SimpleNamespace(is_available=lambda: True), True, id="is there"),
        pytest.param(SimpleNamespace(is_available=lambda: False), False, id="is not there"),
        pytest.param(SimpleNamespace(), True, id="does not tell"),
    ],
)
def test_so_is_a_device_of_another_package(monkeypatch: pytest.MonkeyPatch, module: Any, is_left: bool) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    monkeypatch.setattr(torch, "npu", module, raising=False)
    in_full = is_told(monkeypatch, torch, "manual_seed")
    seed_torch(SEED)
    assert in_full == [SEED] * is_left


def test_a_torch_that_tells_of_a_device_elsewhere_is_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.4 has it for mps."""
    monkeypatch.delattr(torch.mps, "is_available")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    in_full = is_told(monkeypatch, torch, "manual_seed")
    seed_torch(SEED)
    assert in_full == [SEED]
