"""What one rank says and asks at the store of the agreement, word for word, so that ranks of other versions understand it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from elastipod import agreement as module
from elastipod.agreement import NEVER, Agreement
from elastipod.errors import ElasticAgreementError, ElasticAgreementTimeout

PENDING = (
    "an elastic event is pending, but {} did not publish a next call within 7 s; every rank must call elastic_event_detected() once per "
    "step, or with HYPERPOD_SIGNAL_COORDINATION=disabled any rank, which tells the others"
)


class Client:
    """A client of a store where all others have said what they have to. log: what it was asked."""

    def __init__(self, counts: dict[str, int] | None = None, missing: tuple[str, ...] = ()) -> None:
        self.log: list[Any] = []
        self.counts = {"pending": 2, "published": 3, "arrived": 3, "left": 3, "asking": 3, **(counts or {})}
        self.missing = missing
        self.clock = SimpleNamespace(now=100.0)
        self.on_wait: Any = lambda: None

    def sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def set(self, key: str, value: bytes) -> None:
        self.log.append(("set", key, value))

    def set_many(self, values: dict[str, bytes]) -> None:
        self.log.append(("set_many", values))

    def get(self, key: str) -> bytes:
        return b"12"

    def get_many(self, keys: list[str]) -> list[bytes]:
        self.log.append(("get_many", keys))
        return [b"5", b"11", b"9"]

    def add(self, key: str, amount: int) -> int:
        assert amount == 1 or key == "asking"
        self.log.append(("add", key))
        return self.counts[key]

    def has(self, key: str) -> bool:
        return key not in self.missing

    def wait(self, key: str, timeout_s: float) -> None:
        self.log.append(("wait", key, timeout_s))
        self.on_wait()
        if key in self.missing:
            self.clock.now += timeout_s
            raise TimeoutError


class Rank:
    """Rank 1 of three, without threads. limits: of the connections that it has made."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, client: Client, *, timeout_s: float = 7.0, **options: Any
    ) -> None:
        self.client = client
        self.limits: list[float] = []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: client.clock.now, sleep=client.sleep))
        self.agreement = Agreement(
            rank=1, world_size=3, is_pending=lambda: True, connect=self.connect, timeout_s=timeout_s, **options
        )

    def connect(self, limit_s: float) -> Any:
        self.limits.append(limit_s)
        return self.client


def test_the_first_rank_with_an_event_wakes_all_and_the_last_to_publish_chooses_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch, Client({"pending": 1}))
    for _ in range(4):
        assert rank.agreement.record_call() is False
    assert rank.agreement._agree() == 12
    assert rank.client.log == [
        ("add", "pending"),
        ("set_many", {"wake/0": b"event", "wake/1": b"event", "wake/2": b"event"}),
        ("set", "next/1", b"5"),
        ("add", "published"),
        ("get_many", ["next/0", "next/1", "next/2"]),
        ("set", "stop", b"11"),
        ("wait", "stop", 1.0),
    ]
    assert rank.limits == [30.0]
    assert rank.agreement._published == 5


@pytest.mark.parametrize("is_woken", [True, False])
def test_a_rank_that_is_not_the_first_only_publishes(monkeypatch: pytest.MonkeyPatch, is_woken: bool) -> None:
    rank = Rank(monkeypatch, Client({"published": 2}))
    rank.agreement._woken_by_peer = is_woken
    assert rank.agreement._agree() == 12
    told = [("set", "next/1", b"1"), ("add", "published"), ("wait", "stop", 1.0)]
    assert rank.client.log == (told if is_woken else [("add", "pending"), *told])


def test_ranks_that_do_not_publish_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client({"published": 1}, missing=("stop", "next/2")))
    with pytest.raises(ElasticAgreementTimeout) as caught:
        rank.agreement._agree()
    assert str(caught.value) == PENDING.format("rank 2")
    assert rank.client.log[-7:] == [("wait", "stop", 1.0)] * 7, "one second after the other, to the limit and no longer"


def test_a_limit_below_a_second_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client({"published": 1}, missing=("stop",)), timeout_s=0.25)
    with pytest.raises(ElasticAgreementTimeout):
        rank.agreement._agree()
    assert rank.client.log[-1:] == [("wait", "stop", 0.25)]
    assert rank.client.log[-2] == ("add", "published")


@pytest.mark.parametrize("error", [ConnectionError, TimeoutError])
def test_where_nobody_answers_who_is_missing_is_not_known(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    rank = Rank(monkeypatch, Client({"published": 1}, missing=("stop",)))
    with mock.patch.object(rank.client, "has", side_effect=error), pytest.raises(ElasticAgreementTimeout) as caught:
        rank.agreement._agree()
    assert str(caught.value) == PENDING.format("some ranks")


def test_a_process_that_ends_waits_for_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client(missing=("stop",)))
    rank.client.on_wait = lambda: setattr(rank.agreement, "_closing", True)
    with pytest.raises(ElasticAgreementError, match=r"^the generation or the process ended before the ranks agreed$"):
        rank.agreement._agree()
    assert rank.client.log[-2:] == [("set", "stop", b"11"), ("wait", "stop", 1.0)]


def stopped_at(rank: Rank, call: int) -> Agreement:
    rank.agreement._client = rank.client  # type: ignore[assignment]
    rank.agreement._published, rank.agreement._stop = 1, call
    return rank.agreement


@pytest.mark.parametrize("is_last", [True, False])
def test_ranks_meet_once_at_the_stop_call(monkeypatch: pytest.MonkeyPatch, is_last: bool) -> None:
    rank = Rank(monkeypatch, Client({"arrived": 3 if is_last else 2}))
    agreement = stopped_at(rank, 3)
    assert [agreement.record_call() for _ in range(5)] == [False, False, True, True, True]
    told = ("set", "together" if is_last else "arrived/1", b"1")  # the others wait for nothing but the last one's word
    assert rank.client.log == [("add", "arrived"), told, ("wait", "together", 1.0)]


def test_ranks_that_do_not_come_to_the_stop_call_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client({"arrived": 1}, missing=("together", "arrived/0", "arrived/2")))
    with pytest.raises(ElasticAgreementTimeout) as caught:
        stopped_at(rank, 1).record_call()
    assert str(caught.value) == (
        "the ranks agreed to stop at call 1 of elastic_event_detected(), but ranks 0,2 did not make that call within 7 s; every rank "
        "must call it once per step"
    )


def test_a_watcher_that_died_holds_nobody_for_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client())
    rank.agreement._published = 1
    waits: list[float] = []
    monkeypatch.setattr(rank.agreement._changed, "wait_for", lambda _, limit_s: waits.append(limit_s))
    with pytest.raises(ElasticAgreementTimeout, match=r"^rank 1 did not learn the stop step within 7 s$"):
        rank.agreement.record_call()
    assert waits == [17.0]


NEVER_STOPS = str(2**63 - 1).encode()


@pytest.mark.parametrize("has_published", [True, False])
@pytest.mark.parametrize("hosts_store", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_rank_signs_off_and_the_host_of_the_store_leaves_last(
    monkeypatch: pytest.MonkeyPatch, hosts_store: bool, is_last: bool, has_published: bool
) -> None:
    """Who leaves without having published a call says for all that there is no stop; ranks of earlier versions read it too."""
    rank = Rank(monkeypatch, Client({"left": 3 if is_last else 1}), hosts_store=hosts_store)
    if has_published:
        rank.agreement._published = 5
    rank.agreement._listener = mock.Mock(is_alive=lambda: True)
    rank.agreement._watcher = mock.Mock()
    rank.agreement.close()
    last = [("set", "all-left", b"1")] if is_last else []
    waits = [("wait", "all-left", 5.0)] if hosts_store else []
    told = [] if has_published else [("set", "stop", NEVER_STOPS)]
    assert rank.client.log == [*told, ("set", "wake/1", b"closing"), ("add", "left"), *last, *waits]
    assert rank.limits == [2.0]
    assert rank.agreement._watcher.mock_calls == [mock.call.join(2.0)]
    assert rank.agreement._listener.mock_calls == [mock.call.join(2.0)]
    assert rank.agreement._wake.get_nowait() is None, "the watcher wakes to end"
    assert (rank.agreement._listening, rank.agreement._client) == (None, None)


@pytest.mark.parametrize(("is_listening", "has_client"), [(True, False), (False, True), (False, False)])
def test_who_has_no_connection_left_signs_off_nowhere(
    monkeypatch: pytest.MonkeyPatch, is_listening: bool, has_client: bool
) -> None:
    rank = Rank(monkeypatch, Client())
    rank.agreement._listener = mock.Mock(is_alive=lambda: is_listening)
    rank.agreement._watcher = mock.Mock()
    rank.agreement._client = rank.client if has_client else None  # type: ignore[assignment]
    rank.agreement.close()
    assert bool(rank.client.log) == (is_listening or has_client)
    assert rank.limits == ([] if has_client or not is_listening else [2.0])


def test_a_host_that_is_abandoned_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client(), hosts_store=True)
    rank.agreement._listener = mock.Mock(is_alive=lambda: True)
    rank.agreement._watcher = mock.Mock()
    joined: list[Any] = []

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            joined.append((self.daemon, timeout))
            super().join(None)

    monkeypatch.setattr(threading, "Thread", Thread)
    rank.agreement.close(is_abandoned=True)
    assert rank.client.log == [("set", "wake/1", b"closing"), ("add", "left"), ("set", "all-left", b"1")]
    assert joined == [(True, 2.0)]


def test_the_listener_waits_for_a_month_at_a_time_and_wakes_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client())
    waits = []

    def wait(key: str, timeout_s: float) -> None:
        waits.append((key, timeout_s))
        if len(waits) == 1:
            raise TimeoutError

    rank.agreement._listening = mock.Mock(wait=wait)
    rank.agreement._listen()
    assert waits == [("wake/1", 2592000.0)] * 2
    assert rank.agreement._woken_by_peer is True
    assert rank.agreement._wake.get_nowait() is None


@pytest.mark.parametrize("is_closing", [True, False])
def test_a_listener_without_a_store_or_at_the_end_wakes_nobody(
    monkeypatch: pytest.MonkeyPatch, is_closing: bool
) -> None:
    rank = Rank(monkeypatch, Client())
    rank.agreement._closing = is_closing
    store = rank.agreement._listening = mock.Mock(wait=mock.Mock(side_effect=ConnectionError))
    rank.agreement._listen()
    assert store.wait.call_count == (not is_closing)
    assert rank.agreement._woken_by_peer is False
    assert rank.agreement._wake.empty()


class Cut:
    """A client whose connection is gone."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("cut")


@pytest.mark.parametrize("reconnects", [True, False])
def test_a_listener_whose_connection_was_cut_reaches_a_store_that_outlives_it(
    monkeypatch: pytest.MonkeyPatch, reconnects: bool
) -> None:
    rank = Rank(monkeypatch, Client(), reconnects=reconnects)
    answers = iter((TimeoutError("the network is not back"), Cut(), rank.client))

    def connect(limit_s: float) -> Any:
        rank.limits.append(limit_s)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rank.agreement._connect = connect
    rank.agreement._listening = Cut()
    rank.agreement._listen()
    assert rank.agreement._woken_by_peer is reconnects
    assert rank.limits == ([2.0] * 3 if reconnects else [])
    assert rank.client.clock.now == pytest.approx(100.15 if reconnects else 100.0), "it does not ask without a pause"


def test_a_listener_whose_generation_is_over_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client(), reconnects=True)
    connect = rank.agreement._connect = mock.Mock(side_effect=ConnectionError("generation 1 is over"))
    rank.agreement._listening = Cut()
    rank.agreement._listen()
    assert rank.agreement._woken_by_peer is False
    assert connect.mock_calls == [mock.call(2.0)]


def test_a_connection_that_was_cut_unseen_is_found_before_anything_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client({"published": 2}), reconnects=True)
    connect = rank.agreement._connect = mock.Mock(side_effect=[Cut(), rank.client])
    assert rank.agreement._agree() == 12
    assert connect.mock_calls == [mock.call(30.0)] * 2
    assert [each[1] for each in rank.client.log if each[0] == "add"] == ["pending", "published"]


def test_both_threads_begin_with_the_connection_and_hold_up_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def thread(**options: Any) -> Any:
        made.append(mock.Mock(options=options))
        return made[-1]

    monkeypatch.setattr(threading, "Thread", thread)
    rank = Rank(monkeypatch, Client())
    assert [each.start.call_count for each in made] == [0, 0]
    rank.agreement.start()
    assert [each.start.call_count for each in made] == [1, 1]
    wanted = [(rank.agreement._listen, True), (rank.agreement._watch, True)]
    assert [(each.options["target"], each.options["daemon"]) for each in made] == wanted
    assert rank.limits == [30.0]
    listening: Any = rank.agreement._listening
    assert listening is rank.client


@pytest.mark.parametrize(
    ("outcome", "published", "answers"),
    [(4, None, [False, False]), (1, 1, [True, True]), (NEVER, 1, [False, False]), (NEVER, None, [False, False])],
)
def test_an_outcome_counts_from_what_was_published_on(
    monkeypatch: pytest.MonkeyPatch, outcome: int, published: int | None, answers: list[bool]
) -> None:
    rank = Rank(monkeypatch, Client())
    rank.agreement._client = rank.client  # type: ignore[assignment]
    rank.agreement._published = published
    rank.agreement._finish(outcome)
    assert rank.agreement._published == (published or NEVER)
    assert [rank.agreement.record_call() for _ in answers] == answers


def test_what_failed_fails_every_call_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Client())
    assert rank.agreement.record_call() is False
    rank.agreement.abandon()
    for _ in range(2):
        with pytest.raises(ElasticAgreementError, match=r"^the generation ended before the ranks agreed$"):
            rank.agreement.record_call()
    assert rank.agreement._closing is True


def test_a_store_out_of_reach_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ConnectionError("refused"), TimeoutError("refused")):
        rank = Rank(monkeypatch, Client())
        rank.agreement._connect = mock.Mock(side_effect=error)
        with pytest.raises(ElasticAgreementError) as caught:
            rank.agreement.start()
        assert (
            str(caught.value) == "rank 1 cannot reach the store through which the ranks agree on a stop step: refused"
        )
