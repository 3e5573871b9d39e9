"""Workers and the part of an agent that serves their store, over real connections: who is served, and what ends a call."""

from __future__ import annotations

import http.client
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.agent_client import until
from tests.nonempty import every
from tests.patience import PATIENCE_S
from tests.unit.served_stores import KEY, ServedStore, served_store

from elastipod.agent_store import (
    AgentStore,
    ConnectionRefused,
    StoreCallRefused,
    StoreConnection,
    open_store,
    wait_for,
)
from elastipod.store_wire import HEADER, MAX_VALUE_BYTES, PATH, UPGRADE, Greeting, SealedSession, fields_of
from elastipod_agent.core import served_store as limits
from elastipod_agent.server import store_server

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def served() -> Iterator[ServedStore]:
    with served_store() as served:
        yield served


@contextmanager
def connected(served: ServedStore, generation: int = 1, rank: int = 0, key: str = KEY) -> Iterator[StoreConnection]:
    connection = open_store(served.address, Greeting(generation, rank), key, PATIENCE_S)
    try:
        yield connection
    finally:
        connection.close()


class Later:
    """A call in a thread of its own; `answer` waits for what it gives or raises."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._threads = ThreadPoolExecutor(1)
        self._future = self._threads.submit(call)

    @property
    def is_waiting(self) -> bool:
        return not self._future.done()

    def answer(self) -> Any:
        try:
            return self._future.result(PATIENCE_S)
        finally:
            self._threads.shutdown()


def waits(served: ServedStore, number: int = 1) -> None:
    """Return once so many calls wait at the store."""
    until(lambda: served.do(lambda: len(served.store._keys._waits)) == number, f"{number} calls that wait")


def test_workers_read_what_others_write_and_wait_for_what_is_not_there_yet(served: ServedStore) -> None:
    with connected(served) as first, connected(served, rank=1) as second:
        one, two = AgentStore(first, "a"), AgentStore(second, "a")
        one.set_many({f"k{number}": b"%d" % number for number in range(600)})
        assert two.get_many([f"k{number}" for number in (7, 599, 0)]) == [b"7", b"599", b"0"]
        assert (two.has("k1"), two.has("k600"), AgentStore(second, "b").has("k1")) == (True, False, False)
        assert (one.add("n", 2), two.add("n", 3)) == (2, 5)
        waiting = Later(lambda: two.wait("late", PATIENCE_S))
        waits(served)
        assert two.get("k5") == b"5", "another call of the same worker is not held up"
        one.set("late", b"")
        assert waiting.answer() is None
        with pytest.raises(TimeoutError, match="not everything that was waited for"):
            two.wait("never", 0.05)


def test_a_wait_that_is_longer_than_one_call_calls_again(served: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastipod.agent_store.MAX_WAIT_S", 0.02)
    with connected(served) as connection:
        store = AgentStore(connection, "a")
        waiting = Later(lambda: store.wait("late", PATIENCE_S))
        until(lambda: sum(name == "wait" for names in served.names.values() for name in names) >= 3, "further calls")
        store.set("late", b"1")
        assert waiting.answer() is None


def test_an_answer_that_does_not_come_ends_the_connection_though_another_thread_reads(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(served) as connection:
        reader = Later(lambda: connection.call(b"wait", b"60", b"never", wait_s=PATIENCE_S))
        waits(served)
        monkeypatch.setattr("elastipod.agent_store.ANSWER_S", 0.05)
        for each in (Later(lambda: connection.call(b"wait", b"60", b"not this one either")), reader):
            with pytest.raises(ConnectionError, match="is gone: it does not answer"):
                each.answer()


@pytest.mark.parametrize(
    ("soft", "hard", "num_ranks", "is_server", "then"),
    [
        pytest.param(1024, 4096, 1000, True, 2088, id="room for all ranks"),
        pytest.param(1024, resource.RLIM_INFINITY, 1000, True, 2088, id="no hard limit"),
        pytest.param(resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, True, None, id="no limit"),
        pytest.param(3000, 4096, 1000, True, None, id="there is room"),
        pytest.param(1024, 4096, 1000, False, None, id="another agent serves"),
        pytest.param(1024, 4096, 5000, True, 4096, id="as far as it goes"),
    ],
)
def test_an_agent_may_have_a_connection_open_for_each_rank(
    soft: int, hard: int, num_ranks: int, is_server: bool, then: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    with served_store(None) as served:
        served.begin(1, num_ranks, is_server=is_server)
    assert asked == ([] if then is None else [(then, hard)])
    told = "the store for 5000 ranks may need 6088 descriptors, and the hard limit is lower; raise it (ulimit -Hn)"
    assert served.warnings == ([told] if num_ranks == 5000 else [])


MEETS_WITH_FEW_DESCRIPTORS = """
import resource
from contextlib import ExitStack
from tests.patience import PATIENCE_S
from tests.unit.served_stores import KEY, served_store
from elastipod.agent_store import open_store
from elastipod.store_wire import Greeting
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with ExitStack() as stack:
    served = stack.enter_context(served_store(1, num_ranks=80))
    for rank in range(80):
        connection = open_store(served.address, Greeting(1, rank), KEY, PATIENCE_S)
        stack.callback(connection.close)
        (count,) = connection.call(b"add", b"n", b"1")
print(int(count))
"""


def test_more_ranks_than_descriptors_were_allowed_meet() -> None:
    command = [sys.executable, "-c", MEETS_WITH_FEW_DESCRIPTORS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout, done.stderr) == ("80\n", "")


@pytest.mark.slow
def test_ranks_that_all_come_at_once_are_all_served() -> None:
    """More than HTTP may have connections: who has been told to go on with the store is not turned away."""
    num_ranks = 300
    gate = threading.Barrier(num_ranks)

    def meet(address: str, rank: int) -> int:
        gate.wait(PATIENCE_S)
        with closing(open_store(address, Greeting(1, rank), KEY, PATIENCE_S, world_size=num_ranks)) as connection:
            (count,) = connection.call(b"add", b"arrived", b"1")
            if int(count) == num_ranks:
                connection.call(b"set", b"all", b"")
            wait_for(connection.call, b"wait", [b"all"], time.monotonic() + PATIENCE_S)
            return int(count)

    with served_store(1, num_ranks, max_connections=128) as served, ThreadPoolExecutor(num_ranks) as ranks:
        counts = list(ranks.map(partial(meet, served.address), range(num_ranks)))
    assert sorted(counts) == list(range(1, num_ranks + 1))


def test_a_connection_that_was_lost_is_opened_again_and_one_that_was_closed_is_not(served: ServedStore) -> None:
    with connected(served) as connection:
        assert connection.renewed(PATIENCE_S) is connection
        assert connection.call(b"count") == [b"0"]
        cut_all(served)
        with pytest.raises(ConnectionError, match="is gone"):
            connection.call(b"count")
        again = connection.renewed(PATIENCE_S)
        assert again is connection.renewed(PATIENCE_S) is not connection
        assert again.call(b"count") == [b"0"]
        cut_all(served)
        until(lambda: bool(raised(lambda: again.call(b"count"))), "the end of the second one")
        last = connection.renewed(PATIENCE_S)
        assert last.call(b"count") == [b"0"]
        connection.close("the generation is over")
        for call in (lambda: last.call(b"count"), lambda: connection.renewed(PATIENCE_S)):
            assert raised(call).endswith("is gone: the generation is over")


def cut_all(served: ServedStore) -> None:
    def cut() -> None:
        for each in served.store._connections.values():
            each._writer.transport.abort()

    served.do(cut)


def raised(call: Callable[[], object]) -> str:
    """Give the text of a ConnectionError; "" where there is none."""
    try:
        call()
    except ConnectionError as error:
        return str(error)
    return ""


def test_a_connection_that_is_closed_while_it_is_opened_again_stays_closed(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[StoreConnection] = []
    with connected(served) as connection:
        assert connection.call(b"count") == [b"0"]
        cut_all(served)
        until(lambda: bool(raised(lambda: connection.call(b"count"))), "the end")
        open_again = connection._open_again

        def open_slowly(limit_s: float) -> StoreConnection:
            opened.append(open_again(limit_s))
            connection.close("this rank has left its generation")
            return opened[0]

        monkeypatch.setattr(connection, "_open_again", open_slowly)
        assert raised(lambda: connection.renewed(PATIENCE_S))
        assert raised(lambda: opened[0].call(b"count"))


def test_a_generation_that_is_over_is_not_met_again(served: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(served) as connection:
        assert connection.call(b"count") == [b"0"]
        served.begin(2, 4)
        until(lambda: bool(raised(lambda: connection.call(b"count"))), "the end")
        monkeypatch.setattr(
            connection, "_open_again", None
        )  # all ranks have been told, and would come at the same time
        assert "generation 1 is over" in raised(lambda: connection.renewed(PATIENCE_S))


def test_a_generation_that_ended_while_the_network_was_away_is_not_met_again(served: ServedStore) -> None:
    with connected(served) as connection:
        assert connection.call(b"count") == [b"0"]
        cut_all(served)
        until(lambda: bool(raised(lambda: connection.call(b"count"))), "the end")
        served.begin(2, 4)
        with pytest.raises(ConnectionRefused, match="does not serve the store to this rank"):
            connection.renewed(PATIENCE_S)


def test_values_that_are_too_many_for_one_call_are_sent_with_several(served: ServedStore) -> None:
    large = {f"k{number}": b"x" * MAX_VALUE_BYTES for number in range(30)}
    with connected(served) as connection:
        store = AgentStore(connection, "a")
        store.set_many(large)
        assert store.get_many(list(large)) == list(large.values())
    assert served.names == {0: ["set"] * 5 + ["get"]}


END = {
    "another start": lambda served, connection: served.begin(2, 4),
    "a start with another rank": lambda served, connection: served.begin(2, 4, is_server=False),
    "a hard stop": lambda served, connection: served.end(),
    "the end of the agent": lambda served, connection: served.do(served.store.close),
    "the rank that leaves": lambda served, connection: connection.close(),
}


@pytest.mark.parametrize("end", END.values(), ids=END.keys())
def test_the_end_of_the_generation_ends_every_call(served: ServedStore, end: Callable[[Any, Any], None]) -> None:
    with connected(served) as connection:
        waiting = [Later(partial(AgentStore(connection, "a").wait, key, 1e6)) for key in ("x", "y")]
        waits(served, 2)
        end(served, connection)
        for each in waiting:
            with pytest.raises(ConnectionError, match="is gone"):
                each.answer()
        with pytest.raises(ConnectionError, match="is gone"):
            connection.call(b"count")
    until(lambda: served.do(lambda: (served.store._connections, served.store._keys._waits)) == ({}, {}), "no traces")


def test_nothing_of_a_generation_is_left_to_the_next_one(served: ServedStore) -> None:
    with connected(served) as connection:
        connection.call(b"set", b"k", b"1")
    served.begin(2, 4)
    with connected(served, generation=2) as connection:
        assert connection.call(b"count") == [b"0"]


def test_who_belongs_to_a_generation_that_is_over_is_refused_at_once(served: ServedStore) -> None:
    served.begin(3, 4)
    with pytest.raises(ConnectionRefused, match=r"generation 2 is over; this agent knows generation 3$"):
        open_store(served.address, Greeting(2, 0), KEY, PATIENCE_S)


def test_who_comes_before_the_start_waits_for_it() -> None:
    with (
        served_store(None) as served,
        connected(served, generation=5) as early,
        connected(served, generation=6) as stray,
    ):
        asked = Later(lambda: early.call(b"add", b"n", b"1", wait_s=PATIENCE_S))
        until(lambda: served.do(lambda: len(served.store._connections)) == 2, "both callers")
        assert asked.is_waiting
        served.begin(5, 2)
        assert asked.answer() == [b"1"]
        assert served.do(lambda: len(served.store._connections)) == 2, "the other one waits on"
        served.begin(6, 2, is_server=False)
        with pytest.raises(ConnectionError, match="the store of generation 6 is not served here"):
            stray.call(b"count")


def test_a_start_that_never_comes_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MAX_WAIT_S", 0.05)
    why = "the store of generation 5 is not served here"
    with (
        served_store(None) as served,
        connected(served, generation=5) as early,
        pytest.raises(ConnectionError, match=why),
    ):
        early.call(b"count")


def test_a_worker_without_the_key_is_told_nothing(served: ServedStore) -> None:
    with pytest.raises(ConnectionRefused, match="it does not have the key of this job"):
        open_store(served.address, Greeting(1, 0), "another key", PATIENCE_S)


def test_an_agent_without_a_key_serves_no_store() -> None:
    with served_store(key="") as served, pytest.raises(ConnectionRefused, match="it has no key of its job"):
        open_store(served.address, Greeting(1, 0), "", PATIENCE_S)


class Stranger:
    """A connection that a test makes by hand."""

    def __init__(self, served: ServedStore, **headers: str) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        self.greeting = Greeting(1, 0)
        told = {"Connection": "Upgrade", "Upgrade": UPGRADE, HEADER: self.greeting.header()} | headers
        self._http.request("GET", PATH, headers=told)
        self.answer = self._http.getresponse()
        self.socket: Any = self._http.sock

    def session(self, key: str) -> SealedSession:
        challenge = fields_of(self.answer.headers[HEADER])["challenge"]
        return SealedSession(key, self.greeting, challenge, is_agent=False)

    def close(self) -> None:
        if self.socket is not None:  # else it was turned away
            self.socket.close()
        self.answer.close()

    def is_hung_up(self) -> bool:
        """Read to the end, which must come."""
        with self.answer, self.socket:
            while self.socket.recv(4096):
                continue
        self._http.close()
        return True


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        pytest.param(lambda own, other: other.seal([]), "does not have the MAC", id="another key"),
        pytest.param(lambda own, other: b"\x00\x00\xff\xff", "65535 bytes; at most 256", id="a large first frame"),
        pytest.param(lambda own, other: 2 * own.seal([]), "is not the next one", id="repeated"),
        pytest.param(
            lambda own, other: own.seal([]) + own.seal([b"1", b"count"])[::-1], "at most 1048576 are taken", id="noise"
        ),
        pytest.param(lambda own, other: own.seal([]) + own.seal([b"1"]), "a number and a name", id="no call"),
    ],
)
def test_whoever_does_not_keep_to_the_protocol_is_hung_up_on(
    served: ServedStore, frames: Callable[[SealedSession, SealedSession], bytes], why: str
) -> None:
    stranger = Stranger(served)
    assert stranger.answer.status == 101
    stranger.socket.sendall(frames(stranger.session(KEY), stranger.session("another")))
    assert stranger.is_hung_up()
    assert why in "".join(served.refusals)
    with connected(served) as connection:
        assert connection.call(b"count") == [b"0"], "others are served"


def test_who_proves_nothing_in_time_is_hung_up_on(served: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "HANDSHAKE_S", 0.05)
    assert Stranger(served).is_hung_up()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"Upgrade": "websocket"}, 426, id="another protocol"),
        pytest.param({HEADER: "generation=1"}, 400, id="no challenge"),
        pytest.param({HEADER: Greeting(0, 0).header()}, 409, id="an older generation"),
    ],
)
def test_a_request_that_cannot_be_upgraded_is_answered(
    served: ServedStore, headers: dict[str, str], status: int
) -> None:
    stranger = Stranger(served, **headers)
    assert (stranger.answer.status, stranger.answer.headers["Connection"]) == (status, "close")
    assert "detail" in json.loads(stranger.answer.read())


def test_a_call_beyond_the_limits_fails_with_a_sentence_and_the_connection_stays(served: ServedStore) -> None:
    with connected(served) as connection:
        with pytest.raises(StoreCallRefused, match="refuses set: a key may have 1024 bytes and a value 65536"):
            connection.call(b"set", b"k", b"x" * (MAX_VALUE_BYTES + 1))
        assert connection.call(b"count") == [b"0"]


def test_workers_take_no_connection_from_the_operator_and_strangers_none_from_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HTTP has two connections here; each that a stranger opens may be closed for another, none of a worker is."""
    monkeypatch.setattr(limits, "NEWCOMERS", 1)
    with served_store(num_ranks=4, max_connections=2) as served:
        workers = [open_store(served.address, Greeting(1, rank), KEY, PATIENCE_S) for rank in range(4)]
        strangers = [Stranger(served) for _ in range(6)]
        asked = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        asked.request("GET", "/status")
        assert asked.getresponse().read() == b'{"path": "/status"}'
        assert every(worker.call(b"count") == [b"0"] for worker in workers)
        workers.append(open_store(served.address, Greeting(1, -1), KEY, PATIENCE_S))
        until(lambda: served.do(lambda: len(served.store._connections)) == 5, "all that there is room for")
        is_tired = iter((False, False, True))  # after two tries, however long they take
        with pytest.raises(TimeoutError, match="too many connections for the ranks"):
            open_store(served.address, Greeting(1, -1), KEY, PATIENCE_S, lambda: next(is_tired))
        for worker in workers:
            worker.close()
        asked.close()
        for stranger in strangers:
            stranger.close()


def test_a_forked_process_leaves_the_connection_of_its_parent_alone(served: ServedStore) -> None:
    with connected(served) as connection:
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            try:
                connection.call(b"count")
            except ConnectionError as error:
                os.write(writing, str(error).encode())
            connection.close()
            os._exit(0)
        os.close(writing)
        with open(reading) as told:
            assert told.read() == "a forked process does not use the store connection of its parent"
        os.waitpid(pid, 0)
        assert connection.call(b"count") == [b"0"]


def test_threads_share_a_connection(served: ServedStore) -> None:
    with connected(served) as connection:
        store = AgentStore(connection, "a")
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.extend(store.add("n", 1) for _ in range(50))) for _ in range(8)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert sorted(found) == list(range(1, 401))
