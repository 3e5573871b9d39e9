"""The connections between ranks for checkpoints, with ranks in processes of their own, in one subgroup and in several."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world

from elastipod.checkpoint import rank_connections, transfer_blocks
from elastipod.checkpoint.communicator import Communicator, RanksLost, name_of_connections
from elastipod.checkpoint.gloo_collectives import GlooCollectives
from elastipod.checkpoint.hierarchy import Hierarchy
from elastipod.message_slots import BODY_BYTES
from elastipod.stores import TorchStore

LENGTHS = (0, 1, BODY_BYTES - 1, BODY_BYTES, BODY_BYTES + 1, 3 * BODY_BYTES)
RANKS = 5


def one() -> int:
    return 1


def total(values: list[int]) -> int:
    return sum(values)


def message(rank: int, length: int) -> bytes:
    return bytes((rank + at) % 251 for at in range(length))


def test_messages_of_any_length_arrive_whole() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        wrong: list[Any] = []
        with world(rank, 3, port):
            link = GlooCollectives.connect(dist.distributed_c10d._get_default_store(), rank, 3, 60.0)
            for at, length in enumerate(LENGTHS):
                lengths = [LENGTHS[(at + each) % len(LENGTHS)] for each in range(3)]  # each rank's another
                parts = [message(each, size) for each, size in enumerate(lengths)]
                if link.gather(parts[rank]) != (parts if rank == 0 else []):
                    wrong.append(["gather", lengths])
                if link.scatter(parts if rank == 0 else []) != parts[rank]:
                    wrong.append(["scatter", lengths])
                if link.broadcast(message(7, length) if rank == 0 else b"other") != message(7, length):
                    wrong.append(["broadcast", length])
        return wrong

    assert run_ranks(3, body) == [[]] * 3


def test_a_single_rank_needs_no_group() -> None:
    alone = GlooCollectives.connect(None, 0, 1, 60.0)
    assert alone.group is None
    assert (alone.gather(b"a"), alone.broadcast(b"b"), alone.scatter([b"c"])) == ([b"a"], b"b", b"c")


@pytest.fixture(params=[5, 2], ids=["one subgroup", "three subgroups"])
def subgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The sizes of subgroups; with 2, ranks 0, 2 and 4 lead."""
    size: int = request.param
    monkeypatch.setattr(Hierarchy, "of", classmethod(lambda cls, world_size: cls(world_size, size)))
    return size


def connected() -> Communicator:
    """Collective."""
    comm = Communicator()
    assert not comm.is_open
    comm.connect(comm.training_all_reduce(lambda: comm.is_open, name_of_connections))
    return comm


def test_values_of_all_ranks_are_combined_once_and_every_rank_gets_the_result(subgroups: int) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, RANKS, port):
            comm = connected()
            found = [
                comm.all_reduce(lambda: rank * 10, lambda values: [*values, "combined"]),
                comm.training_all_reduce(lambda: [rank], lambda values: values[-1:]),
                comm.broadcast(lambda: {"from": rank}),
                comm.training_broadcast(lambda: {"from": rank}),
                sorted(comm.all_to_all(lambda: {to: f"{rank} to {to}" for to in range(rank)}).items()),
            ]
            comm.close()
            return [*found, comm.is_open]

    expected = [[0, 10, 20, 30, 40, "combined"], [[4]], {"from": 0}, {"from": 0}]
    received = [[[source, f"{source} to {rank}"] for source in range(rank + 1, RANKS)] for rank in range(RANKS)]
    assert run_ranks(RANKS, body) == [[*expected, received[rank], False] for rank in range(RANKS)]


def test_training_threads_may_share_the_default_group_which_ends_with_the_world(subgroups: int) -> None:
    """Where one group is enough. What is held of it would keep its connections open, in which others wait for their end."""
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, RANKS, port):
            comm = Communicator(on_default_group=True)
            num_groups = len(dist.distributed_c10d._world.pg_map)
            default = weakref.ref(dist.group.WORLD)
            found: list[Any] = [
                comm.is_open,
                comm.training_all_reduce(lambda: [rank] * 500, lambda values: [each[-1] for each in values]),
                comm.training_broadcast(lambda: f"{rank}" * 3000) == "0" * 3000,
            ]
            for name in ("one", "another"):
                comm.connect(name)
                found += [comm.is_open, comm.all_reduce(one, total)]
        gc.collect()
        return [*found, num_groups, default() is None]

    # Each rank is in its subgroup, and those that lead one are in that of the leaders.
    of_ranks = [1] * RANKS if subgroups == RANKS else [3, 2, 3, 2, 2]
    expected = [False, [*range(RANKS)], True, *2 * [True, RANKS]]
    assert run_ranks(RANKS, body) == [[*expected, number, True] for number in of_ranks]


def test_a_failure_on_one_rank_is_raised_on_all_and_the_connections_stay(subgroups: int) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        def work() -> None:
            if rank in (1, 3):
                raise OSError(f"the disk of {rank} is full")

        with world(rank, RANKS, port):
            comm = connected()
            said = [raised_by(lambda: comm.on_every_rank(work)), raised_by(lambda: comm.training_all_reduce(work, len))]
            return [*said, comm.all_reduce(one, total)]

    failure = ["CheckpointError", "rank 1: the disk of 1 is full"]
    assert run_ranks(RANKS, body) == [[failure, failure, RANKS]] * RANKS


def test_bytes_are_transferred_in_blocks_between_any_ranks(subgroups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sends to the next two, with blocks that do not divide the tensors evenly."""
    port = free_port()
    monkeypatch.setattr(transfer_blocks, "BLOCK_BYTES", 10)
    monkeypatch.setattr(transfer_blocks, "SMALL_BYTES", 8)
    sizes = [95, 7, 0, 10, 3, 4]

    def tensors(source: int, to: int) -> list[torch.Tensor]:
        return [torch.full((size,), 16 * source + to, dtype=torch.uint8) for size in sizes]

    def body(rank: int) -> Any:
        with world(rank, RANKS, port):
            comm = connected()
            sources = [(rank - 1) % RANKS, (rank - 2) % RANKS]
            into = {source: [torch.zeros(size, dtype=torch.uint8) for size in sizes] for source in sources}
            blocks: list[int] = []
            comm.transfer(
                {to: tensors(rank, to) for to in ((rank + 1) % RANKS, (rank + 2) % RANKS)},
                {
                    source: [(each, lambda block: blocks.append(len(block))) for each in into[source]]
                    for source in sources
                },
            )
            right = [torch.equal(torch.cat(into[source]), torch.cat(tensors(source, rank))) for source in sources]
            comm.transfer({}, {})
            return [right, sorted(blocks)]

    blocks = sorted(2 * [10] * 9 + 2 * [5, 7, 10, 3, 4])  # small ones travel together, and are told apart again
    assert run_ranks(RANKS, body) == [[[True, True], blocks]] * RANKS


@pytest.fixture
def no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank gives up because it hears nothing, and no connection closes because garbage is collected."""
    monkeypatch.setattr(rank_connections, "SILENCE_TIMEOUT_S", 100 * PATIENCE_S)


@pytest.mark.usefixtures("no_silence")
def test_a_rank_that_gives_up_tells_the_others_why_and_they_can_connect_again() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        gc.disable()
        with world(rank, 3, port):
            comm = connected()
            if rank == 1:
                comm.abort("no memory is left")
                said = raised_by(lambda: comm.all_reduce(one, total))[:1]
            else:
                said = raised_by(lambda: comm.all_reduce(one, total))
            states = [comm.is_open]
            comm.connect("again")
            return [said, states, comm.all_reduce(one, total)]

    found = run_ranks(3, body)
    assert found[0] == found[2] == [["RanksLost", "rank 1: no memory is left"], [False], 3]
    assert found[1] == [["RanksLost"], [False], 3]


@pytest.mark.usefixtures("no_silence")
def test_a_failure_while_blocks_are_on_their_way_is_told_to_the_others() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        gc.disable()

        def refuse(block: torch.Tensor) -> None:
            raise ValueError("a bad block")

        with world(rank, 2, port):
            comm = connected()
            data = torch.ones(8, dtype=torch.uint8)
            first = raised_by(
                lambda: comm.transfer({1: [data]}, {}) if rank == 0 else comm.transfer({}, {0: [(data, refuse)]})
            )
            second = raised_by(lambda: comm.all_reduce(one, total))
            return [first, second[:1] if rank else second, comm.is_open]

    sender, receiver = run_ranks(2, body)
    assert receiver[0] == ["ValueError", "a bad block"]
    assert ["RanksLost", "rank 1: ValueError: a bad block"] in sender[:2]
    assert (sender[2], receiver[2]) == (False, False)


def test_a_store_of_its_own_prefix_over_the_job_s() -> None:
    port = free_port()
    with_server = TorchStore("127.0.0.1", port, "a", 30.0, keep_server=True)
    client, other = TorchStore("127.0.0.1", port, "a", 30.0), TorchStore("127.0.0.1", port, "b", 30.0)
    client.set("key", b"value")
    client.set_many({"one": b"1", "two": b"2"})
    assert with_server.get("key") == b"value"
    assert with_server.get_many(["two", "one"]) == [b"2", b"1"]
    assert [client.add("count", 2), with_server.add("count", 3)] == [2, 5]
    assert (client.has("key"), other.has("key"), client.has("none")) == (True, False, False)
    client.wait("key", 30.0)
    with pytest.raises(TimeoutError):
        client.wait("none", 0.1)
    with pytest.raises((TimeoutError, ConnectionError)):
        TorchStore("127.0.0.1", free_port(), "a", 0.2)


def test_a_transfer_whose_connections_another_thread_has_closed_says_why() -> None:
    comm = Communicator()
    comm._world_size = 2
    comm._store = SimpleNamespace(set=lambda *_: None, check=lambda _: True, get=lambda _: b"rank 1: the job leaves")
    with pytest.raises(RanksLost, match=r"^rank 1: the job leaves$"):
        comm.transfer({1: [torch.zeros(1, dtype=torch.uint8)]}, {})


def test_connections_can_be_closed_while_python_exits_and_can_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    comm = Communicator()
    comm._connections = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr("threading.Thread.start", ends)
    comm.retire("storage hangs")
    assert comm._connections is None
