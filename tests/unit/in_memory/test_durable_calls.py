"""What the last resort of a state in memory asks of its CheckpointManager, and when it makes one."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from elastipod.checkpoint import save_arguments
from elastipod.in_memory import durable_tier
from elastipod.in_memory.agent_link import Fate
from elastipod.in_memory.durable_tier import DurableTier
from elastipod.in_memory.members import Members
from elastipod.in_memory.memory_state import MemoryState
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.rank_in_world import RankInWorld


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Play the class of managers; its calls tell how they are made."""
    played = mock.Mock(side_effect=lambda *_, **__: mock.MagicMock())
    monkeypatch.setattr(durable_tier, "CheckpointManager", played)
    return played


def built(*, models: int = 1, schedules: int = 1) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: dict[str, Any] = {"model": model, "optimizer": optimizer}
    found |= {f"schedule{number}": StepLR(optimizer, 1) for number in range(schedules)}
    return found | {f"average{number}": nn.Linear(2, 1) for number in range(1, models)}


def test_a_checkpoint_has_the_names_that_a_plain_script_gives(managers: Any) -> None:
    members = built()
    tier = DurableTier("folder", Members(members), 3)
    assert managers.mock_calls == [], "a generation in memory needs none"
    tier.load()
    assert managers.mock_calls == [mock.call("folder", keep=3, continues=False)]
    assert tier._manager is not None
    assert tier._manager.uses_default_group is True, "which is there, and is one of its own"
    live = {
        "model": members["model"],
        "optimizer": {"optimizer": members["optimizer"]},
        "scheduler": members["schedule0"],
    }
    manager: Any = tier._manager
    manager.is_saving.return_value = False
    assert manager.load_latest.mock_calls == [mock.call(**live)]
    assert tier.load() is manager.load_latest.return_value
    assert manager.writes_resumed
    tier.save(5, {"data": 1}, "a log", waits=True)  # type: ignore[arg-type]
    tier.save(6, {}, None, waits=False)
    assert manager.save.mock_calls == [mock.call(5, **live, extra={"data": 1}, sample_log="a log")]
    assert manager.save_async.mock_calls == [mock.call(6, **live, extra={}, sample_log=None)]
    assert managers.call_count == 1


@pytest.mark.parametrize(("saves_often", "fills_others"), [(True, True), (True, False), (False, True)])
def test_some_ranks_need_not_load_where_nothing_is_written_before_they_are_filled(
    managers: Any, saves_often: bool, fills_others: bool
) -> None:
    tier = DurableTier("folder", Members(built()), 3, saves_often=saves_often)
    found = tier.load(fills_others=fills_others)
    manager: Any = tier._manager
    used, unused = manager.load_on_holders, manager.load_latest
    if not (saves_often and fills_others):
        used, unused = unused, used
    assert used.mock_calls == [mock.call(**tier._live)]
    assert found is used.return_value
    assert unused.mock_calls == []


def test_a_step_that_a_drain_left_in_memory_is_not_written_where_newer_ones_soon_are(managers: Any) -> None:
    tier = DurableTier("folder", Members(built()), 3, saves_often=True)
    tier.load()
    assert tier._manager is not None
    assert not tier._manager.writes_resumed, "the world would wait for the copy"


@pytest.mark.parametrize(
    ("of_ranks", "rank"), [(["idle", "writes"], 0), (["writes", "idle"], 1), (["idle", "idle"], 0)]
)
def test_a_step_is_left_out_on_all_ranks_while_any_still_writes(
    managers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, of_ranks: list[str], rank: int
) -> None:
    caplog.set_level("WARNING")
    exchange = mock.Mock(return_value=of_ranks)
    monkeypatch.setattr(durable_tier, "all_texts", exchange)
    monkeypatch.setattr(RankInWorld, "current", lambda: mock.Mock(rank=rank))
    tier = DurableTier("folder", Members(built()), 3)
    tier.load()
    manager: Any = tier._manager
    manager.is_saving.return_value = of_ranks[rank] == "writes"
    tier.save(5, {}, None, waits=True)
    assert (exchange.call_count, manager.save.call_count) == (0, 1), "who waits for a save leaves none out"
    tier.save(6, {}, None, waits=False)
    is_left_out = "writes" in of_ranks
    told = ["step 6 is not saved, because storage is still writing the checkpoint before it"]
    assert exchange.mock_calls == [mock.call(of_ranks[rank])]
    assert manager.is_saving.mock_calls == [mock.call(durable_tier.SAVE_WAIT_S)]
    assert (manager.save_async.call_count, caplog.messages) == (not is_left_out, told * (is_left_out and rank == 0))


@pytest.mark.parametrize("is_saving", [True, False])
def test_a_change_of_the_world_waits_a_moment_for_a_save(managers: Any, is_saving: bool) -> None:
    tier = DurableTier("folder", Members(built()), 3)
    assert tier.overdue() is None, "there is nothing to wait for"
    tier.load()
    manager: Any = tier._manager
    manager.is_saving.return_value = is_saving
    found = tier.overdue()
    assert manager.is_saving.mock_calls == [mock.call(durable_tier.SAVE_WAIT_S)]
    assert str(found or "") == ("the world changes, and its next checkpoint is of a newer step" if is_saving else "")
    assert (found is None) is not is_saving


@pytest.mark.parametrize("first", ["save", "generation"])
def test_a_state_from_memory_goes_on_in_the_directory(managers: Any, first: str) -> None:
    tier = DurableTier("folder", Members(built()), 3)
    if first == "save":
        tier.save(5, {}, None, waits=True)
    else:
        manager: Any
        found = tier.generation()
        manager = tier._manager
        assert found is manager.claim.return_value
    assert managers.mock_calls == [mock.call("folder", keep=3, continues=True)]


def test_several_models_and_schedules_keep_their_own_names() -> None:
    members = built(models=2, schedules=2)
    live = DurableTier("folder", Members(members), 1)._live
    assert live["model"] == {"model": members["model"], "average1": members["average1"]}
    schedules = [members["schedule0"], members["schedule1"]]
    kept = live["scheduler"].state_dict()
    assert kept == {"schedule0": schedules[0].state_dict(), "schedule1": schedules[1].state_dict()}
    kept["schedule1"]["last_epoch"] = 9
    live["scheduler"].load_state_dict(kept)
    assert [each.last_epoch for each in schedules] == [0, 9]
    assert DurableTier("folder", Members(built(schedules=0)), 1)._live["scheduler"] is None


def test_members_that_were_let_go_are_held_by_nobody_while_others_are_built(managers: Any) -> None:
    """A sharded state is built anew in each world: with the former one still there, it would take twice the memory."""
    members = Members(built())
    tier = DurableTier("folder", members, 1)
    tier.save(5, {}, None, waits=True)
    tier.close(None)
    former = weakref.ref(members.model)
    members.clear()
    managers.reset_mock()  # a played manager holds what it was called with
    tier._manager = None
    gc.collect()
    assert former() is None
    other = built()
    members.take(other)
    assert tier._live["model"] is other["model"]


@pytest.mark.parametrize("error", [None, ValueError("broken")])
def test_the_end_of_a_generation_is_told_its_reason_once(managers: Any, error: Exception | None) -> None:
    tier = DurableTier("folder", Members(built()), 1)
    tier.close(error)
    assert managers.mock_calls == [], "there is nothing to close"
    tier.load()
    manager: Any = tier._manager
    tier.close(error)
    assert manager.__exit__.mock_calls == [mock.call(type(error) if error else None, error, None)]
    tier.close(error)
    assert manager.__exit__.call_count == 1
    tier.load()
    assert managers.call_count == 2, "the next generation has its own"


def test_the_norm_of_the_optimizers_is_that_of_all_their_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, other)]
    tier = DurableTier(
        "folder", Members({"model": model, "first": optimizers[0], "second": optimizers[1], "other": other}), 1
    )
    assert tier.optimizer_norm() == 0.0
    optimizers[0].state[model.weight] = {"exp_avg": torch.tensor([[3.0, 0.0]]), "step": torch.tensor(9.0)}
    optimizers[1].state[other.bias] = {"exp_avg_sq": torch.tensor([4.0])}
    assert tier.optimizer_norm() == 5.0
    monkeypatch.setattr(RankInWorld, "current", lambda: mock.Mock(rank=1))
    assert tier.optimizer_norm() is None, "the first rank reads it for all"
    monkeypatch.setattr(save_arguments, "is_sharded", lambda _: True)
    assert tier.optimizer_norm() == 5.0, "each has a part"


@pytest.mark.parametrize("completed", [4, None])
def test_digests_are_computed_while_a_rank_with_a_state_waits(completed: int | None) -> None:
    memory = MemoryState(Members(built()), mock.Mock())
    memory.rank = RankState(Phase.QUIESCED, 1, frozenset({0}), completed)
    memory.following, memory._at_rest = mock.Mock(), mock.Mock()
    memory.release()
    assert memory.following.mock_calls == [mock.call.close()]
    assert memory._at_rest.mock_calls == [], "first it leaves its world, for which others wait"
    memory.rest()
    assert memory._at_rest.mock_calls == [mock.call.begin() if completed is not None else mock.call.forget()]


@pytest.mark.parametrize(
    ("fates", "is_held", "begins"),
    [
        (["stay", "leave"], True, True),
        (["kept", "unknown"], True, True),
        (["leave", "stay"], True, False),
        (["unknown", "leave"], False, False),
    ],
)
def test_a_process_that_is_to_leave_or_end_computes_no_digests_and_a_later_world_of_it_does(
    fates: list[str], is_held: bool, begins: bool
) -> None:
    memory = MemoryState(Members(built()), mock.Mock())
    memory.rank = RankState(Phase.QUIESCED, 1, frozenset({0}), 4)
    memory.following, memory._at_rest = mock.Mock(), mock.Mock()
    assert memory.hand_over([Fate(each) for each in fates]) is is_held
    memory.rest()
    first = mock.call.begin() if begins else mock.call.forget()
    assert memory._at_rest.mock_calls == [first], "those of the last comparison are no longer sure to be right"
    memory.rest()  # after a fault, of which nobody is told before
    assert memory._at_rest.mock_calls == [first, mock.call.begin()]


@pytest.mark.parametrize(("step", "has_begun", "begins"), [(4, False, True), (4, True, False), (None, False, False)])
def test_what_was_followed_stands_still_once_the_next_generation_begins(
    step: int | None, has_begun: bool, begins: bool
) -> None:
    """Its digests are computed then, unless they were when its donor stopped."""
    memory = MemoryState(Members(built()), mock.Mock())
    memory.following, memory._at_rest = mock.Mock(step=step), mock.Mock(has_begun=has_begun)
    memory.finish_following()
    assert memory.following.mock_calls == [mock.call.finish()]
    assert memory._at_rest.mock_calls == [mock.call.begin()] * begins


@pytest.mark.parametrize(("can", "is_possible"), [(None, True), (True, True), (False, False)])
def test_a_state_can_be_followed_unless_the_script_applies_it(
    monkeypatch: pytest.MonkeyPatch, can: bool | None, is_possible: bool
) -> None:
    made = mock.Mock()
    monkeypatch.setattr("elastipod.in_memory.memory_state.Following", made)
    members, limit = Members(built()), mock.Mock()
    memory = MemoryState(members, limit) if can is None else MemoryState(members, limit, can_be_followed=can)
    assert made.mock_calls == [mock.call(members, is_possible=is_possible, at_end=memory._at_rest.begin)]
    assert (memory.members, memory.origin, memory.rank, memory._images) == (members, 0, RankState(), {})
    assert memory._limit is limit
