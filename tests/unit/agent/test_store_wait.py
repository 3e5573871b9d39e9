"""Workers that come to the store before it listens."""

from __future__ import annotations

import importlib
import random
import socket
import sys
import threading
import time
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
from tests.patience import PATIENCE_S

from elastipod import store_wait
from elastipod_agent.fork_server import patient_store


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Host(threading.Thread):
    """Listens on a port after some refusals, and counts who comes."""

    def __init__(self, port: int, delay_s: float) -> None:
        super().__init__()
        self.num_connections = 0
        self.listened_at = 0.0
        self._server = socket.socket()
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._server.bind(("127.0.0.1", port))
        self._delay_s = delay_s

    def run(self) -> None:
        time.sleep(self._delay_s)
        self.listened_at = time.monotonic()
        self._server.listen()
        self._server.settimeout(PATIENCE_S)
        with self._server, self._server.accept()[0] as connection:
            self.num_connections += 1
            assert connection.recv(1) == b"", "nothing is said, and the connection is closed"


def test_a_client_is_made_as_soon_as_somebody_listens(port: int) -> None:
    host, made = _Host(port, delay_s=0.1), list[float]()
    host.start()
    store = patient_store.patient(lambda **_: made.append(time.monotonic()))
    store(host_name="127.0.0.1", port=port, is_master=False)
    host.join()
    assert len(made) == 1
    assert made[0] >= host.listened_at > 0
    assert host.num_connections == 1


def test_a_store_that_never_comes_is_left_to_torch(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_store, "LIMIT_S", 0.1)
    calls: list[dict[str, Any]] = []
    patient_store.patient(lambda **kwargs: calls.append(kwargs))(host_name="127.0.0.1", port=port, is_master=False)
    assert calls == [{"host_name": "127.0.0.1", "port": port, "is_master": False}]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"host_name": "127.0.0.1", "port": 1, "is_master": True}),
        (("127.0.0.1", 1, 2, True), {}),
        ((), {"host_name": "127.0.0.1", "port": None, "is_master": False}),
    ],
)
def test_hosts_and_calls_of_another_form_do_not_wait(
    args: tuple[Any, ...], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(patient_store, "wait_until_listening", lambda *where: waits.append(where))
    assert patient_store.patient(lambda *a, **k: (a, k))(*args, **kwargs) == (args, kwargs)
    assert waits == []


@pytest.mark.parametrize("world_size", [2, 64, 1024])
def test_many_ranks_ask_at_moments_of_their_own_and_no_oftener_than_a_few(world_size: int) -> None:
    """All begin at the same moment, as the workers of one start do."""
    moments: list[float] = []
    for rank in range(world_size):
        at = 0.0
        for pause_s in store_wait.pauses(world_size, random.Random(rank)):
            at += pause_s
            if at > 1.0:
                break
            moments.append(at)
    windows = Counter(int(at * 10) for at in moments)
    assert max(windows.values()) <= 1.4 * store_wait.PROBES_PER_S / 10
    assert len(set(moments)) == len(moments), "they do not ask together"
    assert len(moments) >= 3 * world_size, "nobody waits for as long as torch would"


def test_processes_that_were_forked_from_one_another_do_not_ask_together(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(2):
        random.seed(0)  # what a fork hands on
        begun = len(slept)
        clock = iter([0.0, 0.1, 0.2, 9.0])
        monkeypatch.setattr(time, "monotonic", lambda clock=clock: next(clock))
        store_wait.wait_until_listening("127.0.0.1", port, 1.0, 1024)
        assert len(slept) == begun + 2
    assert slept[:2] != slept[2:]


def test_a_name_without_an_address_does_not_raise() -> None:
    store_wait.wait_until_listening("no such host", 1, 0.05)


def test_torch_asks_in_the_form_that_is_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of torch's own call; a torch that calls otherwise would be slow again, and this test says so."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name

    waits: list[Any] = []
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        rendezvous, "TCPStore", patient_store.patient(lambda *args, **kwargs: made.append((args, kwargs)))
    )
    monkeypatch.setattr(patient_store, "wait_until_listening", lambda *where: waits.append(where[:2]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    for rank in (0, 1):
        _, *place = next(rendezvous.rendezvous(f"env://?rank={rank}&world_size=2"))
        assert place == [rank, 2]
    assert [args[3] if args else kwargs["is_master"] for args, kwargs in made] == [True, False]
    assert waits == [("127.0.0.1", port)]


def test_without_torch_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.rendezvous", raising=False)
    patient_store.install()
    other = ModuleType("torch.distributed.rendezvous")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    patient_store.install()
    assert not hasattr(other, "TCPStore")
