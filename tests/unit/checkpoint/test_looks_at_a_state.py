"""How often a load looks at a state of many tensors: the ranks of a job wait for it, each time that it is restarted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from elastipod.checkpoint import chunk_table as module
from elastipod.checkpoint import live_objects
from elastipod.checkpoint.chunk_table import ChunkTable, TensorSpec
from elastipod.checkpoint.live_objects import LiveObjects
from elastipod.checkpoint.optimizer_state import load_optimizers, optimizer_state


def table() -> ChunkTable:
    """Of a tensor of two chunks, and one without dimensions."""
    tensors = [TensorSpec("a", ("a",), "float32", (4, 2), 4), TensorSpec("b", ("b",), "int64", (), 8)]
    return ChunkTable(tensors, [array("i", [0, 0, 2, 2, 2, 0, 2, 2]), array("i")], [0, 1])


def test_chunks_of_a_small_table_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = table()
    chunks = list(found)
    assert [(each.key, each.offsets, each.sizes, each.num_bytes) for each in chunks] == [
        ("a", (0, 0), (2, 2), 16),
        ("a", (2, 0), (2, 2), 16),
        ("b", (), (), 8),
    ]

    def chunk(self: TensorSpec, box: Sequence[int]) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(TensorSpec, "chunk", chunk)
    assert list(found) == [found[number] for number in range(3)] == chunks
    assert found[1:] == chunks[1:]
    assert list(found.byte_sizes()) == [16, 16, 8]


def test_those_of_a_large_one_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    found = table()
    assert list(found) == [found[number] for number in range(3)] == list(table())
    first, again = (found[number] for number in (0, 0))
    assert first is not again


def test_names_of_parameters_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[nn.Module] = []

    def names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
        looks.append(model)
        return {name: f"saved.{name}" for name in names}

    monkeypatch.setattr(live_objects, "names_in_checkpoints", names)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).backward()
    optimizer.step()
    live = LiveObjects.of(model, optimizer)
    state = optimizer_state(live)
    assert sorted(state["state"]) == ["saved.bias", "saved.weight"]
    load_optimizers(state, state["param_groups"], live)
    assert looks == [model]
