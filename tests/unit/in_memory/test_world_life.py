"""The worlds of one rank: the order in which it joins one and leaves one, without other ranks."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from tests.patience import PATIENCE_S
from tests.unit.in_memory.forked_ranks import run_ranks

from elastipod import chaos
from elastipod.data import ElasticBatches
from elastipod.in_memory import world_life
from elastipod.in_memory.agent_link import AgentLink, WorldPlace
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.offer_wire import RankData, RankOffer
from elastipod.in_memory.offers import Offer
from elastipod.in_memory.process_groups import ProcessGroups, is_group_of_state
from elastipod.in_memory.world_life import SINGLE, WorldLife

PLAN = ElasticBatches(dataset_size=48, global_batch=12, seed=1)
PLACE = WorldPlace(4, 1, 3, "10.0.0.1", 29500)
OFFERED = RankData("a plan")


class Rank:
    """One rank; `calls` are those of all that its world consists of, in order."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        kind: str = "replicated",
        has_link: bool = True,
        has_durable: bool = True,
        wrap: Any = None,
    ) -> None:
        self.parts = mock.MagicMock()
        self.memory, self.groups, self.link = self.parts.memory, self.parts.groups, self.parts.link
        self.memory.kind = kind
        self.memory.rank.completed = 6
        self.memory.exchange_offers.return_value = [RankOffer(Offer(), 0)] * 3
        self.memory.begin_filling.return_value.step = 7
        self.memory.donor_of.return_value = 1
        self.link.park.return_value = PLACE
        self.link.is_kept = True
        durable = self.parts.durable if has_durable else None
        monkeypatch.setattr(AgentLink, "connect", lambda: self.link if has_link else None)
        self.reached: list[Any] = []
        monkeypatch.setattr(chaos, "reached", lambda moment, **at: self.reached.append((moment, at)))
        monkeypatch.setattr(world_life, "text_of", self._text_of)
        self.offered: list[Any] = []
        monkeypatch.setattr(world_life, "offered_data", self._offered_data)
        self.life = WorldLife(self.memory, self.parts.limit, self.groups, wrap, durable)
        self.life.plan = PLAN
        self.told: list[Any] = []

    def _offered_data(self, *given: Any) -> RankData:
        self.offered.append(given)
        return OFFERED

    def _text_of(self, donor: int, own: str | None) -> str:
        self.told.append((donor, own))
        return own or '{"epoch": 0}'

    def names(self) -> list[str]:
        """Give the calls by name, without those that only look."""
        return [
            name
            for name, _, _ in self.parts.mock_calls
            if not name.endswith(("__", "resumed", "parameters", "modules"))
        ]


class Position:
    """A plan that was resumed."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self, step: int) -> Any:
        return {"at": step}


def resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ElasticBatches, "state_dict", lambda self, step: {"at": step})
    monkeypatch.setattr(ElasticBatches, "resumed", lambda self, state: Position(state))


def position(rank: Rank) -> Any:
    found: Any = rank.life.plan
    return found.state


def test_a_rank_joins_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    before = rank.parts.before
    rank.life.is_loaded = True
    rank.life.join(PLAN, before)
    wanted = [
        "memory.rest", "memory.following.begin", "link.park", "memory.finish_following", "memory.rank.assigned", "memory.move",
        "link.watch", "limit.paused", "groups.connect", "memory.rank.connected", "memory.move", "memory.exchange_offers",
        "memory.begin_filling", "groups.allow_for", "memory.build_mesh", "memory.build", "memory.fill", "memory.donor_of",
        "memory.finish_filling", "before", "groups.await_former", "memory.verify", "memory.rank.verified", "memory.move",
        "groups.begin_training", "memory.following.listen",
    ]  # fmt: skip
    assert rank.names() == wanted
    assert rank.memory.following.listen.mock_calls == [mock.call(PLACE, rank.groups.publish)]
    offers = rank.memory.exchange_offers.return_value
    resume = rank.memory.begin_filling.return_value
    assert rank.link.park.mock_calls == [mock.call()]
    assert rank.memory.rank.assigned.mock_calls == [mock.call(4)]
    ((generation, free),) = (call.args for call in rank.link.watch.mock_calls)
    assert generation == 4
    with mock.patch.object(world_life, "abandon_elastic_event") as abandon:
        rank.groups.abort.side_effect = lambda: told.append(rank.life.is_aborted)
        told: list[bool] = []
        free()
    assert (told, abandon.call_count) == ([False], 1), "not before nothing waits any more"
    assert rank.life.is_aborted
    states = [rank.memory.rank.assigned, rank.memory.rank.connected, rank.memory.rank.verified]
    assert rank.memory.move.mock_calls == [mock.call(each.return_value) for each in states]
    assert rank.memory.begin_filling.mock_calls[0] == mock.call(offers, 1)
    assert rank.groups.allow_for.mock_calls == [mock.call(rank.memory.members.num_bytes)]
    assert rank.memory.build_mesh.mock_calls == [mock.call(3)]
    assert rank.memory.fill.mock_calls == [mock.call(resume, [RankOffer(Offer(), 0)] * 3, rank.parts.limit.progress)]
    assert rank.memory.verify.mock_calls == [mock.call(1)]
    assert (rank.life.place, rank.life.donor, rank.life.is_loaded) == (PLACE, 1, False)
    moments = [chaos.Moment.CONNECTING, chaos.Moment.AGREEING, chaos.Moment.FILLING, chaos.Moment.VERIFYING]
    assert rank.reached == [(moment, {"rank": 1, "step": 7}) for moment in moments]
    place, is_over = rank.groups.connect.mock_calls[0].args
    assert place == PLACE
    assert rank.groups.connect.mock_calls[0].kwargs == {"arriving": rank.parts.limit.paused.return_value}
    for over in (True, False):
        rank.link.is_over = over
        assert is_over() is over
    assert rank.told == [(1, '{"at": 7}')], "this rank is the donor"
    assert position(rank) == {"at": 7}


def test_late_news_of_a_former_generation_are_not_those_of_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    for _ in range(2):
        rank.life.join(PLAN, rank.parts.before)
    (_, free_former), (_, free) = (call.args for call in rank.link.watch.mock_calls)
    free_former()
    assert not rank.life.is_aborted
    free()
    assert rank.life.is_aborted


def test_a_rank_that_is_no_donor_takes_the_position_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    rank.memory.donor_of.return_value = 2
    rank.life.plan = None
    rank.life.join(PLAN, rank.parts.before)
    assert rank.told == [(2, None)]
    assert position(rank) == {"epoch": 0}


def test_a_position_that_came_with_the_offers_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what the donor has trained, which another global batch before may have made another number."""
    rank = Rank(monkeypatch)
    data = [RankData("a plan", samples) for samples in ({}, {}, {7: 30})]
    offers = [RankOffer(Offer(), 0, data=each) for each in data]
    rank.memory.exchange_offers.return_value = offers
    rank.memory.donor_of.return_value = 2
    rank.memory.begin_filling.return_value.step = 7
    rank.life.join(PLAN, rank.parts.before, ["cut"])
    assert rank.told == []
    assert rank.life.plan == replace(PLAN, first_step=7, first_sample=30)
    assert rank.life.has_same_plans
    assert rank.offered == [(PLAN, ["cut"], PLAN, rank.memory.rank)]
    assert rank.memory.exchange_offers.mock_calls == [mock.call(OFFERED)]


@pytest.mark.parametrize(("step", "plans"), [(8, "aaa"), (7, "aab")])
def test_the_donor_is_asked_where_its_offer_does_not_tell_the_position_for_this_plan(
    monkeypatch: pytest.MonkeyPatch, step: int, plans: str
) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    rank.memory.exchange_offers.return_value = [RankOffer(Offer(), 0, data=RankData(each, {7: 30})) for each in plans]
    rank.memory.begin_filling.return_value.step = step
    rank.life.join(PLAN, rank.parts.before)
    assert rank.told == [(1, json.dumps({"at": step}))]
    assert rank.life.has_same_plans is (plans == "aaa")


def test_a_world_may_resume_before_the_step_that_the_world_before_it_resumed_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only rank with step 3 may die before that world has made a step: the others then have step 2, or images of it."""
    rank = Rank(monkeypatch)
    rank.life.plan = PLAN.resumed(PLAN.state_dict(1))
    monkeypatch.setattr(world_life, "text_of", lambda _, own: own or json.dumps(PLAN.state_dict(3)))
    for donor, step, generation in [(1, 1, 1), (2, 3, 2), (1, 2, 3), (1, 3, 4)]:
        rank.link.park.return_value = replace(PLACE, generation=generation)
        rank.memory.donor_of.return_value = donor
        rank.memory.begin_filling.return_value.step = step
        rank.life.join(PLAN, rank.parts.before)
        assert rank.life.plan == PLAN.resumed(PLAN.state_dict(step))


def test_a_position_of_another_history_takes_the_place_of_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may come from steps with another global batch."""
    rank = Rank(monkeypatch)
    other = ElasticBatches(dataset_size=48, global_batch=6, seed=1)
    monkeypatch.setattr(world_life, "text_of", lambda _, own: own or json.dumps(other.state_dict(3)))
    for donor in (2, 1):
        rank.memory.donor_of.return_value = donor
        rank.memory.begin_filling.return_value.step = 3
        rank.life.join(PLAN, rank.parts.before)
        assert rank.life.plan == PLAN.resumed(other.state_dict(3))


@pytest.mark.parametrize("is_loaded", [True, False])
def test_where_memory_has_nothing_whole_the_newest_checkpoint_or_a_new_state_is_offered(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    found = rank.memory.begin_filling.return_value
    rank.memory.begin_filling.side_effect = [None, found]
    rank.memory.begin_anew.return_value = [Offer(frozenset({1}), 9), Offer(), Offer()]
    resume = mock.Mock(step=9, generation=2, extra={"data": {"at": 9}}, holders=None) if is_loaded else None
    rank.parts.durable.load.return_value = resume
    rank.life.join(PLAN, rank.parts.before)
    step, origin = (9, 2) if is_loaded else (PLAN.first_step, 0)
    offers = [RankOffer(Offer(frozenset({1}), 9), origin), RankOffer(Offer(), origin), RankOffer(Offer(), origin)]
    has_changed = resume.has_changed if resume else True
    loaded_by = range(3) if is_loaded else None
    assert rank.memory.begin_anew.mock_calls == [mock.call(step, 1, 3, loaded_by=loaded_by, has_changed=has_changed)]
    assert rank.memory.begin_filling.mock_calls[-1] == mock.call(offers, 1)
    assert rank.memory.fill.mock_calls == [mock.call(found, offers, rank.parts.limit.progress)]
    assert rank.life.is_loaded is is_loaded
    names = rank.names()
    assert names.index("memory.build") < names.index("durable.load") < names.index("memory.begin_anew")
    assert "limit.progress" in names[names.index("memory.begin_anew") :]
    assert rank.memory.build_mesh.mock_calls == [mock.call(3)] * 2, "as many as there are offers"
    limits = ("groups.allow_for", "groups.allow_for_load", "groups.begin_training", "durable.load")
    assert [name for name in names if name in limits] == [
        *("groups.allow_for", "groups.allow_for_load", "durable.load"),  # storage may take longer than a regroup
        *("groups.allow_for", "groups.begin_training"),
    ]
    assert rank.groups.allow_for_load.mock_calls == [mock.call(rank.memory.members.num_bytes)]
    assert rank.told == ([] if is_loaded else [(1, '{"at": 7}')]), "a checkpoint has told all ranks the position"
    assert rank.life.plan is not None
    assert position(rank) == ({"at": 9} if is_loaded else {"at": 7})


def test_after_a_checkpoint_the_position_in_memory_is_the_one_that_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank may be the donor of the next world, at the same step."""
    rank = Rank(monkeypatch)
    found = rank.memory.begin_filling.return_value
    found.step = 3
    rank.memory.begin_filling.side_effect = [None, found]
    rank.memory.begin_anew.return_value = [Offer()] * 3
    rank.parts.durable.load.return_value = mock.Mock(
        step=3, generation=1, extra={"data": PLAN.state_dict(3)}, holders=(0,)
    )
    rank.life.join(PLAN, rank.parts.before)
    assert rank.life.plan == PLAN.resumed(PLAN.state_dict(3))
    rank.memory.begin_filling.side_effect = [found]
    rank.link.park.return_value = replace(PLACE, generation=5)
    rank.life.join(PLAN, rank.parts.before)
    assert [json.loads(own) for _, own in rank.told] == [PLAN.state_dict(3)]
    assert rank.life.plan == PLAN.resumed(PLAN.state_dict(3))


def test_without_storage_a_new_state_is_that_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch, has_durable=False)
    rank.memory.begin_filling.side_effect = [None, rank.memory.begin_filling.return_value]
    rank.memory.begin_anew.return_value = [Offer()] * 3
    rank.life.join(PLAN, rank.parts.before)
    assert rank.memory.begin_anew.mock_calls == [mock.call(PLAN.first_step, 1, 3, loaded_by=None, has_changed=True)]
    assert rank.life.is_loaded is False


@pytest.mark.parametrize(("kind", "fills_others"), [("replicated", True), ("sharded", False)])
def test_replicas_that_have_not_loaded_are_filled_by_those_that_have(
    monkeypatch: pytest.MonkeyPatch, kind: str, fills_others: bool
) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch, kind=kind)
    rank.memory.begin_filling.side_effect = [None, rank.memory.begin_filling.return_value]
    rank.memory.begin_anew.return_value = [Offer(frozenset({1}), 9), Offer(), Offer(frozenset({1}), 9)]
    resume = mock.Mock(step=9, generation=2, extra={"data": {"at": 9}}, holders=(0, 2))
    rank.parts.durable.load.return_value = resume
    rank.life.join(PLAN, rank.parts.before)
    assert rank.parts.durable.load.mock_calls == [mock.call(fills_others=fills_others)]
    assert rank.memory.begin_anew.mock_calls == [mock.call(9, 1, 3, loaded_by=(0, 2), has_changed=resume.has_changed)]
    assert rank.life.is_loaded is True, "the state is that of a checkpoint on every rank"


def test_a_newcomer_that_has_followed_is_compared_with_the_checkpoint_that_the_others_have_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it gets what differs, as in a growth in memory, where all others have new processes."""
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    found = rank.memory.begin_filling.return_value
    rank.memory.begin_filling.side_effect = [None, found]
    rank.memory.exchange_offers.return_value = [RankOffer(Offer(), 0), RankOffer(Offer(), 0, followed=9)]
    rank.memory.begin_anew.return_value = [Offer(frozenset({1}), 9), Offer()]
    rank.parts.durable.load.return_value = mock.Mock(step=9, generation=2, extra={"data": {"at": 9}}, holders=(0,))
    rank.life.join(PLAN, rank.parts.before)
    ((_, offers, _),) = [call.args for call in rank.memory.fill.mock_calls]
    assert offers == [RankOffer(Offer(frozenset({1}), 9), 2), RankOffer(Offer(), 2, followed=9)]


def test_a_sharded_state_is_built_with_the_limits_of_training_and_filled_with_those_of_a_regroup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that hangs while this rank is filled or compared is given up before the phase's own limit ends this process."""
    resumed(monkeypatch)
    rank = Rank(monkeypatch, kind="sharded")
    rank.life.join(PLAN, rank.parts.before)
    names = rank.names()
    at = names.index("groups.begin_training")
    wanted = [
        "groups.begin_training", "limit.paused", "groups.await_all", "memory.build_mesh", "memory.build", "limit.paused",
        "groups.await_all", "groups.allow_for", "memory.fill", "memory.donor_of",
        "memory.finish_filling", "before", "groups.await_former", "memory.verify",
        "memory.rank.verified", "memory.move", "groups.begin_training",
    ]  # fmt: skip
    assert names[at : at + len(wanted)] == wanted
    assert rank.groups.allow_for.mock_calls == [mock.call(rank.memory.members.num_bytes)]


def test_a_rank_that_is_lost_while_a_sharded_state_is_built_loses_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch, kind="sharded")
    rank.groups.await_all.side_effect = [None, RuntimeError("Connection closed by peer")]
    with pytest.raises(WorldLost, match="Connection closed by peer"):
        rank.life.join(PLAN, rank.parts.before)
    assert rank.memory.fill.mock_calls == rank.groups.allow_for.mock_calls == []


def test_a_rank_that_is_lost_before_the_mesh_is_built_is_waited_for_in_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the ranks would wait for it to connect, and nothing frees them from that."""
    resumed(monkeypatch)
    rank = Rank(monkeypatch, kind="sharded")
    rank.groups.await_all.side_effect = RuntimeError("Connection closed by peer")
    with pytest.raises(WorldLost, match="Connection closed by peer"):
        rank.life.join(PLAN, rank.parts.before)
    assert rank.memory.build_mesh.mock_calls == []


# ---- places


def test_without_a_launcher_a_replicated_state_is_alone_and_needs_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    rank = Rank(monkeypatch, has_link=False)
    rank.memory.donor_of.return_value = 0
    rank.life.join(PLAN, rank.parts.before)
    assert rank.life.place is SINGLE
    assert rank.groups.connect.mock_calls == rank.groups.connect_alone.mock_calls == []
    assert rank.groups.begin_training.mock_calls == rank.groups.allow_for.mock_calls == []
    assert rank.groups.await_former.mock_calls == []
    rank.life.leave(None)
    rank.life.close(True)
    assert rank.groups.leave.mock_calls == rank.groups.close.mock_calls == []


def test_a_sharded_one_has_groups_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    monkeypatch.delenv("RANK", raising=False)
    rank = Rank(monkeypatch, kind="sharded", has_link=False)
    rank.memory.donor_of.return_value = 0
    rank.life.join(PLAN, rank.parts.before)
    assert rank.groups.connect_alone.mock_calls == [mock.call()]
    assert rank.groups.connect.mock_calls == []


def test_a_launcher_without_an_agent_gives_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    for name, text in {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, text)
    rank = Rank(monkeypatch, has_link=False)
    rank.life.join(PLAN, rank.parts.before)
    place, is_over = rank.groups.connect.mock_calls[0].args
    assert (place.rank, place.world_size, place.address, place.port) == (2, 3, "10.0.0.9", 1234)
    assert is_over() is False


def test_a_script_with_a_process_group_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(TypeError, match="a process group exists already"):
        rank.life.join(PLAN, rank.parts.before)
    assert rank.groups.connect.mock_calls == []


def test_a_second_state_beside_the_loop_of_another_is_refused() -> None:
    def body(_: int) -> list[bool]:
        groups = ProcessGroups("gloo", None)
        known = [is_group_of_state()]
        groups.connect_alone()
        known.append(is_group_of_state())
        with pytest.MonkeyPatch.context() as patch:
            rank = Rank(patch)
            with pytest.raises(
                TypeError, match=r"^another State of this process is in its loop; use one State at a time$"
            ):
                rank.life.join(PLAN, rank.parts.before)
        groups.leave()
        return [*known, is_group_of_state()]

    assert run_ranks(1, body) == [[False, True, False]]


@pytest.mark.parametrize("is_called_back", [True, False])
def test_a_rank_that_nobody_calls_back_after_a_failure_tells_its_agent(
    monkeypatch: pytest.MonkeyPatch, is_called_back: bool
) -> None:
    resumed(monkeypatch)
    monkeypatch.setattr(world_life, "TELL_AFTER_S", 3600.0 if is_called_back else 0.0)
    rank, told = Rank(monkeypatch), threading.Event()
    rank.life.place = WorldPlace(3, 2, 3, "", 0)
    rank.life._lost_to = ZeroDivisionError("a peer is gone")
    rank.link.report_fault.side_effect = lambda *_: told.set()
    threads: list[bool] = []

    def park(**_: Any) -> WorldPlace:
        threads.extend(each.daemon for each in threading.enumerate() if isinstance(each, threading.Timer))
        assert is_called_back or told.wait(PATIENCE_S)
        return PLACE

    rank.link.park.side_effect = park
    rank.life.join(PLAN, rank.parts.before)
    assert rank.link.park.mock_calls == [mock.call(after_fault=True)]
    assert rank.link.report_fault.mock_calls == (
        [] if is_called_back else [mock.call(2, "a peer is gone", rank.link.run)]
    )
    assert threads == [True] * len(threads), "the timer does not keep the process"
    assert not [
        each for each in threading.enumerate() if isinstance(each, threading.Timer) and not each.finished.is_set()
    ]
    rank.life.join(PLAN, rank.parts.before)
    assert rank.link.park.mock_calls[1:] == [mock.call()], "once"


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
def test_a_rank_follows_those_that_train_while_it_waits_in_peace(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """It stops to, whatever becomes of the waiting; only a rank whose process is kept has followers of its own."""
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    rank.life._lost_to = error
    rank.link.park.side_effect = EOFError()
    with pytest.raises(EOFError):
        rank.life.join(PLAN, rank.parts.before)
    assert rank.names() == (
        ["memory.rest", "memory.following.begin", "link.park", "memory.finish_following"]
        if error is None
        else ["memory.rest", "link.park"]
    )
    rank.link.park.side_effect = None
    rank.link.is_kept = False
    rank.life.join(PLAN, rank.parts.before)
    assert rank.memory.following.listen.mock_calls == []


# ---- leaving


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_rank_leaves_in_one_order(monkeypatch: pytest.MonkeyPatch, is_torn: bool) -> None:
    resumed(monkeypatch)
    rank, error = Rank(monkeypatch), ZeroDivisionError()
    rank.life.join(PLAN, rank.parts.before)
    rank.parts.reset_mock()
    rank.life.leave(error, is_torn=is_torn)
    state = "failed_inside_optimizer" if is_torn else "stopped"
    assert rank.names() == [
        f"memory.rank.{state}", "memory.move", "durable.close", "memory.release", "memory.members.zero_grad", "groups.leave",
        "memory.rank.detached", "memory.move",
    ]  # fmt: skip
    moved = [getattr(rank.memory.rank, state).return_value, rank.memory.rank.detached.return_value]
    assert rank.memory.move.mock_calls == [mock.call(each) for each in moved]
    assert rank.parts.durable.close.mock_calls == [mock.call(error)]
    assert rank.life._lost_to is error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            WorldLost("the state could not be transferred: a peer is gone\nin gloo"),
            "the state could not be transferred: a peer is gone",
        ),
        (ConnectionResetError(), "ConnectionResetError"),
        (None, ""),
    ],
)
def test_a_rank_that_leaves_says_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception | None, said: str
) -> None:
    """The log of ranks that regroup again and again has the reason then."""
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    rank.life.join(PLAN, rank.parts.before)
    rank.life.leave(error)
    place = rank.life.place
    expected = [f"rank {place.rank} leaves generation {place.generation}: {said}"] if said else []
    assert [each.getMessage() for each in caplog.records] == expected


def test_the_collectives_of_a_lost_world_end_with_or_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    rank.life.end_collectives()
    assert rank.groups.mock_calls == [], "it has none yet"
    rank.life.join(PLAN, rank.parts.before)
    rank.parts.reset_mock()
    rank.life.end_collectives()
    assert rank.names() == ["groups.abort_queued"]


@pytest.mark.parametrize("is_overdue", [True, False])
def test_a_planned_change_gives_up_a_save_that_is_overdue_before_its_phase_with_a_limit(
    monkeypatch: pytest.MonkeyPatch, is_overdue: bool
) -> None:
    resumed(monkeypatch)
    rank, late = Rank(monkeypatch), WorldLost("late") if is_overdue else None
    rank.life.join(PLAN, rank.parts.before)
    rank.parts.reset_mock()
    rank.parts.durable.overdue.return_value = late
    rank.life.leave(None)
    assert rank.names()[:4] == ["durable.overdue", "memory.rank.stopped", "memory.move", "durable.close"]
    assert rank.parts.durable.close.mock_calls == [mock.call(late)]
    assert rank.life._lost_to is None, "the change is planned all the same"


@pytest.mark.parametrize("has_finished", [True, False])
def test_the_end_waits_for_a_save_only_when_the_training_has_finished(
    monkeypatch: pytest.MonkeyPatch, has_finished: bool
) -> None:
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    rank.life.join(PLAN, rank.parts.before)
    rank.parts.reset_mock()
    rank.life.close(has_finished)
    assert rank.names() == ["durable.close", "groups.close", "link.close"]
    assert rank.groups.close.mock_calls == [mock.call(has_finished=has_finished)]
    ((why,), _) = rank.parts.durable.close.call_args
    assert (why is None) if has_finished else (type(why) is WorldLost and str(why) == "the process ends")


def test_a_rank_that_never_joined_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, has_durable=False)
    rank.life.leave(None)
    rank.life.close(False)
    assert (rank.groups.close.mock_calls, rank.link.close.mock_calls) == ([], [mock.call()])
    Rank(monkeypatch, has_link=False, has_durable=False).life.close(False)
