"""The state on its way between ranks: striped over the donors, into the memory of those that lack it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from tests.unit.in_memory.models import trained
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from elastipod.in_memory import state_transfer
from elastipod.in_memory.digests_at_rest import DigestsAtRest
from elastipod.in_memory.members import Content, Members, TensorShape, digest_of
from elastipod.in_memory.state_manifest import BadManifest, describe, read_manifest
from elastipod.in_memory.state_transfer import MAX_IN_FLIGHT, Piece, Span, dealt_out, pieces, sends_of, transfer

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
    assert list(RIGHT([*shapes, TensorShape("d", "uint8", (3,))], [4, 7], 16, 10)) == [
        Piece((Span("c", 0, 16),), 4),
        Piece((Span("a", 0, 8), Span("b", 0, 8)), 7),
        Piece((Span("c", 16, 20), Span("d", 0, 3)), 4),
    ], "what is large enough travels alone"


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
        manifest = read_manifest(describe(members, members.content(), {}))
        dealt = dealt_out(manifest, manifest.shapes, donors)
        own = sum(piece.donor == rank for piece in dealt)
        return [content is None, digest_of(members.digests()), len(beats), own, len(dealt)]

    found = run_ranks(4, body)
    assert [each[0] for each in found] == [False, True, True, False]
    assert len({each[1] for each in found}) == 1
    total = found[0][4]
    assert total > 3 * MAX_IN_FLIGHT
    assert [found[rank][2] for rank in receivers] == [total, total], "a beat for each piece that came"
    assert [found[rank][2] for rank in donors] == [2 * found[rank][3] for rank in donors], "and for each that was sent"


class WithBuffers(nn.Module):
    """A weight of three pieces, and two buffers, of which ranks have different ones."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(30.0))
        self.register_buffer("mean", torch.full((15,), number))
        self.register_buffer("count", torch.full((), int(number)))


def test_buffers_are_those_of_one_donor() -> None:
    """Their pieces would be dealt out to both as those of the weight are, and be no rank's buffers together."""
    port = free_port()

    def body(rank: int) -> Any:
        members = Members({"model": WithBuffers(rank + 1.0)})
        with world(rank, 3, port):
            transfer(members, [0, 1], [2], lambda: None)
        return [each.flatten().tolist() for each in members.model.buffers()]

    of_first, of_second = [[1.0] * 15, [1]], [[2.0] * 15, [2]]
    assert run_ranks(3, body) == [of_first, of_second, of_first]


@pytest.mark.parametrize("key", ["weight", "mean", "count"])
def test_what_no_later_comparison_covers_is_compared_when_it_arrives(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    port = free_port()
    send: Any = dist.isend
    place = {"weight": 0, "mean": -2, "count": -1}[
        key
    ]  # of its message; the rest of mean travels with count, which is the last

    def body(rank: int) -> Any:
        members = Members({"model": WithBuffers(1.0)})
        manifest = read_manifest(describe(members, members.content(), {}))
        numbers = list(range(len(dealt_out(manifest, manifest.shapes, [0]))))

        def changed(data: torch.Tensor, *, dst: int) -> Any:
            if numbers.pop(0) == place % len(dealt_out(manifest, manifest.shapes, [0])):
                data = data.clone()
                data[-1] ^= 1
            return send(data, dst=dst)

        monkeypatch.setattr(dist, "isend", changed)
        with world(rank, 2, port):
            return raised_by(lambda: transfer(members, [0], [1], lambda: None))

    said = f"rank 0 sent model.{key}, and other content has arrived"
    assert run_ranks(2, body) == [[], [] if key == "weight" else ["StateDiffersError", said]]


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


def test_a_follower_knows_no_digest_any_more_of_what_it_gets() -> None:
    """`checkpoint_wrapper` takes its own part of the name out of `state_dict()`, and not out of the names of digests."""
    port = free_port()

    def body(rank: int) -> Any:
        wrapped, plain = nn.Linear(2, 2), nn.Linear(2, 2)
        nn.init.constant_(wrapped.bias, rank)
        nn.init.ones_(plain.bias)
        members = Members({"model": nn.Sequential(checkpoint_wrapper(wrapped), plain)})
        at_rest = DigestsAtRest(members, lambda: None)
        at_rest.begin()
        with world(rank, 2, port):
            transfer(members, [0], [1], lambda: None, at_rest, followers=[1])
        return [at_rest.digests() == members.digests(), "model.1.bias" in at_rest._known]

    assert run_ranks(2, body) == [[True, True]] * 2


def test_a_follower_loads_the_members_that_following_has_not_brought() -> None:
    """Such as a scheduler, which it does not step."""
    port = free_port()

    def body(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        members = Members((model, optimizer, scheduler))
        if rank == 0:
            scheduler.last_epoch += 1
        at_rest = DigestsAtRest(members, lambda: None)
        at_rest.begin()
        with world(rank, 2, port):
            content = transfer(members, [0], [1], lambda: None, at_rest, followers=[1])
        if content is not None:
            members.load(content)
        return [sorted(content.held) if content is not None else None, scheduler.last_epoch]

    assert run_ranks(2, body) == [[None, 1], [["model", "optimizer"], 1]]


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


@pytest.mark.parametrize(
    ("key", "sizes", "own", "expected", "is_held"),
    [
        ("a", (2,), "1", "1", True),
        ("a", (2,), "1", "2", False),
        ("a", (2,), None, "1", False),
        ("a", (2,), None, None, False),
        ("a", (1, 2), "1", "1", False),
        ("b", (2,), "1", "1", False),
    ],
    ids=[
        "it does",
        "another digest",
        "none of its own",
        "none at all, as of a buffer",
        "another shape",
        "no such tensor",
    ],
)
def test_what_a_receiver_holds_already(
    key: str, sizes: tuple[int, ...], own: str | None, expected: str | None, is_held: bool
) -> None:
    content = Content({"a": torch.zeros(2)}, "")
    known = [{key: digest} if digest is not None else {} for digest in (own, expected)]
    assert state_transfer._is_held(content, TensorShape(key, "float32", sizes), *known) is is_held


def test_what_a_receiver_holds_is_told_as_numbers() -> None:
    assert state_transfer._numbers("[]") == set()
    assert state_transfer._numbers("[2, 0]") == {0, 2}
    with pytest.raises(BadManifest) as caught:
        state_transfer._numbers("7")
    assert str(caught.value) == ("a receiver does not say what it lacks: TypeError(\"'int' object is not iterable\")")


def test_room_for_a_counter_is_on_the_host_and_for_a_tensor_beside_the_model() -> None:
    members = Members({"model": nn.Linear(3, 2, device="meta")})
    content = members.content()
    rooms = [state_transfer._room(content, TensorShape("x", "float64", sizes), members) for sizes in ((), (2,))]
    assert [(each.device.type, each.dtype, tuple(each.shape)) for each in rooms] == [
        ("cpu", torch.float64, ()),
        ("meta", torch.float64, (2,)),
    ]


class Work:
    """A message on its way: it has arrived once somebody has waited for it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"arrived {self._name}")


def test_pieces_are_sent_in_one_order_and_no_more_are_on_their_way_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver with fewer pieces gets the same bytes as the others as long as it lacks the same."""
    log: list[str] = []
    sent: list[torch.Tensor] = []

    def isend(data: torch.Tensor, *, dst: int) -> Work:
        sent.append(data)
        name = f"{bytes(data.tolist()).hex()} to {dst}"
        log.append(name)
        return Work(log, name)

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(state_transfer, "MAX_IN_FLIGHT", 2)
    content = Content({"a": torch.tensor([1, 2, 3], dtype=torch.uint8), "b": torch.tensor([4], dtype=torch.uint8)}, "")
    both, whole = Piece((Span("a", 1, 3), Span("b", 0, 1)), 0), Piece((Span("a", 0, 2),), 0)
    state_transfer._send(content, sends_of(0, {5: [both, whole], 7: [both]}), lambda: log.append("."))
    assert log == [
        "020304 to 5", "020304 to 7", "0102 to 5", "arrived 020304 to 5", ".",
        "arrived 020304 to 7", ".", "arrived 0102 to 5", ".",
    ]  # fmt: skip
    assert sent[0] is sent[1]


def test_receivers_that_lack_different_tensors_and_their_donors_do_not_wait_for_each_other() -> None:
    """Every message waits for its receiver here, and every rank for the oldest of those that it has on their way."""
    large = TensorShape("large", "uint8", (36 << 20,))
    small = [TensorShape(f"small.{number}", "uint8", (256 << 10,)) for number in range(400)]
    donors, receivers = range(8), {8: [large, *small], 9: small}
    dealt = {receiver: list(RIGHT(lacking, donors)) for receiver, lacking in receivers.items()}
    places = {
        (to, piece.spans): (to, place) for to, all_ in dealt.items() for place, piece in enumerate(all_)
    }  # of each message, which has that name below
    left = {to: [(to, place) for place in range(len(all_))] for to, all_ in dealt.items()}
    left |= {donor: [places[to, piece.spans] for to, piece in sends_of(donor, dealt)] for donor in donors}
    arrived: set[tuple[int, int]] = set()
    while any(left.values()):
        under_way = Counter(message for own in left.values() for message in own[: MAX_IN_FLIGHT + 1])
        ready = {message for message, ends in under_way.items() if ends == 2} - arrived
        assert ready, "a circle of ranks that wait"
        arrived |= ready
        for own in left.values():
            while own and own[0] in arrived:
                own.pop(0)
    assert len(arrived) == sum(map(len, dealt.values()))


def test_pieces_are_received_from_their_donors_into_place(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    on_wire = [bytes([2, 3, 4]), bytes([1])]

    def irecv(data: torch.Tensor, *, src: int) -> Work:
        data.copy_(torch.tensor(list(on_wire.pop(0)), dtype=torch.uint8))
        log.append(f"from {src}")
        return Work(log, str(src))

    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(state_transfer, "MAX_IN_FLIGHT", 1)
    target = Content({"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.uint8)}, "")
    dealt = [Piece((Span("a", 1, 3), Span("b", 0, 1)), 4), Piece((Span("a", 0, 1),), 6)]
    state_transfer._receive(target, dealt, lambda: log.append("."))
    assert log == ["from 4", "from 6", "arrived 4", ".", "arrived 6", "."]
    assert [each.tolist() for each in target.tensors.values()] == [[1, 2, 3], [4]]


@pytest.mark.parametrize("is_donor", [True, False])
def test_the_state_of_an_accelerator_travels_through_the_host_with_the_counters_that_lie_there(
    monkeypatch: pytest.MonkeyPatch, is_donor: bool
) -> None:
    """Adam's counts of steps lie there. Memory without content plays the accelerator: it can be copied to, but not from."""
    model = nn.Linear(3, 2, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    for each in model.parameters():
        optimizer.state[each] = {"step": torch.tensor(1.0), "exp_avg": each.detach(), "exp_avg_sq": each.detach()}
    members, log = Members((model, optimizer)), list[str]()
    told = describe(members, members.content(), {})

    def on_way(data: torch.Tensor, **_: int) -> None:
        log.append(data.device.type)

    monkeypatch.setattr(dist, "isend", on_way)
    monkeypatch.setattr(dist, "irecv", on_way)
    monkeypatch.setattr(dist, "get_rank", lambda: 0 if is_donor else 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(state_transfer, "all_texts", lambda text, *_: [text] * 2)
    monkeypatch.setattr(state_transfer, "text_of", lambda *_: told)
    if is_donor:
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            transfer(members, [0], [1], lambda: None)
    else:
        transfer(members, [0], [1], lambda: None)
        assert set(log) == {"cpu"}
