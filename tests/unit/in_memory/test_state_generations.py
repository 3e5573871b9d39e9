"""What `State` does from one world to the next, with everything that it consists of played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from tests.unit.in_memory.test_state_steps import PLAN, Played

from elastipod.data import ElasticBatches
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.process_groups import WorldNotBuilt
from elastipod.rank_in_world import RankInWorld


def test_each_world_that_is_lost_is_followed_by_another_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    lost = [WorldLost("one"), WorldNotBuilt("two")]
    worlds: list[Any] = []

    def train(*given: Any) -> Iterator[str]:
        worlds.append((*given, played.state._is_first_step))
        yield f"step {len(worlds)}"
        if len(worlds) <= len(lost):
            played.state._optimizers.is_torn = len(worlds) == 2
            raise lost[len(worlds) - 1]
        return True  # type: ignore[return-value]

    played.state._train = train
    assert list(played.state.steps(PLAN, grain=4, local_sizes=[1, 3])) == ["step 1", "step 2", "step 3"]
    assert worlds == [(PLAN, RankInWorld(1, 2, (1, 3)), 4, True)] * 3
    assert played.world.join.mock_calls == [mock.call(PLAN, played.state._open_log, [4, (1, 3)])] * 3
    leaves = [mock.call(lost[0], is_torn=False), mock.call(lost[1], is_torn=True)]
    assert played.world.leave.mock_calls == leaves
    assert played.world.close.mock_calls == [mock.call(True)]
    assert played.parts.limit.mock_calls == [mock.call.close()]
    assert played.link.announce.mock_calls == [mock.call("replicated")]


@pytest.mark.parametrize("is_same", [True, False])
def test_plans_that_the_offers_have_compared_are_not_compared_again(
    monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    played = Played(monkeypatch)
    played.world.has_same_plans = is_same
    asked: list[Any] = []

    def iterate_at(_: ElasticBatches, *given: Any, **named: Any) -> Iterator[Any]:
        asked.append((given, named))
        return iter(())

    monkeypatch.setattr(ElasticBatches, "iterate_at", iterate_at)
    place = RankInWorld(1, 2)
    with pytest.raises(StopIteration):
        next(played.state._train(PLAN, place, 4))
    assert asked == [((place,), {"grain": 4, "is_compared": is_same})]


@pytest.mark.parametrize("error", [WorldLost("x"), ZeroDivisionError()])
def test_a_process_that_cannot_be_kept_ends_with_its_world(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    played = Played(monkeypatch, _notary=(notary := mock.Mock()))
    played.world.outlives_generation = False
    played.world.join.side_effect = error
    with pytest.raises(type(error)):
        list(played.state.steps(PLAN))
    assert played.world.leave.call_count == isinstance(error, WorldLost)
    assert played.world.close.mock_calls == [mock.call(False)]
    assert played.log.mock_calls == [mock.call.close()]
    assert notary.mock_calls == [mock.call.close()] * isinstance(error, WorldLost)
    assert played.state._log_of_generation is None


def test_what_an_interrupted_step_has_changed_is_put_back_before_the_state_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prepared rank keeps two states, the one before the step and the one after it, whose statistics it then needs again."""
    played = Played(monkeypatch)
    played.world.leave.side_effect = lambda *_, **__: played.state._run_apply()
    played.state._leave(None)
    after = ["world.leave", "buffers.redo", "apply_gradients", "buffers.forget"]
    assert played.names() == ["chaos.end", "passes.close", "buffers.restore", *after]


@pytest.mark.parametrize("error", [WorldLost("x"), None])
def test_of_a_lost_world_nothing_runs_on_an_accelerator_when_its_tensors_are_read(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """A collective of NCCL that waits for a lost peer lets whatever is queued behind it wait too, such as a copy to the host."""
    played = Played(monkeypatch)
    played.state._leave(error)
    ends = ["world.end_collectives"] if error else []
    assert played.names() == ["chaos.end", "passes.close", *ends, "buffers.restore", "world.leave", "buffers.forget"]


def test_an_agent_that_keeps_this_process_already_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.link.is_kept = True
    played.state._announce()
    assert played.link.announce.mock_calls == []
    played.world.link = None
    played.state._announce()


def test_a_process_that_could_not_outlive_a_lost_peer_says_so_and_announces_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So the operator restarts the processes of the job, as those of a script without `State`."""
    played = Played(monkeypatch)
    played.world.reason_to_end = "torch is too old"
    played.state._announce()
    assert played.link.announce.mock_calls == []
    (record,) = caplog.records
    assert record.getMessage() == (
        "every resize and recovery restarts this script: torch is too old; with gloo alone, processes are kept"
    )


@pytest.mark.parametrize(
    ("has_link", "has_durable", "generation"), [(True, True, 5), (False, True, 9), (False, False, 5)]
)
@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_log_of_a_world_says_where_it_began(
    monkeypatch: pytest.MonkeyPatch, has_link: bool, has_durable: bool, generation: int, is_loaded: bool
) -> None:
    played = Played(monkeypatch)
    played.durable.generation.return_value = 9
    if not has_link:
        played.world.link = None
    if not has_durable:
        played.state._durable = None
    played.world.is_loaded = is_loaded
    played.state._open_log()
    ((given,), named) = played.parts.sample_log.call_args_list[0][0][:1], played.parts.sample_log.call_args.kwargs
    resume = named.pop("resume")
    assert (given, played.parts.sample_log.call_args.args) == ("folder", ("folder", PLAN))
    assert named == {"generation": generation, "rank": 1, "world_size": 2, "after": played.log_before}
    assert (resume.step, resume.generation, played.memory.origin) == (2, 4, generation)
    log = played.parts.sample_log.return_value
    loaded = [mock.call.loaded(2, played.durable.optimizer_norm.return_value)] * (is_loaded and has_durable)
    assert log.mock_calls == loaded
    assert played.state._log_of_generation is log


def test_a_save_that_a_planned_change_waits_for_finds_its_log_open(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    of_log: list[Any] = []
    played.world.leave.side_effect = lambda *_, **__: of_log.extend(played.log.mock_calls)
    played.state._leave(None)
    assert (of_log, played.log.mock_calls, played.state._log_of_generation) == ([], [mock.call.close()], None)
    assert played.state._log_before is played.log, "the next save makes its lines durable"


def test_without_a_folder_there_is_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, _sample_log=None, _log_of_generation=None)
    played.state._open_log()
    played.state._leave(None)
    played.state._close()
    played.state._end_log("completed")
    assert played.parts.sample_log.mock_calls == []
