"""The state on its way between ranks: striped over the donors, into the memory of those that lack it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from tests.agent_client import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from tests.unit.in_memory.models import trained
from torch import nn

from elastipod.in_memory import state_transfer
from elastipod.in_memory.members import Content, Members, TensorShape, digest_of
from elastipod.in_memory.state_transfer import MAX_IN_FLIGHT, BadManifest, Piece, Span, pieces, transfer

RIGHT = pieces
PIECE_BYTES = 40  # small, so that more pieces are on their way than may be


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "pieces", partial(RIGHT, size=PIECE_BYTES))


def test_small_tensors_share_a_piece_and_large_ones_are_divided() -> None:
    shapes = [TensorShape("a", "float32", (2,)), TensorShape("b", "int64", ()), TensorShape("c", "uint8", (20,))]
    assert list(RIGHT(shapes, [4, 7], 16)) == [
        Piece((Span("a", 0, 8), Span("b", 0, 8)), 4),
        Piece((Span("c", 0, 16),), 7),
        Piece((Span("c", 16, 20),), 4),
    ]


@pytest.mark.parametrize("steps_before", [0, 1], ids=["has no moments yet", "is a step behind"])
def test_two_donors_fill_two_ranks_in_place(steps_before: int) -> None:
    port = free_port()
    donors, receivers = [1, 2], [0, 3]

    def body(rank: int) -> Any:
        members = trained(2 if rank in donors else steps_before, seed=rank if rank in receivers else 5)
        places = [each.data_ptr() for each in members.model.parameters()]
        beats: list[int] = []
        with world(rank, 4, port):
            content = transfer(members, donors, receivers, lambda: beats.append(1))
        if content is not None:
            members.load(content)
        assert [each.data_ptr() for each in members.model.parameters()] == places
        own = sum(piece.donor == rank for piece in RIGHT(members.content().shapes(), donors, PIECE_BYTES))
        total = len(list(RIGHT(members.content().shapes(), donors, PIECE_BYTES)))
        return [content is None, digest_of(members.digests()), len(beats), own, total]

    found = run_ranks(4, body)
    assert [each[0] for each in found] == [False, True, True, False]
    assert len({each[1] for each in found}) == 1
    total = found[0][4]
    assert total > 3 * MAX_IN_FLIGHT
    assert [found[rank][2] for rank in receivers] == [total, total], "a beat for each piece that came"
    assert [found[rank][2] for rank in donors] == [2 * found[rank][3] for rank in donors], "and for each that was sent"


def test_a_tensor_whose_memory_is_not_contiguous_is_filled_too() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        model = nn.Linear(5, 3, bias=False)
        model.weight.data = torch.full((5, 3), float(rank)).t() if rank else torch.arange(15.0).view(5, 3).t()
        members = Members({"model": model})
        with world(rank, 2, port):
            content = transfer(members, [0], [1], lambda: None)
        assert rank == 0 or content is not None
        return model.weight.flatten().tolist()

    first, second = run_ranks(2, body)
    assert first == second
    assert first[:4] == [0.0, 3.0, 6.0, 9.0]


def test_a_rank_that_neither_gives_nor_takes_learns_nothing() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        members = trained(0, seed=rank)
        before = digest_of(members.digests())
        with world(rank, 3, port):
            content = transfer(members, [1], [2], lambda: None)
        return [content is None, digest_of(members.digests()) == before]

    assert run_ranks(3, body) == [[True, True], [True, True], [False, False]]


def test_donors_of_different_tensors_say_so() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        members = Members({"model": nn.Linear(3, 2 + rank)})
        with world(rank, 2, port):
            return raised_by(lambda: transfer(members, [0, 1], [], lambda: None))

    text = "rank 1 holds another set of tensors than rank 0; was the script changed?"
    assert run_ranks(2, body) == [[], ["BadManifest", text]]


GOOD = {"v": 1, "tensors": [["model.weight", "float32", [2, 3]]], "values": "{}", "digests": {}}


def test_a_description_is_read_as_it_was_written() -> None:
    shapes = [TensorShape("model.weight", "float32", (2, 3))]
    assert state_transfer._read_manifest(json.dumps(GOOD)) == (shapes, "{}", {})
    content = Content({"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.tensor(1)}, "[1]")
    told = state_transfer._manifest(content, {"a": "00ff"})
    assert state_transfer._read_manifest(told) == (content.shapes(), "[1]", {"a": "00ff"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "cannot be read: JSONDecodeError", id="nothing"),
        pytest.param("[]", "cannot be read: TypeError", id="no object"),
        pytest.param("[" * 5000, "cannot be read: RecursionError", id="nested too deeply"),
        pytest.param("{}", "cannot be read: KeyError", id="no fields"),
        pytest.param(json.dumps({**GOOD, "v": 2}), "has version 2; all ranks need the same", id="another version"),
        pytest.param(json.dumps({**GOOD, "tensors": [["w", "nn", [1]]]}), "'nn' is no type", id="no type of a tensor"),
        pytest.param(json.dumps({**GOOD, "tensors": [["w", "float32", ["x"]]]}), "cannot be read", id="no size"),
    ],
)
def test_a_description_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadManifest, match=said):
        state_transfer._read_manifest(text)


def test_a_tensor_is_received_into_the_live_one_only_where_it_fits() -> None:
    members = Members({"model": nn.Linear(3, 2)})
    content = members.content()
    own = content.tensors["model.weight"]

    def room(key: str, dtype: str, *sizes: int) -> torch.Tensor:
        return state_transfer._room(content, TensorShape(key, dtype, sizes), members)

    assert room("model.weight", "float32", 2, 3) is own
    for other in (room("model.weight", "float32", 3, 2), room("model.weight", "float64", 2, 3), room("x", "int8", 4)):
        assert other is not own
    assert (other.shape, other.dtype, other.device) == ((4,), torch.int8, own.device)
