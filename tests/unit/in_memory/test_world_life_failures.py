"""What a rank makes of its model in each world, and of failures of checkpoints and agreements in one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from tests.unit.in_memory.test_world_life import PLAN, Rank, resumed
from torch import nn

from elastipod.errors import CheckpointError, ElasticAgreementError
from elastipod.in_memory import world_life
from elastipod.in_memory.collective_failure import ASK_AGENT_S
from elastipod.in_memory.memory_state import WorldLost


def test_the_model_is_wrapped_anew_in_each_world_and_let_go_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    bare, detached = nn.Linear(1, 1), [nn.Linear(1, 1)][:0]
    made: list[nn.Module] = []

    def wrap(model: nn.Module) -> nn.Module:
        assert model is bare
        made.append(nn.Sequential(model))
        return made[-1]

    monkeypatch.setattr(world_life, "detach_reducer", detached.append)
    rank = Rank(monkeypatch, wrap=wrap)
    rank.memory.members.model = bare
    assert rank.life.model is bare
    for world in (1, 2):
        rank.life.join(PLAN, rank.parts.before)
        assert (len(made), rank.life.model) == (world, made[-1])
        rank.life.leave(None)
        assert (rank.life.model, detached) == (bare, made)


def test_a_wrapper_that_has_no_length_is_the_model_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch.compile is one: it raises where its length is asked for, or whether it is true."""

    class Compiled(nn.Module):
        def __len__(self) -> int:
            raise TypeError("no length")

    resumed(monkeypatch)
    monkeypatch.setattr(world_life, "detach_reducer", lambda _: None)
    rank = Rank(monkeypatch, wrap=lambda _: Compiled())
    rank.memory.members.model = nn.Linear(1, 1)
    rank.life.join(PLAN, rank.parts.before)
    assert isinstance(rank.life.model, Compiled)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_model_that_cannot_be_wrapped_may_have_lost_a_peer(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    resumed(monkeypatch)

    def wrap(_: nn.Module) -> nn.Module:
        raise RuntimeError("no reply")

    rank = Rank(monkeypatch, wrap=wrap)
    rank.memory.members.model = nn.Linear(1, 1)
    monkeypatch.setattr(rank.life, "is_lost_to", lambda _: is_lost)
    with pytest.raises(WorldLost if is_lost else RuntimeError) as caught:
        rank.life.join(PLAN, rank.parts.before)
    assert str(caught.value) == ("the model could not be wrapped: no reply" if is_lost else "no reply")


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_build_whose_collective_has_lost_a_peer_has_lost_the_world(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """It may spread weights from one rank, or wait for all at a barrier."""
    resumed(monkeypatch)
    rank = Rank(monkeypatch, kind="sharded")
    rank.memory.build.side_effect = RuntimeError("no reply")
    monkeypatch.setattr(rank.life, "is_lost_to", lambda _: is_lost)
    with pytest.raises(WorldLost if is_lost else RuntimeError) as caught:
        rank.life.join(PLAN, rank.parts.before)
    assert str(caught.value) == ("the members could not be built: no reply" if is_lost else "no reply")
    assert rank.memory.fill.mock_calls == []


# ---- gradients of an accelerator


@pytest.mark.parametrize(
    ("device", "is_over", "is_lost"),
    [
        pytest.param("meta", True, True, id="aborted meanwhile"),
        pytest.param("meta", False, False, id="good"),
        pytest.param("cpu", True, False, id="on the host, where a collective that has returned is good"),
    ],
)
def test_gradients_of_an_accelerator_are_waited_for_and_do_not_count_where_the_generation_ended(
    monkeypatch: pytest.MonkeyPatch, device: str, is_over: bool, is_lost: bool
) -> None:
    """Memory without content plays the accelerator. The end of a generation frees collectives, whatever they have done so far."""
    resumed(monkeypatch)
    rank = Rank(monkeypatch)
    rank.link.is_over = False
    awaited: list[Any] = []

    def await_devices(devices: Any) -> None:
        awaited.extend(devices)
        rank.link.is_over = is_over

    monkeypatch.setattr(world_life, "await_devices", await_devices)
    rank.life.await_gradients()
    assert awaited == [], "there is no world yet"
    rank.memory.members.model = nn.Linear(1, 1, device=device)
    rank.life.join(PLAN, rank.parts.before)
    with pytest.raises(WorldLost, match="while gradients were reduced") if is_lost else nullcontext():
        rank.life.await_gradients()
    assert awaited == [torch.device(device)] * (device != "cpu")


def test_a_rank_without_peers_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(monkeypatch)
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    rank = Rank(monkeypatch, has_link=False)
    rank.memory.donor_of.return_value = 0
    rank.memory.members.model = nn.Linear(1, 1, device="meta")
    rank.life.join(PLAN, rank.parts.before)
    monkeypatch.setattr(world_life, "await_devices", lambda _: pytest.fail("waits"))
    rank.life.await_gradients()


# ---- failures of checkpoints and agreements


@pytest.mark.parametrize("error", [CheckpointError("a"), ElasticAgreementError("a"), RuntimeError("a")])
@pytest.mark.parametrize(("is_kept", "is_over"), [(True, True), (True, False), (False, True)])
def test_a_collective_of_the_library_fails_for_a_lost_peer_only_where_the_agent_says_so(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_kept: bool, is_over: bool
) -> None:
    rank = Rank(monkeypatch)
    rank.link.is_kept, rank.link.wait_until_over.return_value = is_kept, is_over
    assert rank.life.outlives_generation is is_kept
    with pytest.raises((WorldLost, type(error))) as caught, rank.life.collective_of_library():
        raise error
    assert (type(caught.value) is WorldLost) is (is_kept and is_over)
    assert str(caught.value) == "a"
    assert rank.link.wait_until_over.mock_calls == [mock.call(ASK_AGENT_S)] * is_kept


def test_mistakes_of_the_script_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    with pytest.raises(ZeroDivisionError), rank.life.collective_of_library():
        raise ZeroDivisionError
    assert rank.link.wait_until_over.mock_calls == []
    alone = Rank(monkeypatch, has_link=False)
    assert alone.life.outlives_generation is False
    with pytest.raises(CheckpointError), alone.life.collective_of_library():
        raise CheckpointError("a")
