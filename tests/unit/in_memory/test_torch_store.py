"""Ranks that meet at the store of an agent: with real groups of gloo, with few calls, and freed when the generation ends."""

from __future__ import annotations

import os
import threading
from collections import Counter
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.agent_client import until
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks
from tests.unit.served_stores import KEY, ServedStore, served_store

from elastipod import agent_store, elastic_event
from elastipod.agent_store import StoreConnection, open_store
from elastipod.in_memory import process_groups
from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.process_groups import ProcessGroups
from elastipod.in_memory.torch_store import TorchAgentStore
from elastipod.ipc.protocol import WORKER_KEY_ENV
from elastipod.store_wire import Greeting


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks of a busy machine the time to connect, and the key of their job."""
    monkeypatch.setattr(process_groups, "TRY_S", 20.0)
    monkeypatch.setattr(process_groups, "CONNECT_S", PATIENCE_S)
    monkeypatch.setenv(WORKER_KEY_ENV, KEY)


def never() -> bool:
    return False


class Job:
    """Ranks in processes of their own, and in this one the agent that serves their store."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.served = ServedStore(port=free_port())

    def place(self, rank: int, generation: int = 1, *, size: int | None = None) -> WorldPlace:
        nowhere = 9  # no worker hosts a store
        return WorldPlace(generation, rank, size or self.size, "127.0.0.1", nowhere, self.served.address)

    def run(self, body: Any, *, begins: bool = True) -> list[Any]:
        def begin() -> None:
            self.served.open()
            if begins:
                self.served.begin(1, self.size)

        try:
            return run_ranks(self.size, body, begin)
        finally:
            self.served.close()


def sum_of(value: int) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total.item())


def test_each_call_of_a_torch_store_is_that_of_any_other() -> None:
    with served_store() as served:
        connection = open_store(served.address, Greeting(1, 0), KEY, PATIENCE_S)
        hosted = dist.HashStore()  # type: ignore[attr-defined]
        found = []
        for base in (TorchAgentStore(connection), hosted):
            store: Any = dist.PrefixStore("p", base)  # type: ignore[attr-defined]
            store.set("a", "1")
            store.multi_set(["b", "c"], ["2", "3"])
            store.append("a", "x")
            found.append(
                [
                    [store.get("a"), store.multi_get(["c", "b"]), store.add("n", 4), store.add("n", -1)],
                    [store.compare_set("v", "", "x"), store.compare_set("v", "y", "z"), store.compare_set("v", "x", "z")],
                    [store.check(["a", "v"]), store.check(["a", "w"]), store.num_keys(), store.delete_key("v")],
                    [store.delete_key("v"), store.has_extended_api(), store.wait(["a"]), store.wait(["a"], timedelta(1))],
                ]
            )  # fmt: skip
        assert found[0] == found[1]
        connection.close()


def test_a_call_that_fails_raises_what_torch_raises() -> None:
    with served_store() as served:
        connection = open_store(served.address, Greeting(1, 0), KEY, PATIENCE_S)
        store = dist.PrefixStore("p", TorchAgentStore(connection))  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(dist.DistStoreError, match="not everything that was waited for"):
            store.get("k")
        with pytest.raises(dist.DistStoreError, match="not everything that was waited for"):
            store.wait(["k"], timedelta(seconds=0.05))
        with pytest.raises(RuntimeError, match="refuses set: a key may have"):
            store.set("k", "x" * 100_000)
        connection.close("it is over")
        with pytest.raises(dist.DistNetworkError, match=r"is gone: it is over$"):
            store.get("k")


def calls_of_ranks(size: int) -> list[Counter[str]]:
    """Give the calls of each connection, of ranks that meet, sum up and leave."""
    job = Job(size)

    def body(rank: int) -> int:
        groups = ProcessGroups(None, None)
        groups.connect(job.place(rank), never)
        total = sum_of(10**rank)
        groups.leave()
        return total

    assert job.run(body) == [int("1" * size)] * size
    assert len(job.served.names) == size, "each rank has one connection"
    return [Counter(names) for names in job.served.names.values()]


def test_the_calls_of_a_rank_do_not_become_more_as_the_world_grows() -> None:
    """A rank arrives, writes its address, reads all others at once, and reads the verdict; the last one tells the others."""
    for size in (2, 3, 6):
        found = calls_of_ranks(size)
        most = {"add": 2, "wait": 2, "set": 2, "get": 2, "compare_set": 1}
        of_all = sum(found, Counter())
        assert of_all["compare_set"] >= 1, "a verdict"
        assert of_all["set"] == size + 1, "addresses, and that all have arrived"
        assert [calls for calls in found if calls - Counter(most)] == [], f"with {size} ranks"


def test_ranks_meet_again_in_the_next_generation_under_other_ranks() -> None:
    job = Job(3)

    def body(number: int) -> Any:
        groups = ProcessGroups(None, None)
        groups.connect(job.place(number), never)
        sums = [sum_of(10**number)]
        groups.leave()
        if number == 2:
            return sums
        groups.connect(job.place(1 - number, 2, size=2), never)  # waits for the /start
        return [*sums, dist.get_rank(), sum_of(10**number)]

    def start_the_second() -> None:
        until(
            lambda: (
                job.served.do(lambda: sum(each.generation == 2 for each in job.served.store._connections.values())) == 2
            ),
            "two",
        )
        job.served.begin(2, 2)

    operator = threading.Thread(target=start_the_second)
    begin = job.served.begin

    def begin_and_go_on(generation: int, num_ranks: int, *, is_server: bool = True) -> None:
        begin(generation, num_ranks, is_server=is_server)
        if generation == 1:
            operator.start()

    job.served.begin = begin_and_go_on  # type: ignore[method-assign]
    try:
        assert job.run(body) == [[111, 1, 11], [111, 0, 11], [111]]
    finally:
        operator.join()


@pytest.mark.parametrize("is_told", [True, False], ids=["by its agent", "by the end of the store"])
def test_a_rank_that_waits_for_others_is_freed_when_the_generation_ends(is_told: bool) -> None:
    """The others never come. The limit for their arrival is half an hour."""
    with served_store(1, 2) as served:
        place = WorldPlace(1, 0, 2, "127.0.0.1", 9, served.address)
        groups, over = ProcessGroups(None, None), threading.Event()
        found: list[list[str]] = []
        rank = threading.Thread(target=lambda: found.append(raised_by(lambda: groups.connect(place, over.is_set))))
        rank.start()
        until(lambda: served.do(lambda: bool(served.store._keys._waits)), "a rank that waits")
        if is_told:
            over.set()
            groups.abort()
        else:
            served.end()
        rank.join(PATIENCE_S)
        assert not rank.is_alive()
        assert found[0][0] == "WorldNotBuilt"
        assert found[0][1].startswith("generation 1 cannot meet at its store: the store at 127.0.0.1:")
        groups.leave()
        assert agent_store.meeting_place() is None


def test_a_rank_of_a_generation_that_is_over_finds_no_world() -> None:
    with served_store(2, 2) as served:
        place = WorldPlace(1, 0, 2, "127.0.0.1", 9, served.address)
        told = raised_by(lambda: ProcessGroups(None, None).connect(place, never))
    assert told[0] == "WorldNotBuilt"
    assert told[1].endswith(
        "does not serve the store to this rank: generation 1 is over; this agent knows generation 2"
    )


def test_ranks_agree_on_an_event_at_the_store_at_which_they_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("ELASTIPOD_GENERATION", "1")

    def body(rank: int) -> Any:
        groups = ProcessGroups(None, None)
        groups.connect(job.place(rank), never)
        calls = 0
        while not elastic_event.elastic_event_detected():
            calls += 1
            sum_of(1)
            if rank == 1 and calls == 5:
                os.kill(os.getpid(), 10)  # SIGUSR1
        groups.leave()
        elastic_event.reset_elastic_event()
        return calls

    calls = job.run(body)
    assert calls[0] == calls[1] >= 5
    for names in map(Counter, job.served.names.values()):
        assert names.total() - names["get"] <= 24, "few calls, whatever the number of steps"


def test_what_the_agent_says_at_its_end_is_why_the_connection_is_lost() -> None:
    played = mock.Mock(
        _answers={},
        _end="",
        _closed="",
        _turn=threading.Condition(),
        spec_set=("_answers", "_end", "_closed", "_turn", "_next_frame", "_lose"),
    )
    played._next_frame.return_value = [b"", b"end", b"the generation", b"is over"]
    StoreConnection._read_until(played, b"7", 0.0)
    assert played._lose.mock_calls == [mock.call("the generation is over")]
    assert played._closed == "the generation is over", "nobody is to ask again"
    assert played._answers == {}
