"""With which arguments this process reaches its store, its agreement and its worker file, and what its environment says of it."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from elastipod import elastic_event, progress
from elastipod.errors import ElasticAgreementError
from elastipod.in_memory.agent_link import WorldPlace
from elastipod.stores import TorchStore

PLACE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have nothing of a launcher in the environment."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ELASTIPOD_GENERATION", "TORCHELASTIC_USE_AGENT_STORE")
    for name in (*names, elastic_event.COORDINATION_ENV, elastic_event.TIMEOUT_ENV):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


class Ranks:
    """A process group of some ranks, and what the agreement among them is made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rank: int = 1, world_size: int = 3) -> None:
        self.agreement, self.store = mock.Mock(), mock.Mock()
        self.group = mock.Mock()
        self.group.get_rank.return_value, self.group.get_world_size.return_value = rank, world_size
        monkeypatch.setitem(sys.modules, "torch.distributed", self.group)
        monkeypatch.setattr(elastic_event, "Agreement", self.agreement)
        monkeypatch.setattr(elastic_event, "TorchStore", self.store)
        monkeypatch.setattr(elastic_event, "store_generation", lambda: 6)
        for name, value in PLACE.items():
            monkeypatch.setenv(name, value)


def is_pending() -> bool:
    return False


@pytest.mark.parametrize(
    ("rank", "agent_store", "hosts_store"), [(1, "", False), (0, "", True), (0, "True", False), (0, "other", True)]
)
def test_ranks_agree_below_a_prefix_of_their_generation(
    bare: pytest.MonkeyPatch, rank: int, agent_store: str, hosts_store: bool
) -> None:
    ranks = Ranks(bare, rank=rank)
    bare.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)
    assert elastic_event._start_agreement(is_pending) == ranks.agreement.return_value
    options = dict(ranks.agreement.mock_calls[0].kwargs)
    connect = options.pop("connect")
    assert options == {
        "rank": rank, "world_size": 3, "is_pending": is_pending, "timeout_s": 300.0, "hosts_store": hosts_store, "reconnects": False
    }  # fmt: skip
    assert ranks.agreement.return_value.mock_calls == [mock.call.start()]
    assert connect(4.5) is ranks.store.return_value
    assert ranks.store.mock_calls == [mock.call("10.0.0.1", 29500, "elastipod/event/6", 4.5, keep_server=hosts_store)]


def test_ranks_whose_store_an_agent_serves_meet_there_over_a_connection_that_works(bare: pytest.MonkeyPatch) -> None:
    ranks, served = Ranks(bare, rank=0), mock.Mock()
    bare.setattr(elastic_event, "meeting_place", lambda: served)
    elastic_event._start_agreement(is_pending)
    options = ranks.agreement.mock_calls[0].kwargs
    assert (options["hosts_store"], options["reconnects"]) == (False, True)
    assert served.mock_calls == [], "nothing is opened before it is needed"
    options["connect"](4.5).set("k", b"v")
    assert served.mock_calls[:2] == [
        mock.call.renewed(4.5),
        mock.call.renewed().call(b"set", b"elastipod/event/6/k", b"v"),
    ]


def test_how_long_ranks_wait_for_one_another_can_be_set(bare: pytest.MonkeyPatch) -> None:
    ranks = Ranks(bare)
    bare.setenv(elastic_event.TIMEOUT_ENV, "12.5")
    elastic_event._start_agreement(is_pending)
    assert ranks.agreement.mock_calls[0].kwargs["timeout_s"] == 12.5


def test_a_time_that_is_no_number_is_named(bare: pytest.MonkeyPatch) -> None:
    Ranks(bare)
    bare.setenv(elastic_event.TIMEOUT_ENV, "abc")
    with pytest.raises(ValueError, match=r"^ELASTIPOD_AGREEMENT_TIMEOUT_S is 'abc'; it must be a number$"):
        elastic_event._start_agreement(is_pending)


@pytest.mark.parametrize("why", ["disabled", "alone", "no torch", "not available", "no group"])
def test_who_has_nobody_to_agree_with_makes_no_agreement(bare: pytest.MonkeyPatch, why: str) -> None:
    ranks = Ranks(bare, world_size=1 if why == "alone" else 2)
    if why == "disabled":
        bare.setenv(elastic_event.COORDINATION_ENV, " Disabled ")
    if why == "no torch":
        bare.delitem(sys.modules, "torch.distributed")
    ranks.group.is_available.return_value = why != "not available"
    ranks.group.is_initialized.return_value = why != "no group"
    assert elastic_event._start_agreement(is_pending) is None
    assert ranks.agreement.mock_calls == []


@pytest.mark.parametrize("name", list(PLACE))
def test_a_rank_that_does_not_know_where_to_meet_says_what_sets_it(bare: pytest.MonkeyPatch, name: str) -> None:
    Ranks(bare)
    bare.delenv(name)
    with pytest.raises(ElasticAgreementError) as caught:
        elastic_event._start_agreement(is_pending)
    assert str(caught.value) == (
        "elastic_event_detected() reaches the other ranks through MASTER_ADDR and MASTER_PORT, which are not set; start the script "
        "with hyperpodrun or torchrun, or set HYPERPOD_SIGNAL_COORDINATION=disabled"
    )


@pytest.mark.parametrize("value", ["", "enabled"])
def test_ranks_agree_unless_that_is_disabled(bare: pytest.MonkeyPatch, value: str) -> None:
    bare.setenv(elastic_event.COORDINATION_ENV, value)
    assert elastic_event._coordinated() is True


@pytest.mark.parametrize("keeps", [True, False])
def test_a_store_is_a_connection_of_its_own_and_hosted_only_where_its_server_is(
    bare: pytest.MonkeyPatch, keeps: bool
) -> None:
    made = mock.Mock()
    bare.setattr(dist, "TCPStore", made)
    store = TorchStore("10.0.0.1", 29500, "a/b", 4.5, keep_server=keeps)
    timeout = timedelta(seconds=4.5)
    host = {"is_master": True, "timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
    assert made.mock_calls == [
        mock.call("10.0.0.1", 29500, **(host if keeps else {"is_master": False, "timeout": timeout}))
    ]
    made.return_value.check.return_value = False
    store.set("k", b"v")
    store.set_many({"k": b"1", "l": b"2"})
    store.wait("k", 2.5)
    told = made.return_value
    assert store.get("k") is told.get.return_value
    assert store.add("k", 3) is told.add.return_value
    assert store.has("k") is False
    assert store.get_many(["k", "l"]) is told.multi_get.return_value
    assert told.mock_calls == [
        mock.call.set("a/b/k", "v"),
        mock.call.multi_set(["a/b/k", "a/b/l"], ["1", "2"]),
        mock.call.wait(["a/b/k"], timedelta(seconds=2.5)),
        mock.call.get("a/b/k"),
        mock.call.add("a/b/k", 3),
        mock.call.check(["a/b/k"]),
        mock.call.multi_get(["a/b/k", "a/b/l"]),
    ]


def test_a_store_hosts_no_server_unless_asked_to(bare: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    bare.setattr(dist, "TCPStore", made)
    TorchStore("10.0.0.1", 29500, "a", 1.0)
    assert made.mock_calls == [mock.call("10.0.0.1", 29500, is_master=False, timeout=timedelta(seconds=1))]


CALLS = {
    "set": ("k", b"v"), "get": ("k",), "add": ("k", 1), "has": ("k",), "set_many": ({"k": b"v"},), "get_many": (["k"],), "wait": ("k", 1.0)
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("raised", "kind"),
    [(dist.DistStoreError("too late"), TimeoutError), (dist.DistNetworkError("gone"), ConnectionError)],
)
def test_errors_of_a_store_say_whether_it_is_late_or_gone(
    bare: pytest.MonkeyPatch, name: str, raised: Exception, kind: type[Exception]
) -> None:
    fails = mock.Mock(side_effect=raised)
    names = ("set", "get", "add", "check", "multi_set", "multi_get", "wait")
    bare.setattr(dist, "TCPStore", lambda *_, **__: SimpleNamespace(**dict.fromkeys(names, fails)))
    store = TorchStore("10.0.0.1", 29500, "a", 1.0)
    with pytest.raises(kind, match=f"^{raised}$"):
        getattr(store, name)(*CALLS[name])
    bare.setattr(dist, "TCPStore", fails)
    with pytest.raises(kind, match=f"^{raised}$"):
        TorchStore("10.0.0.1", 29500, "a", 1.0)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (PLACE, None),
        ({"RANK": "0"}, None),
        ({**PLACE, "RANK": "-1"}, None),
        ({**PLACE, "RANK": "0"}, WorldPlace(6, 0, 1, "10.0.0.1", 29500)),
        ({**PLACE, "RANK": "2", "WORLD_SIZE": "5"}, WorldPlace(6, 2, 5, "10.0.0.1", 29500)),
    ],
)
def test_a_launcher_gives_the_place_of_a_rank(
    bare: pytest.MonkeyPatch, environment: dict[str, str], place: WorldPlace | None
) -> None:
    bare.setattr("elastipod.in_memory.agent_link.store_generation", lambda: 6)
    for name, value in environment.items():
        bare.setenv(name, value)
    assert WorldPlace.from_env() == place


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_of_the_launcher_that_is_no_number_is_named(bare: pytest.MonkeyPatch, name: str) -> None:
    for each, value in {**PLACE, "RANK": "0", name: "two"}.items():
        bare.setenv(each, value)
    with pytest.raises(ValueError, match=f"^{name} is 'two'; it must be a whole number$"):
        WorldPlace.from_env()
    bare.setenv(name, "3")
    bare.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match=r"^MASTER_PORT is not set; it must be a whole number$"):
        WorldPlace.from_env()


def test_a_report_reaches_the_file_of_this_worker_whole(bare: pytest.MonkeyPatch) -> None:
    worker: Any = mock.Mock(local_rank=3)
    bare.setattr(progress, "local_worker", lambda: worker)
    progress.report(5, 40)
    bare.setenv("WORLD_SIZE", "8")
    progress.report(6, 48, 0.5, 12.0, 99)
    nothing = {"loss": None, "samples_per_s": None, "total_steps": None}
    assert worker.file.report.mock_calls == [
        mock.call(3, step=5, samples=40, world_size=1, **nothing),
        mock.call(3, step=6, samples=48, loss=0.5, samples_per_s=12.0, world_size=8, total_steps=99),
    ]
    bare.setattr(progress, "local_worker", lambda: None)
    progress.report(7, 56)
    assert worker.file.report.call_count == 2
