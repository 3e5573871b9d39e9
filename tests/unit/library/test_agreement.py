"""The agreement of ranks on one stop call, with threads for ranks and a store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nonempty import every
from tests.patience import PATIENCE_S
from tests.unit.library.memory_store import MemoryClient, MemoryServer

from elastipod import agreement as agreement_module
from elastipod.agreement import Agreement, stop_call
from elastipod.errors import ElasticAgreementError, ElasticAgreementTimeout
from elastipod.rank_ranges import format_ranks


class Ranks:
    """Ranks that run in lockstep: after every call each waits for all, as a collective would make it."""

    def __init__(self, world_size: int, timeout_s: float = PATIENCE_S) -> None:
        self.server = MemoryServer()
        self.pending = [threading.Event() for _ in range(world_size)]
        self.agreements = [
            Agreement(
                rank=rank,
                world_size=world_size,
                is_pending=self.pending[rank].is_set,
                connect=self.server.client,
                timeout_s=timeout_s,
            )
            for rank in range(world_size)
        ]
        for agreement in self.agreements:
            agreement.start()

    def train(self, steps: int, before_call: Callable[[int, int], None]) -> list[int | None]:
        """Make up to ``steps`` steps on every rank; give the call at which each stopped, None for never.

        before_call is told (rank, call) and may wait or raise an event.
        """
        barrier = threading.Barrier(len(self.agreements))

        def loop(rank: int) -> int | None:
            for call in range(1, steps + 1):
                barrier.wait(PATIENCE_S)
                before_call(rank, call)
                if self.agreements[rank].record_call():
                    return call
            return None

        with ThreadPoolExecutor(len(self.agreements)) as pool:
            return list(pool.map(loop, range(len(self.agreements))))

    def close(self) -> None:
        for agreement in self.agreements:
            agreement.close()


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(world_size: int, timeout_s: float = PATIENCE_S) -> Ranks:
        made.append(Ranks(world_size, timeout_s))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("calls_before", [1, 5])
def test_a_rank_that_alone_asks_does_not_wait_for_ranks_that_never_do(
    calls_before: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its script asks on one rank and broadcasts the answer: the others wait for it, and never call."""
    monkeypatch.setattr(agreement_module, "ALONE_S", 0.01)
    monkeypatch.setattr(agreement_module, "PENDING_SLICE_S", 0.01)
    server, pending = MemoryServer(), threading.Event()
    alone = Agreement(
        rank=0, world_size=2, is_pending=pending.is_set, connect=server.client, timeout_s=PATIENCE_S, hosts_store=False
    )
    alone.start()
    assert not any(alone.record_call() for _ in range(calls_before))
    pending.set()
    while not alone.record_call():
        time.sleep(0.001)
    assert alone.record_call(), "and it stays so"
    assert "rank 0 stops without asking the others" in caplog.text
    alone.close()


def test_ranks_that_have_ever_asked_are_waited_for(
    make_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement_module, "ALONE_S", 0.01)
    ranks = make_ranks(2, timeout_s=0.5)
    for _ in range(3):
        assert not ranks.agreements[0].record_call()
    ranks.agreements[1].abandon()  # it publishes nothing
    ranks.pending[0].set()
    wait_until(lambda: ranks.agreements[0]._published is not None)
    with pytest.raises(ElasticAgreementTimeout, match="HYPERPOD_SIGNAL_COORDINATION=disabled"):
        ranks.agreements[0].record_call()


@pytest.mark.parametrize("raisers", [{0: 3}, {2: 5}, {0: 2, 1: 4, 2: 3}], ids=["first rank", "last rank", "all, apart"])
def test_every_rank_stops_at_the_same_call(make_ranks: Callable[..., Ranks], raisers: dict[int, int]) -> None:
    ranks = make_ranks(3)

    def before_call(rank: int, call: int) -> None:
        if raisers.get(rank) == call:
            ranks.pending[rank].set()
            ranks.agreements[rank].wake()

    stopped = ranks.train(100_000, before_call)
    assert len(set(stopped)) == 1
    assert stopped[0] is not None
    assert stopped[0] >= min(raisers.values())


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_signals_on_any_ranks_at_any_time_end_in_one_answer(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, 5))
    raise_at = data.draw(st.dictionaries(st.integers(0, world_size - 1), st.integers(1, 20), min_size=1))
    slow = data.draw(st.integers(0, world_size - 1))
    ranks = Ranks(world_size)

    def before_call(rank: int, call: int) -> None:
        if raise_at.get(rank) == call:
            ranks.pending[rank].set()
            ranks.agreements[rank].wake()
        if rank == slow and call % 7 == 0:
            time.sleep(0.002)  # a straggler: the others run ahead into their next call

    try:
        stopped = ranks.train(100_000, before_call)
    finally:
        ranks.close()
    assert len(set(stopped)) == 1
    assert None not in stopped


def test_no_store_round_trip_while_nothing_is_pending(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(4)
    wait_until(lambda: len(ranks.server.requests) == 8)
    assert ranks.train(1000, lambda rank, call: None) == [None] * 4
    # Each has said once, when it connected, that it asks at all.
    assert sorted(ranks.server.requests) == ["add asking"] * 4 + [f"wait wake/{rank}" for rank in range(4)]


def test_only_the_first_rank_wakes_the_others(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(4)
    for event in ranks.pending:
        event.set()
    ranks.train(100_000, lambda rank, call: None)
    assert sum(request.startswith("set wake/") for request in ranks.server.requests) == 1


def test_a_rank_waits_only_for_publishing_and_not_for_the_others_training_threads(
    make_ranks: Callable[..., Ranks],
) -> None:
    ranks = make_ranks(2)
    ahead, behind = ranks.agreements
    for agreement in (ahead, behind):
        assert not agreement.record_call()
    assert not ahead.record_call()  # rank 0 has made call 2, rank 1 is still inside its second step
    ranks.pending[1].set()
    wait_until(lambda: "stop" in ranks.server.values)
    assert ranks.server.values["stop"] == b"3"
    assert not behind.record_call()  # its second call, which rank 0 has left already
    with ThreadPoolExecutor(2) as pool:
        assert [
            each.result(PATIENCE_S) for each in (pool.submit(ahead.record_call), pool.submit(behind.record_call))
        ] == [True, True]


def test_ranks_that_never_ask_are_named() -> None:
    server = MemoryServer()
    alone = Agreement(rank=1, world_size=4, is_pending=lambda: True, connect=server.client, timeout_s=0.2)
    alone.start()
    wait_until(lambda: "next/1" in server.values)
    with pytest.raises(ElasticAgreementTimeout, match=r"ranks 0,2-3 did not publish a next call"):
        alone.record_call()
    alone.close()


def test_ranks_that_call_unequally_often_are_named(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(2, timeout_s=0.3)
    for _ in range(5):
        assert not ranks.agreements[0].record_call()  # five calls of rank 0, none of rank 1
    ranks.pending[0].set()
    wait_until(lambda: "stop" in ranks.server.values)
    with pytest.raises(ElasticAgreementTimeout, match=r"at call 6 .* rank 1 did not make that call"):
        ranks.agreements[0].record_call()


def test_a_rank_that_is_done_keeps_nobody_waiting_for_a_stop(make_ranks: Callable[..., Ranks]) -> None:
    """A drain begins when one rank has made its last call: there is no step left after which all could stop."""
    ranks = make_ranks(3)
    done, *others = ranks.agreements
    for agreement in (*ranks.agreements, done):
        assert not agreement.record_call()
    done.close()
    ranks.pending[1].set()
    wait_until(lambda: all(agreement._published for agreement in others))
    assert [agreement.record_call() for agreement in (*others, *others)] == [False] * 4


def test_ranks_that_wait_already_learn_that_another_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is so late to hear of the event that it ends before it could publish its next call; then it must not publish any more."""
    monkeypatch.setattr("elastipod.agreement.CLOSE_S", 0.1)
    server, ends = MemoryServer(), threading.Event()

    def connect_late(_: float) -> MemoryClient:
        if threading.current_thread().name == "elastipod-event-watcher":
            assert ends.wait(PATIENCE_S)
        return server.client()

    def rank(number: int, connect: Callable[[float], MemoryClient]) -> Agreement:
        return Agreement(rank=number, world_size=2, is_pending=lambda: True, connect=connect, timeout_s=PATIENCE_S)

    done, waiting = rank(0, connect_late), rank(1, server.client)
    done.start()
    waiting.start()
    wait_until(lambda: "next/1" in server.values)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(waiting.record_call)
        wait_until(lambda: waiting._calls == 1)
        done.close()
        assert call.result(PATIENCE_S) is False
    ends.set()
    done._watcher.join(PATIENCE_S)
    assert "next/0" not in server.values
    waiting.close()


def test_a_store_that_dies_while_nothing_is_pending_disturbs_nobody(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(2)
    ranks.server.die()
    assert ranks.train(10, lambda rank, call: None) == [None, None]


def test_an_event_after_the_store_died_is_dropped(
    make_ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = make_ranks(2)
    ranks.server.die()
    ranks.pending[0].set()
    wait_until(lambda: "the other ranks are gone" in caplog.text)
    assert not ranks.agreements[0].record_call()


def test_a_store_that_leaves_at_the_stop_call_is_no_error(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(2)
    ranks.pending[0].set()
    wait_until(lambda: "stop" in ranks.server.values)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ranks.agreements[1].record_call)
        wait_until(lambda: "arrived/1" in ranks.server.values)
        ranks.server.die()
        assert answer.result(PATIENCE_S)


def test_a_host_that_hangs_keeps_nobody_who_leaves_after_a_fault() -> None:
    """It still accepts connections, as the kernel of its node does, but never answers: torch waits for that without a limit."""
    server, thaw = MemoryServer(), threading.Event()
    hangs = False

    def connect(_: float) -> MemoryClient:
        if hangs:
            thaw.wait()
        return server.client()

    alone = Agreement(rank=1, world_size=2, is_pending=lambda: False, connect=connect, timeout_s=PATIENCE_S)
    alone.start()
    assert not alone.record_call()
    hangs = True
    with ThreadPoolExecutor(1) as pool:
        leaves = pool.submit(alone.close, is_abandoned=True)
        try:
            leaves.result(PATIENCE_S)
        finally:
            thaw.set()
    wait_until(lambda: server.values.get("left") == b"1")  # the listener has ended now that the host goes on


def test_a_connection_that_takes_too_long_drops_the_event(caplog: pytest.LogCaptureFixture) -> None:
    server, pending = MemoryServer(), threading.Event()

    def connect(limit_s: float) -> MemoryClient:
        if pending.is_set():
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return server.client()

    alone = Agreement(rank=1, world_size=2, is_pending=pending.is_set, connect=connect, timeout_s=PATIENCE_S)
    alone.start()
    pending.set()
    wait_until(lambda: "the other ranks are gone (no answer within 30 s)" in caplog.text)
    assert not alone.record_call()
    server.die()
    alone.close()


def test_a_store_out_of_reach_is_said_at_the_first_call() -> None:
    server = MemoryServer()
    server.die()
    with pytest.raises(ElasticAgreementError, match="rank 0 cannot reach the store"):
        Agreement(rank=0, world_size=2, is_pending=lambda: False, connect=server.client, timeout_s=1).start()


@given(st.lists(st.integers(1, 10**9), min_size=1))
def test_nobody_has_passed_the_stop_call(next_calls: list[int]) -> None:
    assert every(call <= stop_call(next_calls) for call in next_calls)
    assert stop_call(next_calls) in next_calls


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([0, 1, 2, 9], "ranks 0-2,9"),
        ([5, 4], "ranks 4-5"),
        ([1, 0, 2, 9], "ranks 0-2,9"),
        ([4, 6], "ranks 4,6"),
    ],
)
def test_ranks_are_named_as_ranges(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


@pytest.mark.parametrize("has_published", [False, True], ids=["before it called", "at the stop call"])
def test_a_rank_waits_for_no_peer_that_is_gone_once_the_generation_is_over(
    make_ranks: Callable[..., Ranks], has_published: bool
) -> None:
    """The peer died in its step; no collective was under way that could fail."""
    ranks = make_ranks(2)
    waiting, gone = ranks.agreements
    ranks.pending[0].set()
    waiting.wake()
    wait_until(lambda: waiting._published is not None)
    if has_published:
        wait_until(lambda: gone._stop is not None)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(waiting.record_call)
        if has_published:
            wait_until(lambda: waiting._client is not None and waiting._client.has("arrived/0"))
        else:
            wait_until(lambda: waiting._calls == 1)
        waiting.abandon()
        with pytest.raises(ElasticAgreementError, match="ended before the ranks agreed"):
            call.result(PATIENCE_S)
