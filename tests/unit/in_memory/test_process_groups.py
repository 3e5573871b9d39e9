"""Ranks that meet at a store, one generation after the other: late ones, lost ones, failed tries, and what stays behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.agent_client import until
from tests.free_ports import free_port
from tests.nonempty import every
from tests.patience import PATIENCE_S
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks

from elastipod import group_release
from elastipod.in_memory import process_groups
from elastipod.in_memory.agent_link import WorldPlace
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import LIMITS, Phase
from elastipod.in_memory.process_groups import CONNECT_S, MAX_TRIES, TRY_S, ProcessGroups, _Wait, world_prefix
from elastipod.torch_compat import ends_groups_without_lock, gloo_backends


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks of a busy machine the time to connect."""
    monkeypatch.setattr(process_groups, "TRY_S", 20.0)
    monkeypatch.setattr(process_groups, "CONNECT_S", PATIENCE_S)


def place(rank: int, size: int, port: int, *, generation: int = 1) -> WorldPlace:
    return WorldPlace(generation, rank, size, "127.0.0.1", port)


def never() -> bool:
    return False


def sum_of(value: int) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total.item())


def timeout_s() -> float:
    """Give the limit of a collective of the default group."""
    group = dist.distributed_c10d._get_default_group()
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def store_timeout_s() -> float:
    """Give the limit of a rank that waits at the default group's store, as for the rank with which NCCL's first collective begins."""
    store: Any = dist.distributed_c10d._get_default_store()
    return float(store.timeout.total_seconds())


def verdict(port: int, number: int) -> str:
    """Give what the store of generation 1 says of a try; nothing when there was no such try."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    key = f"elastipod/world/1/try/{number}/verdict"
    return store.get(key).decode() if store.check([key]) else ""


def kept(groups: ProcessGroups) -> ProcessGroups:
    """Keep a process's groups to its end, and with them the store that it hosts."""
    _kept.append(groups)
    return groups


_kept: list[ProcessGroups] = []


class Flag:
    """Passes from one rank of a test to another."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def raise_(self) -> None:
        self._path.touch()

    def wait(self) -> None:
        until(self._path.exists, f"the other rank to pass {self._path.name}")


def test_a_rank_waits_for_all_others_of_its_generation(tmp_path: Path) -> None:
    """Also in a world of one, which needs no store of others."""
    port, late = free_port(), Flag(tmp_path / "late")

    def body(number: int) -> bool:
        groups = kept(ProcessGroups("gloo", timedelta(seconds=77)))
        groups.connect(place(number, 2, port), never)
        groups.begin_training()
        if number == 1:
            late.raise_()
        groups.await_all()
        has_come = (tmp_path / "late").exists()
        groups.leave()
        groups.connect_alone()
        groups.await_all()
        return has_come

    assert run_ranks(2, body) == [True, True]


def test_ranks_meet_in_one_generation_after_the_other_under_their_new_ranks(tmp_path: Path) -> None:
    port, port_of_second, came = free_port(), free_port(), Flag(tmp_path / "came")

    def body(number: int) -> Any:
        groups = ProcessGroups(None, timedelta(seconds=77))
        if number == 1:
            came.wait()  # only rank 0 hosts the store, so it is there
        assert dist.is_initialized() is False
        if number == 0:
            came.raise_()
        groups.connect(place(number, 3, port), never)
        found = [dist.get_rank(), dist.get_world_size(), dist.get_backend(), timeout_s()]
        groups.begin_training()
        found += [timeout_s(), store_timeout_s(), sum_of(10**number)]
        groups.leave()
        assert not dist.is_initialized()
        groups.leave()  # once more does no harm
        if number == 2:
            return found
        groups.connect(place(1 - number, 2, port_of_second, generation=2), never)
        return [*found, dist.get_rank(), dist.get_world_size(), sum_of(10**number)]

    def first(rank: int) -> list[Any]:
        return [rank, 3, "gloo", 20.0, 77.0, 77.0, 111]

    assert run_ranks(3, body) == [[*first(0), 1, 2, 11], [*first(1), 0, 2, 11], first(2)]


def test_a_generation_finds_nothing_of_another_one_at_the_same_store() -> None:
    """The store of the agent outlives generations."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def body(rank: int) -> Any:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        groups, sums = ProcessGroups("gloo", None), []
        for generation in (3, 4):
            groups.connect(place(rank, 2, port, generation=generation), never)
            sums.append(sum_of(generation + rank))
            groups.leave()
        return sums

    assert run_ranks(2, body) == [[7, 9]] * 2
    assert [store.check([f"elastipod/world/{number}/try/0/verdict"]) for number in (2, 3, 4)] == [False, True, True]
    assert store.check(["elastipod/world/3/try/1/arrived"]) is False


def test_the_store_stays_while_others_may_read_it(tmp_path: Path) -> None:
    port, left = free_port(), Flag(tmp_path / "left")

    def body(rank: int) -> Any:
        groups = kept(ProcessGroups("gloo", None))
        groups.connect(place(rank, 2, port), never)
        if rank == 0:
            groups.leave()
            left.raise_()
            return ""
        left.wait()
        return verdict(port, 0)

    assert run_ranks(2, body) == ["", "ok"]


def test_a_try_that_fails_on_one_rank_is_repeated_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    port, right = free_port(), dist.init_process_group

    def body(rank: int) -> Any:
        failures = ["connection reset\nby a test"] if rank == 1 else []

        def init(*arguments: Any, **options: Any) -> None:
            if failures:
                raise RuntimeError(failures.pop())
            right(*arguments, **options)

        monkeypatch.setattr(dist, "init_process_group", init)
        monkeypatch.setattr(process_groups, "TRY_S", 2.0)  # for which the others wait in vain
        monkeypatch.setattr(process_groups, "MAX_TRIES", 50)
        groups = kept(ProcessGroups("gloo", None))
        groups.connect(place(rank, 3, port), never)
        return [sum_of(1), verdict(port, 0)]

    assert run_ranks(3, body) == [[3, "failed"]] * 3


@pytest.mark.parametrize(("is_over_after", "tries"), [(99, MAX_TRIES), (1, 1)], ids=["to the last try", "it is over"])
def test_ranks_that_cannot_connect_give_up(monkeypatch: pytest.MonkeyPatch, is_over_after: int, tries: int) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        tried = []

        def init(*_: Any, **__: Any) -> None:
            tried.append(1)
            raise RuntimeError("no route\nfrom here")

        monkeypatch.setattr(dist, "init_process_group", init)
        groups = kept(ProcessGroups("gloo", None))
        said = raised_by(lambda: groups.connect(place(0, 1, port), lambda: len(tried) >= is_over_after))
        return [said, len(tried), [verdict(port, number) for number in range(6)]]

    text = "the 1 ranks of generation 1 could not connect: no route"
    assert run_ranks(1, body) == [[["WorldNotBuilt", text], tries, ["failed"] * tries + [""] * (6 - tries)]]


def test_ranks_whose_peer_does_not_come_give_up_when_the_generation_is_over() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        looks: list[int] = []

        def is_over() -> bool:
            looks.append(1)
            return len(looks) > 5

        return raised_by(lambda: ProcessGroups("gloo", None).connect(place(0, 2, port), is_over))

    text = "generation 1 cannot meet at its store: not all ranks have come (all-arrived)"
    assert run_ranks(1, body) == [["WorldNotBuilt", text]]


def test_a_rank_whose_process_still_starts_is_waited_for_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch takes a minute to import on a busy node that has not read it before, and minutes may lie between two nodes."""
    port = free_port()
    told: list[str] = []
    looks: list[int] = []

    @contextmanager
    def arriving() -> Iterator[None]:
        told.append("waits")
        monkeypatch.setattr(process_groups, "CONNECT_S", 0.0)
        yield
        monkeypatch.setattr(process_groups, "CONNECT_S", PATIENCE_S)
        told.append("all are there")

    def has_looked() -> bool:
        looks.append(1)
        if len(looks) == 9:
            (tmp_path / "waits for long").touch()
        return False

    def body(rank: int) -> Any:
        if rank == 1:
            until((tmp_path / "waits for long").exists, "the other rank to wait", PATIENCE_S)
        groups = kept(ProcessGroups("gloo", None))
        groups.connect(place(rank, 2, port), has_looked, arriving=arriving())
        return [told, sum_of(rank)]

    assert run_ranks(2, body) == [[["waits", "all are there"], 1]] * 2


def test_a_store_that_nobody_hosts_is_given_up_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "ARRIVAL_S", 0.3)
    monkeypatch.setattr(process_groups, "TRY_S", 2.0)
    port = free_port()

    def body(rank: int) -> Any:
        return raised_by(lambda: ProcessGroups("gloo", None).connect(place(1, 2, port), never))

    ((kind, text),) = run_ranks(1, body)
    assert kind == "WorldNotBuilt"
    assert text.startswith("generation 1 cannot meet at its store: ")
    assert text.count("\n") == 0


def test_a_host_waits_for_its_port_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever came to it before, such as another program on this host, may be ending; the other ranks wait for the store meanwhile."""
    port, waits = free_port(), list[float]()
    other = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            other.close()

    monkeypatch.setattr(process_groups, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    wait = _Wait(time.monotonic() + PATIENCE_S, never)
    store = process_groups._host_store(place(0, 2, port), wait)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert waits == [process_groups.LAST_POLL_S] * 3, "it does not try without a pause"
    (told,) = caplog.messages
    assert told.startswith("rank 0 cannot host the store yet, and tries for 60 s: ")
    assert str(port) in told


def test_a_host_that_does_not_get_its_port_gives_up_long_before_late_ranks_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_groups, "HOSTING_S", 0.3)
    port = free_port()
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
        kind, text = raised_by(lambda: ProcessGroups("gloo", None).connect(place(0, 2, port), never))
    assert kind == "WorldNotBuilt"
    assert text.startswith("generation 1 cannot meet at its store: ")
    assert str(port) in text


def test_no_client_of_torch_is_made_before_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait half a second before its second try, several times as long as a whole resize."""
    made: list[str] = []
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **_: made.append(args))
    monkeypatch.setattr(process_groups, "ARRIVAL_S", 0.3)
    kind, text = raised_by(lambda: ProcessGroups("gloo", None).connect(place(1, 2, free_port()), never))
    assert kind == "WorldNotBuilt"
    assert "nobody listens at 127.0.0.1:" in text
    assert made == []


class Store:
    """A store in which a key appears after a number of looks."""

    def __init__(self, looks: int) -> None:
        self.looks_left = looks
        self.written: list[tuple[str, str, str]] = []

    def check(self, keys: list[str]) -> bool:
        self.looks_left -= 1
        return self.looks_left < 0

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self.written.append((key, expected, value))

    def get(self, key: str) -> bytes:
        return b"ok"


class Clock:
    """A monotonic clock that only sleeping moves. sleeps: how long each was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []
        self.moments: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr("elastipod.in_memory.process_groups.time", clock)

    def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.moments.append(self.now)
        self.now += seconds


def test_a_key_is_looked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a rank is late by a small share of its wait, and looks no oftener in all the longer it waits."""
    clock = Clock(monkeypatch)
    began = clock.now
    assert _Wait(9e9, never).for_key(Store(500), "key") is True
    assert clock.sleeps[:20] == [0.002] * 20, "5 % of less than 40 ms is less than the shortest pause"
    late = [
        (sleep, moment)
        for sleep, moment in zip(clock.sleeps, clock.moments, strict=True)
        if 0.04 < moment - began < 3.9
    ]
    assert every(sleep == pytest.approx(0.05 * (moment - began)) for sleep, moment in late)
    assert max(clock.sleeps) == clock.sleeps[-1] == 0.2


def test_ranks_of_a_large_world_look_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert _Wait(9e9, never, world_size=500).for_key(Store(3), "key") is True
    assert clock.sleeps == [0.1, 0.1, 0.1]


class EndsLate:
    """A part of a group that takes its time to end. has_ended: it sets that when it has; may_end: it waits for that."""

    def __init__(self, has_ended: threading.Event, may_end: threading.Event) -> None:
        self._has_ended, self._may_end = has_ended, may_end

    def __del__(self) -> None:
        assert self._may_end.wait(PATIENCE_S)
        self._has_ended.set()


def ends_late() -> tuple[threading.Event, threading.Event]:
    """Release such a part; give its events."""
    events = threading.Event(), threading.Event()
    group_release.release_in_background([EndsLate(*events)])
    return events


def test_groups_end_beside_the_training_that_follows_them() -> None:
    """gloo takes tens of milliseconds to end a group."""
    has_ended, may_end = ends_late()
    assert not has_ended.is_set(), "it returned before the group has ended"
    may_end.set()
    group_release.wait_until_released()
    assert has_ended.is_set()


@pytest.mark.skipif(not ends_groups_without_lock(), reason="the rank waits first")
def test_a_world_is_built_while_groups_of_the_former_one_end_and_trains_when_they_have() -> None:
    has_ended, may_end = ends_late()
    groups = ProcessGroups("gloo", None)
    groups.connect(place(0, 1, free_port()), never)
    assert dist.is_initialized()
    assert not has_ended.is_set()
    threading.Timer(0.05, may_end.set).start()
    groups.await_former()
    assert has_ended.is_set()
    groups.leave()
    group_release.wait_until_released()


def test_connections_of_groups_that_still_end_are_none_of_the_new_world() -> None:
    ports = [free_port(), free_port()]

    def body(rank: int) -> Any:
        groups = kept(ProcessGroups("gloo", None))
        opened, ending = [], []
        for generation, port in enumerate(ports, start=1):
            groups.connect(place(rank, 2, port, generation=generation), never)
            assert groups._connections is not None
            opened.append(set(groups._connections._opened.values()))
            ending += gloo_backends()
            total = sum_of(rank)
            groups.leave()
        return [all(opened), len(opened[0] & opened[1]), total]

    assert run_ranks(2, body) == [[True, 0, 1]] * 2


def test_a_rank_that_cannot_connect_goes_back_before_the_limit_of_the_phase_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A peer was stopped, or its node was lost, after it had come to the store: all others hold a state that must not be lost."""
    monkeypatch.setattr(process_groups, "TRY_S", TRY_S)
    monkeypatch.setattr(process_groups, "CONNECT_S", CONNECT_S)
    port, is_over = free_port(), tmp_path / "over"

    def body(rank: int) -> Any:
        if rank == 1:
            wait = _Wait(time.monotonic() + PATIENCE_S, never)
            host = process_groups._store_of_host(place(rank, 2, port), wait)
            store = dist.PrefixStore(world_prefix(1), host)  # type: ignore[attr-defined]
            process_groups._arrive(store, place(rank, 2, port), wait)
            until(is_over.exists, "the other rank to give up", PATIENCE_S)
            return []
        said: list[str] = []
        limit = PhaseLimit(said.append)
        limit.enter(Phase.CONNECTING)
        groups = kept(ProcessGroups("gloo", None))
        raised = raised_by(lambda: groups.connect(place(rank, 2, port), never, arriving=limit.paused()))
        is_over.touch()
        limit.close()
        return [raised[0], said]

    assert run_ranks(2, body) == [["WorldNotBuilt", []], []]


def test_a_rank_whose_former_groups_do_not_end_is_ended_by_the_limit_of_its_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LIMITS, Phase.VERIFYING, timedelta(seconds=0.02))
    said: SimpleQueue[str] = SimpleQueue()
    limit = PhaseLimit(said.put)
    _, may_end = ends_late()
    limit.enter(Phase.VERIFYING)
    waiting = threading.Thread(target=ProcessGroups("gloo", None).await_former)
    waiting.start()
    assert said.get(timeout=PATIENCE_S).startswith(
        "this rank has been verifying for more than 0.02 s; its process ends"
    )
    may_end.set()
    waiting.join(PATIENCE_S)
    limit.close()


def test_what_is_released_is_gloos_part_of_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups themselves block with Python's lock held when they end with it, before torch 2.8."""
    released: list[Any] = []
    monkeypatch.setattr(process_groups, "release_in_background", released.extend)
    groups = ProcessGroups("gloo", None)
    groups.connect_alone()
    dist.new_group([0])
    groups.leave()
    assert [type(one) for one in released] == [dist.ProcessGroupGloo] * 2


def test_a_key_is_waited_for_until_the_limit_or_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert _Wait(200.0, never).for_key(Store(99_999), "key", 1.0) is False
    assert 101.0 <= clock.now <= 101.2
    assert _Wait(clock.now, never).is_at_end
    with pytest.raises(TimeoutError, match=r"not all ranks have come \(key\)"):
        _Wait(103.0, never).for_key(Store(99_999), "key", 50.0)
    assert 103.0 <= clock.now <= 103.2
    assert not _Wait(clock.now + 0.01, never).is_at_end
    assert _Wait(clock.now + 0.01, lambda: True).is_at_end


def test_one_wait_lasts_no_longer_than_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    lengths = [_Wait(100.0 + left, never).slice(2.0).total_seconds() for left in (9.0, 1.5, 0.01, -3.0)]
    assert lengths == [2.0, 1.5, 0.05, 0.05]


@pytest.mark.parametrize(
    ("looks", "written"), [(3, []), (10_000, [("verdict", "", "failed")])], ids=["it comes", "it does not come"]
)
def test_a_rank_that_waits_too_long_for_a_verdict_gives_it(
    monkeypatch: pytest.MonkeyPatch, looks: int, written: list[Any]
) -> None:
    clock, store = Clock(monkeypatch), Store(looks)
    monkeypatch.setattr(process_groups, "TRY_S", 2.0)
    assert process_groups._verdict(store, _Wait(200.0, never)) == "ok"
    assert store.written == written
    if written:
        assert 104.0 <= clock.now <= 104.2, "twice the time of a try"


# -- groups that a script makes ------------------------------------------------------------------------------------


def test_a_rank_in_a_group_of_the_script_is_freed_from_a_peer_that_stands_still(tmp_path: Path) -> None:
    """As one of the generation's own groups. What else the process has connected meanwhile stays open."""
    port, pid = free_port(), tmp_path / "pid"
    limit = timedelta(seconds=60)

    def body(rank: int) -> Any:
        before = dist.distributed_c10d._new_process_group_helper
        groups = kept(ProcessGroups(None, limit))
        groups.connect(place(rank, 2, port), never)
        groups.begin_training()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            own: Any = dist.new_group(timeout=limit)
            dist.all_reduce(torch.ones(1), group=own)
            if rank == 1:
                pid.with_suffix(".new").write_text(str(os.getpid()))
                pid.with_suffix(".new").rename(pid)
                os.kill(os.getpid(), signal.SIGSTOP)
                return []
            until(pid.exists, "the other rank")
            peer = psutil.Process(int(pid.read_text()))
            until(lambda: peer.status() == psutil.STATUS_STOPPED, "the other rank to stand still")
            work: Any = dist.all_reduce(torch.ones(1), group=own, async_op=True)
            with socket.create_connection(listener.getsockname()) as foreign, listener.accept()[0] as far:
                groups.abort()  # as when the agent ends the generation
                raised = raised_by(work.wait)
                foreign.sendall(b"x")
                peer.resume()
                groups.leave()
                is_as_before = dist.distributed_c10d._new_process_group_helper is before
                return [raised, far.recv(1).decode(), is_as_before]

    (((kind, text), foreign, is_as_before), _) = run_ranks(2, body)
    assert kind in ("RuntimeError", "DistNetworkError"), text
    assert "Timed out" not in text
    assert (foreign, is_as_before) == ("x", True)


def test_a_process_that_ends_leaves_its_groups_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit handlers run when the main thread counts as ended; a thread that they start could not come back into the interpreter."""
    held = [object()]
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    with mock.patch.object(threading, "Thread", side_effect=AssertionError):
        group_release.release_in_background(held)
    assert held, "their end could wait for a peer"
