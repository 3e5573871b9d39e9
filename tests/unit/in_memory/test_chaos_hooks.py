"""Faults that are planned inside passes happen there: in the order of a training step, at its rank and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.nonempty import every
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from tests.unit.in_memory.models import build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastipod import accumulate, chaos, fixed_order_passes
from elastipod.chaos import FaultKind, Moment, PlannedFault, is_planned, plan_faults
from elastipod.data import ElasticBatches
from elastipod.in_memory import chaos_hooks
from elastipod.in_memory.chaos_hooks import ChaosHooks
from elastipod.in_memory.members import Members
from elastipod.in_memory.peer_connections import PeerConnections, open_sockets

Reached = list[tuple[Moment, int, int]]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Reached:
    moments: Reached = []
    monkeypatch.setattr(chaos, "_planned", None)
    monkeypatch.setattr(chaos_hooks, "reached", lambda at, *, rank, step: moments.append((at, rank, step)))
    return moments


def train(members: Members, note: Callable[[Moment], object], hooks: ChaosHooks, step: int) -> None:
    hooks.begin(2, step)
    loss = members.model(torch.eye(4, 3)).square().sum()
    note(Moment.APPLY)  # between the passes
    loss.backward()


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        ([], ["step", "apply"]),
        ([Moment.FORWARD], ["step", "forward", "apply"]),
        ([Moment.BACKWARD], ["step", "apply", "backward"]),
        ([Moment.COLLECTIVE], ["step", "apply"]),
        ([Moment.FORWARD, Moment.BACKWARD, Moment.COLLECTIVE], ["step", "forward", "apply", "backward"]),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_hooks_are_there_for_the_moments_that_are_planned(
    reached: Reached, monkeypatch: pytest.MonkeyPatch, planned: list[Moment], expected: list[str], is_sharded: bool
) -> None:
    """A process alone reduces nothing, so none of its passes is in a collective."""
    monkeypatch.setattr(chaos_hooks, "is_sharded", lambda model: is_sharded)
    plan_faults([PlannedFault(FaultKind.KILL, at) for at in planned])
    members = Members(build())
    hooks = ChaosHooks(members)
    for step in (7, 8):
        reached.clear()
        train(members, lambda at, step=step: reached.append((at, 2, step)), hooks, step)  # type: ignore[misc]
        hooks.end()
        assert every(each[1:] == (2, step) for each in reached)
        said = [str(each[0]) for each in reached]
        if is_sharded and planned and planned != [Moment.FORWARD]:
            # The output of a sharded model has one hook for both.
            assert said == [*expected[: expected.index("apply") + 1], "backward"]
        else:
            assert said == expected


def test_a_sharded_model_that_is_only_evaluated_is_left_alone(
    reached: Reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_hooks, "is_sharded", lambda model: True)
    plan_faults([PlannedFault(FaultKind.KILL, Moment.BACKWARD)])
    members = Members(build())
    ChaosHooks(members)
    with torch.no_grad():
        members.model(torch.eye(4, 3))
    assert reached == []


def test_a_parameter_that_is_not_trained_gets_no_hook(reached: Reached) -> None:
    plan_faults([PlannedFault(FaultKind.KILL, at) for at in (Moment.BACKWARD, Moment.COLLECTIVE)])
    built: dict[str, Any] = build()
    *_, last = built["model"].parameters()
    first = next(iter(built["model"].parameters()))
    for frozen in (first, last):
        frozen.requires_grad_(False)
    members = Members(built)
    hooks = ChaosHooks(members)
    train(members, lambda at: None, hooks, 1)
    hooks.end()
    assert [each[0] for each in reached] == [Moment.STEP, Moment.BACKWARD]
    assert hooks._has_gradient


def test_the_first_and_the_last_parameter_tell_where_a_pass_is(reached: Reached) -> None:
    """The first one gets its gradient last, when there is nothing left to compute. Of a single one there are both moments."""
    plan_faults([PlannedFault(FaultKind.KILL, at) for at in (Moment.BACKWARD, Moment.COLLECTIVE)])
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
    single = torch.nn.Linear(1, 1, bias=False)
    hooks, of_single = (
        ChaosHooks(Members({"model": each, "optimizer": torch.optim.SGD(each.parameters(), lr=0.1)}))
        for each in (model, single)
    )
    model[0](torch.ones(1, 1)).sum().backward()
    assert [str(at) for at, *_ in reached] == ["backward"], "the first is enough"
    assert not hooks._has_gradient
    model(torch.ones(1, 1)).sum().backward()
    assert [str(at) for at, *_ in reached] == ["backward"] * 2
    assert hooks._has_gradient
    single(torch.ones(1, 1)).sum().backward()
    assert [str(at) for at, *_ in reached] == ["backward"] * 3
    assert of_single._has_gradient


# -- in a collective


@pytest.mark.parametrize(("rank", "step"), [(1, None), (None, 8)])
def test_a_step_is_looked_through_only_where_a_fault_is_due(
    reached: Reached, rank: int | None, step: int | None
) -> None:
    plan_faults([PlannedFault(FaultKind.KILL, Moment.COLLECTIVE, rank, step)])
    hooks = ChaosHooks(Members(build()))
    hooks.begin(2, 7)
    assert hooks._collectives is None
    hooks.begin(rank or 2, step or 7)
    assert hooks._collectives is not None
    hooks.end()
    hooks.end()
    assert hooks._collectives is None


def ddp(mesh: Any) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    return model, nn.parallel.DistributedDataParallel(model)


def sharded(mesh: Any) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def passes(wrapped: nn.Module, is_exact: bool) -> None:
    """Train one step of two passes, of which the last one reduces; or in a fixed order, which reduces after both."""
    batch = ElasticBatches(8, 4).batch(1, dist.get_rank(), 2)
    grains = fixed_order_passes(wrapped, batch, 1) if is_exact else accumulate(wrapped, batch, 1)
    for _ in grains:
        wrapped(torch.eye(4, 3)).square().sum().backward()


@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.SLOW])
@pytest.mark.parametrize(
    ("build_model", "is_exact", "under_way"),
    [
        pytest.param(ddp, False, ["allreduce_.default"], id="DDP"),
        pytest.param(ddp, True, ["allgather_.default"], id="fixed order"),
        pytest.param(sharded, False, ["_reduce_scatter_base_.default"], id="FSDP2"),
    ],
)
def test_the_thread_that_trains_has_begun_a_collective_and_not_waited_for_it(
    build_model: Callable[[Any], tuple[nn.Module, nn.Module]], is_exact: bool, under_way: list[str], kind: FaultKind
) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        told: list[str] = []
        is_of_gradients = chaos_hooks._is_of_gradients

        def noted(name: str, args: Any) -> bool:
            if is_of_gradients(name, args) and not told:
                told.append(name)
            return is_of_gradients(name, args)

        before = open_sockets()
        with world(rank, 2, port):
            chaos_hooks._is_of_gradients = noted
            plan_faults([PlannedFault(kind, Moment.COLLECTIVE, rank=0, step=4, seconds=0.01)])
            model, wrapped = build_model(init_device_mesh("cpu", (2,)))
            hooks = ChaosHooks(Members({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}))
            hooks.begin(rank, 4)
            raised = raised_by(lambda: passes(wrapped, is_exact))
            hooks.end()
            if raised:  # the other rank may wait in the collective that follows, and this process lives on
                connections = PeerConnections(before, port)
                connections.end_reading()
                connections.close()
            return [told, raised, is_planned(Moment.COLLECTIVE)]

    said = ["ChaosError", "raised on purpose at collective of step 4 on rank 0"] if kind is FaultKind.RAISE else []
    first, second = run_ranks(2, body)
    assert first == [under_way, said, False]
    assert second[0] == [], "another rank is not looked through"
    assert second[2]
    if kind is FaultKind.SLOW:
        assert second[1] == []
