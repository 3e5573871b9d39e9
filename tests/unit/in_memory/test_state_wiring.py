"""What `State` makes of its arguments: each part gets what it is for, and the defaults are those that the reference promises."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from elastipod import Copies, State
from elastipod.in_memory import elastic_state
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.notary import Trained

PARTS = ("Members", "DurableTier", "PhaseLimit", "MemoryState", "ShardedMemory", "ProcessGroups", "WorldLife")
WATCHES = ("OptimizerWatch", "StepBuffers", "ChaosHooks", "PassWatch")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Play all parts; `parts.mock_calls` tells how they are made."""
    played = mock.Mock()
    for name in (*PARTS, *WATCHES):
        monkeypatch.setattr(elastic_state, name, getattr(played, name))
    return played


def build(*_: object) -> Any:
    return "what was built"


def test_a_state_of_defaults_keeps_nothing_on_storage_and_checks_changes(parts: Any) -> None:
    state = State(build)
    members, limit = parts.Members.return_value, parts.PhaseLimit.return_value
    memory, groups = parts.MemoryState.return_value, parts.ProcessGroups.return_value
    assert parts.mock_calls == [
        mock.call.Members("what was built"),
        mock.call.PhaseLimit(),
        mock.call.MemoryState(members, limit, can_be_followed=True),
        mock.call.ProcessGroups(None, None),
        mock.call.WorldLife(memory, limit, groups, None, None),
        mock.call.OptimizerWatch(members, state._is_in_block, steps_schedules=True),
        mock.call.StepBuffers(members),
        mock.call.ChaosHooks(members),
        mock.call.PassWatch(members, state._cannot_count),
        mock.call.Members().when_built(mock.ANY),
    ]
    settings: dict[str, Any] = {
        "_members": members, "_apply": None, "_limit": limit, "_memory": memory, "_world": parts.WorldLife.return_value,
        "_durable": None, "_checkpoint_every": 0, "_sample_log": None, "_log_of_generation": None, "_log_before": None, "_seed": 0,
        "_checks_changes": True, "_is_first_step": False, "_is_second_step": False,
        "_notary": None, "_optimizers": parts.OptimizerWatch.return_value,
        "_buffers": parts.StepBuffers.return_value, "_chaos": parts.ChaosHooks.return_value,
        "_passes": parts.PassWatch.return_value, "_trained": Trained(0),
        "_started": 0.0, "_step": None, "_has_finished": False, "_is_closed": False, "_pid": 0,
    }  # fmt: skip
    assert vars(state) == settings


def test_two_checkpoints_are_kept_unless_another_number_is_wanted(parts: Any, tmp_path: Path) -> None:
    State(build, checkpoints=tmp_path)
    State(build, checkpoints="s3://bucket/job", keep=7, checkpoint_every=20)
    members = parts.Members.return_value
    assert parts.DurableTier.mock_calls == [
        mock.call(tmp_path, members, 2, saves_often=False),
        mock.call("s3://bucket/job", members, 7, saves_often=True),
    ]


def test_each_setting_reaches_the_part_that_it_is_for(parts: Any, tmp_path: Path) -> None:
    def apply(state: State) -> None:
        raise AssertionError(state)

    limit_of_collectives = timedelta(seconds=9)
    state = State(
        build, wrap=nn.Sequential, apply=apply, checkpoints=tmp_path, checkpoint_every=5, sample_log="log", seed=3,
        checks_changes=False, backend="nccl", timeout=limit_of_collectives,
    )  # fmt: skip
    members, limit, durable = parts.Members.return_value, parts.PhaseLimit.return_value, parts.DurableTier.return_value
    assert parts.MemoryState.mock_calls == [mock.call(members, limit, can_be_followed=False)], (
        "nobody can repeat its steps"
    )
    assert parts.ProcessGroups.mock_calls == [mock.call("nccl", limit_of_collectives)]
    assert parts.WorldLife.mock_calls == [
        mock.call(parts.MemoryState.return_value, limit, parts.ProcessGroups.return_value, nn.Sequential, durable)
    ]
    own = {
        name: getattr(state, f"_{name}")
        for name in ("apply", "durable", "checkpoint_every", "sample_log", "seed", "checks_changes")
    }
    assert own == {
        "apply": apply, "durable": durable, "checkpoint_every": 5, "sample_log": "log", "seed": 3, "checks_changes": False
    }  # fmt: skip


def test_a_sharded_state_is_built_later_over_its_mesh(parts: Any) -> None:
    copies = Copies(1 << 20)
    state = State(build, mesh={"replicate": -1, "shard": 4}, copies=copies)
    members, limit = parts.Members.return_value, parts.PhaseLimit.return_value
    plan = MeshPlan((("replicate", -1), ("shard", 4)))
    assert parts.mock_calls[:3] == [
        mock.call.Members(),
        mock.call.PhaseLimit(),
        mock.call.ShardedMemory(members, limit, build, plan, copies),
    ]
    assert state._memory is parts.ShardedMemory.return_value
    State(build, mesh={"shard": -1})
    assert parts.ShardedMemory.mock_calls[-1] == mock.call(members, limit, build, MeshPlan((("shard", -1),)), None)


def test_a_mesh_excludes_a_wrapper_with_a_sentence(parts: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^mesh and wrap exclude each other: with a mesh, build gives the model as it trains$"
    ):
        State(build, mesh={"shard": -1}, wrap=nn.Sequential)
    assert parts.mock_calls == []


def test_the_steps_of_a_plan_are_asked_for_with_all_options() -> None:
    state = mock.Mock(spec=State)
    assert elastic_state.steps(state, "a plan", grain=4, local_sizes=(1, 2)) is state.steps.return_value  # type: ignore[arg-type]
    assert state.steps.mock_calls == [mock.call("a plan", grain=4, local_sizes=(1, 2))]
