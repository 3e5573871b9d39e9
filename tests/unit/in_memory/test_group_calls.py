"""What the groups of a generation are asked of torch, with which arguments, and which of them are taken down when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.agent_client import until

from elastipod.in_memory import process_groups
from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.phases import LIMITS, Phase
from elastipod.in_memory.process_groups import ProcessGroups, WorldNotBuilt, _first_line, _Wait

PLACE = WorldPlace(7, 1, 3, "10.0.0.9", 4321)
AN_HOUR = timedelta(hours=1)


class Store:
    """The store of a generation, in which all but this rank have done everything already."""

    def __init__(self, log: list[Any], prefix: str = "", values: dict[str, str] | None = None) -> None:
        self.log, self.prefix = log, prefix
        self.values: dict[str, str] = {} if values is None else values

    def below(self, prefix: str) -> Store:
        return Store(self.log, f"{self.prefix}{prefix}/", self.values)

    def add(self, key: str, number: int) -> int:
        self.log.append(f"add {self.prefix}{key} {number}")
        return 3

    def set(self, key: str, value: str) -> None:
        self.log.append(f"set {self.prefix}{key} {value}")
        self.values[self.prefix + key] = value

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self.log.append(f"set {self.prefix}{key} {expected!r} to {value}")
        self.values.setdefault(self.prefix + key, value)

    def check(self, keys: list[str]) -> bool:
        return all(self.prefix + key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[self.prefix + key].encode()

    def set_timeout(self, timeout: timedelta) -> None:
        self.log.append(("store.set_timeout", timeout))


class Torch:
    """What of torch.distributed builds a group. log: its calls, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.store = Store(self.log)
        self.is_initialized = False
        self.backend = "gloo"
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        monkeypatch.setattr(dist, "TCPStore", self._tcp_store)
        monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store.below(prefix))
        monkeypatch.setattr(dist, "init_process_group", self._init)
        monkeypatch.setattr(dist, "is_initialized", lambda: self.is_initialized)
        monkeypatch.setattr(dist, "get_backend", lambda: self.backend)
        monkeypatch.setattr(dist, "destroy_process_group", self._destroy)
        for name in (
            "abort_and_forget_groups",
            "abort_groups",
            "release_in_background",
            "number_groups_anew",
            "set_group_timeout",
            "wait_until_released",
        ):
            monkeypatch.setattr(process_groups, name, self._logs(name))
        monkeypatch.setattr(process_groups, "ends_groups_without_lock", lambda: True)
        monkeypatch.setattr(process_groups, "gloo_backends", lambda: ["backend"])
        monkeypatch.setattr(process_groups, "open_sockets", lambda: {4})
        self.connections = mock.Mock()
        monkeypatch.setattr(process_groups, "PeerConnections", self.connections)
        monkeypatch.setattr(process_groups, "wait_until_listening", self._listening)
        monkeypatch.setattr(process_groups, "time", SimpleNamespace(monotonic=lambda: 100.0))

    def _logs(self, name: str) -> Any:
        return lambda *arguments: self.log.append((name, *arguments))

    def _tcp_store(self, *arguments: Any, **options: Any) -> Store:
        self.log.append(("TCPStore", arguments, options))
        return self.store

    def _init(self, *arguments: Any, **options: Any) -> None:
        options["store"] = getattr(options["store"], "prefix", type(options["store"]).__name__)
        self.log.append(("init", arguments, options))
        self.is_initialized = True

    def _destroy(self) -> None:
        self.log.append("destroy")
        self.is_initialized = False
        raise RuntimeError("the group is broken")

    def _listening(self, *arguments: Any) -> bool:
        self.log.append(("listening", *arguments))
        return True


@pytest.fixture
def torch_(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    yield Torch(monkeypatch)
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):  # of an abort: other tests count timers
            timer.cancel()
            timer.join()


def tcp_store(**changes: Any) -> tuple[Any, ...]:
    options: dict[str, Any] = {
        "is_master": False, "timeout": timedelta(seconds=2), "wait_for_workers": False, "multi_tenant": True, **changes
    }  # fmt: skip
    return ("TCPStore", ("10.0.0.9", 4321), options)


TRY = "elastipod/world/7/try/0/"
MEETS = [
    "add elastipod/world/7/arrived 1", "set elastipod/world/7/all-arrived 1", f"add {TRY}arrived 1", f"set {TRY}all-arrived 1",
    ("number_groups_anew",),
    ("init", ("gloo",), {"store": TRY, "rank": 1, "world_size": 3, "timeout": timedelta(seconds=2)}),
    f"add {TRY}connected 1", f"set {TRY}verdict '' to ok",
    ("store.set_timeout", AN_HOUR),
]  # fmt: skip


def test_a_rank_meets_the_others_with_these_calls(torch_: Torch) -> None:
    """Its former groups may still end meanwhile, which takes as long as to connect; they have ended before it trains."""
    groups = ProcessGroups("gloo", AN_HOUR)
    groups.connect(PLACE, lambda: False)
    assert torch_.log == [("listening", "10.0.0.9", 4321, 2.0, 3), tcp_store(), *MEETS]
    assert torch_.connections.mock_calls == [mock.call({4}, 4321)]
    torch_.log.clear()
    groups.await_former()
    groups.begin_training()
    assert torch_.log == [("wait_until_released",), ("set_group_timeout", AN_HOUR)]


@pytest.mark.parametrize(
    ("backend", "without_lock", "waits_first"),
    [("gloo", True, False), ("gloo", False, True), ("cpu:gloo,cuda:nccl", True, True), ("mpi", True, True)],
)
def test_a_rank_connects_beside_its_former_groups_only_where_their_end_disturbs_nothing(
    monkeypatch: pytest.MonkeyPatch, torch_: Torch, backend: str, without_lock: bool, waits_first: bool
) -> None:
    """Before torch 2.8 a group ends with Python's lock held, and other backends have not been tried."""
    monkeypatch.setattr(process_groups, "ends_groups_without_lock", lambda: without_lock)
    ProcessGroups(backend, AN_HOUR).connect(PLACE, lambda: False)
    assert torch_.log.count(("wait_until_released",)) == waits_first
    assert (torch_.log[0] == ("wait_until_released",)) is waits_first


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 2), (600_000_000, 22), (1 << 40, 25)])
def test_peers_have_the_time_that_a_state_of_its_size_takes(torch_: Torch, num_bytes: int, seconds: int) -> None:
    """At most less than the limits of the phases, so that who waits for a peer that hangs is not ended in its place."""
    ProcessGroups("gloo", AN_HOUR).allow_for(num_bytes)
    assert torch_.log == [("set_group_timeout", timedelta(seconds=seconds))]
    for phase in (Phase.FILLING, Phase.VERIFYING):
        limit = LIMITS[phase]
        assert limit is not None
        assert timedelta(seconds=seconds) < limit


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 3600), (30_000_000 * 4000, 4002)])
def test_a_load_has_the_time_of_the_scripts_own_collectives_and_that_of_its_size(
    torch_: Torch, num_bytes: int, seconds: int
) -> None:
    """A script may set a short limit to find peers that hang; a large state takes longer than that."""
    ProcessGroups("gloo", AN_HOUR).allow_for_load(num_bytes)
    assert torch_.log == [("set_group_timeout", timedelta(seconds=seconds))]


@pytest.mark.parametrize(("agent_store", "is_host"), [("", True), ("True", False)])
def test_rank_0_hosts_the_store_unless_the_agent_does(
    torch_: Torch, monkeypatch: pytest.MonkeyPatch, agent_store: str, is_host: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)
    ProcessGroups("gloo", AN_HOUR).connect(WorldPlace(7, 0, 3, "10.0.0.9", 4321), lambda: False)
    looks = [("listening", "10.0.0.9", 4321, 2.0, 3)]
    assert torch_.log[: len(looks) + 1] == (
        [tcp_store(is_master=True), torch_.log[1]] if is_host else [*looks, tcp_store()]
    )


def test_a_store_that_takes_nobody_yet_is_tried_again(torch_: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def tcp_store_of_a_late_host(*_: Any, **__: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("reset by peer")
        return torch_.store

    monkeypatch.setattr(dist, "TCPStore", tcp_store_of_a_late_host)
    ProcessGroups("gloo", AN_HOUR).connect(PLACE, lambda: False)
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(WorldNotBuilt, match=r"^generation 7 cannot meet at its store: reset by peer$"):
        ProcessGroups("gloo", AN_HOUR).connect(PLACE, lambda: len(tries) == 1)
    assert len(tries) == 1


def test_a_generation_that_ended_while_its_ranks_connected_is_aborted_at_once(torch_: Torch) -> None:
    is_over = mock.Mock(side_effect=[True])
    ProcessGroups("gloo", AN_HOUR).connect(PLACE, is_over)
    assert torch_.connections.return_value.mock_calls == [mock.call.end_reading()]


def test_the_first_verdict_on_a_try_counts_for_this_rank_too(torch_: Torch) -> None:
    torch_.store.values[f"{TRY}verdict"] = "failed"
    ProcessGroups("gloo", AN_HOUR).connect(PLACE, lambda: False)
    again = [str(each).replace("try/0", "try/1") for each in MEETS[2:]]
    assert [str(each) for each in torch_.log[2:]] == [
        *map(str, MEETS[:-1]), "destroy", "('release_in_background', ['backend'])", *again
    ]  # fmt: skip


def test_a_single_process_has_a_group_of_its_own(torch_: Torch) -> None:
    ProcessGroups("gloo", AN_HOUR).connect_alone()
    assert torch_.log == [("init", ("gloo",), {"store": "HashStore", "rank": 0, "world_size": 1, "timeout": AN_HOUR})]


@pytest.mark.parametrize(
    ("has_cuda", "wanted", "backend"),
    [
        (True, None, "cpu:gloo,cuda:nccl"),
        (False, None, "gloo"),
        (True, "mpi", "mpi"),
        (True, "nccl", "cpu:gloo,cuda:nccl"),
        (True, "cuda:nccl", "cpu:gloo,cuda:nccl"),
        (True, "cuda:nccl,cpu:gloo", "cuda:nccl,cpu:gloo"),
        (True, "xccl", "cpu:gloo,xpu:xccl"),
        (True, "of-a-vendor", "of-a-vendor"),
    ],
)
def test_the_backend_is_that_of_the_machine_unless_another_is_wanted(
    monkeypatch: pytest.MonkeyPatch, torch_: Torch, has_cuda: bool, wanted: str | None, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    ProcessGroups(wanted, None).connect_alone()
    ((_, arguments, options),) = torch_.log
    assert arguments == (backend,)
    assert options["timeout"] == dist.distributed_c10d.default_pg_timeout


def test_what_is_published_is_in_the_store_of_the_generation_as_long_as_there_is_one(torch_: Torch) -> None:
    groups = ProcessGroups("gloo", AN_HOUR)
    groups.publish("donors", "1")
    assert torch_.log == [], "there is none yet"
    groups.connect(PLACE, lambda: False)
    groups.publish("donors", "2")
    assert torch_.store.values["elastipod/world/7/donors"] == "2"
    with mock.patch.object(Store, "set", side_effect=RuntimeError("broken pipe")):
        groups.publish("donors", "3")
    groups.leave()
    groups.publish("donors", "4")
    assert torch_.store.values["elastipod/world/7/donors"] == "2"


@pytest.mark.parametrize("how", ["the next world", "for good", "after a while"])
def test_connections_that_have_ended_are_closed_when_no_peer_writes_any_more_or_all_are_to_see_it(
    torch_: Torch, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "after a while":
        monkeypatch.setattr(process_groups, "CLOSE_AFTER_S", 0.2)
    groups = ProcessGroups("gloo", AN_HOUR)
    groups.connect(PLACE, lambda: False)
    connections = torch_.connections.return_value
    groups.abort()
    groups.leave()
    assert connections.mock_calls == [mock.call.end_reading()], "a peer may still write"
    if how == "after a while":
        until(lambda: connections.close.called, "the connections to close")
        return
    for _ in range(2):
        groups.connect(PLACE, lambda: False) if how == "the next world" else groups.close(has_finished=True)
        assert connections.mock_calls == [mock.call.end_reading(), mock.call.close()]


@pytest.mark.parametrize("has_finished", [True, False])
def test_a_process_that_ends_frees_itself_without_a_thread(torch_: Torch, has_finished: bool) -> None:
    """The interpreter may be ending, and a thread that is started then is waited for in vain."""
    groups = ProcessGroups("gloo", AN_HOUR)
    groups.connect(PLACE, lambda: False)
    with mock.patch.object(threading, "Timer", side_effect=AssertionError):
        groups.close(has_finished=has_finished)
    ended = [] if has_finished else [mock.call.end_reading(), mock.call.close()]
    assert torch_.connections.return_value.mock_calls == ended


@pytest.mark.parametrize(("backend", "aborts"), [("gloo", []), ("nccl", [("abort_groups",)])])
def test_an_abort_and_a_leave_end_what_the_backend_has(torch_: Torch, backend: str, aborts: list[Any]) -> None:
    groups = ProcessGroups(backend, AN_HOUR)
    groups.connect(PLACE, lambda: False)
    torch_.backend = backend
    torch_.log.clear()
    groups.abort_queued()
    assert torch_.log == aborts
    assert torch_.connections.return_value.mock_calls == [], "a peer may still be reading"
    torch_.log.clear()
    groups.abort()
    assert torch_.log == aborts
    groups.abort()
    assert torch_.connections.return_value.mock_calls == [mock.call.end_reading()], "once"
    torch_.log.clear()
    groups.leave()
    forgets = [("abort_and_forget_groups",)] if aborts else []
    assert torch_.log == [*forgets, "destroy", ("release_in_background", ["backend"])]
    torch_.log.clear()
    groups.leave()
    groups.abort()
    assert torch_.log == [], "nothing is left"


@pytest.mark.parametrize("can_abort", [True, False], ids=["torch 2.6", "torch 2.4"])
@pytest.mark.parametrize(
    ("backend", "needs_abort"), [("gloo", False), ("cpu:gloo", False), ("nccl", True), ("cpu:gloo,cuda:nccl", True)]
)
def test_groups_that_only_an_abort_ends_need_a_torch_that_has_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, needs_abort: bool, can_abort: bool
) -> None:
    monkeypatch.setattr(process_groups, "can_abort_groups", lambda: can_abort)
    monkeypatch.setattr(process_groups, "with_host", lambda backend: backend)
    said = f"torch {torch.__version__} cannot abort process groups of {backend}, as torch 2.6 and newer can"
    assert ProcessGroups(backend, AN_HOUR).reason_to_end == (said if needs_abort and not can_abort else "")


def test_connections_that_a_mesh_opens_end_too(torch_: Torch) -> None:
    groups = ProcessGroups("gloo", AN_HOUR)
    with groups._opening():  # of a single process, which has no peers
        pass
    groups.connect(PLACE, lambda: False)
    with groups._opening():
        torch_.log.append("opened")
    assert torch_.connections.return_value.mock_calls == [mock.call.add_opened_since({4})]
    groups.leave()
    groups.abort()
    assert torch_.connections.return_value.mock_calls == [mock.call.add_opened_since({4})], (
        "a peer may still be reading"
    )


def test_a_former_store_stays_until_the_next_world_is_built(torch_: Torch) -> None:
    groups = ProcessGroups("gloo", AN_HOUR)
    groups.connect(PLACE, lambda: False)
    hosted = groups._store
    groups.leave()
    assert (groups._store, groups._former_store) == (None, hosted)
    groups.leave()
    assert groups._former_store is hosted
    groups.connect(PLACE, lambda: False)
    assert groups._former_store is None


def test_a_wait_looks_every_two_milliseconds_at_most_and_5000_times_a_second_in_all(torch_: Torch) -> None:
    looks = [_Wait(200.0, lambda: False, size)._shortest_s for size in (1, 10, 100, 1000)]
    assert looks == [0.002, 0.002, 0.02, 0.2]
    assert _Wait(200.0, lambda: False)._shortest_s == 0.002
    assert _Wait(100.0, lambda: False).is_at_end, "at the deadline, not after it"


@pytest.mark.parametrize(
    ("error", "line"),
    [(RuntimeError("one\ntwo"), "one"), (TimeoutError(), "TimeoutError"), (ValueError(""), "ValueError")],
)
def test_of_an_error_its_first_line_is_told(error: Exception, line: str) -> None:
    assert _first_line(error) == line
