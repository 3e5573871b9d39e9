"""The check that a change of the layout has moved every element, in one process that holds both layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastipod.in_memory import shard_checks
from elastipod.in_memory.members import Members, TensorShape
from elastipod.in_memory.parts import ShardedShape, parts_of
from elastipod.in_memory.shard_checks import compare_layouts, compare_shards

NAMES = [f"model.{number}" for number in range(7)]
SHAPES = [ShardedShape(TensorShape(name, "float32", (8, 2)), 0) for name in NAMES]
WHOLE = [*SHAPES, ShardedShape(TensorShape("common", "float32", (4,)), None)]


def holder(changed: list[str]) -> Any:
    """Give what holds every tensor; the last element of some was changed."""
    raws = {name: torch.arange(16.0) for name in NAMES}
    for name in changed:
        raws[name][-1] += 1
    return SimpleNamespace(view=lambda each: raws[each.span.key].view(torch.uint8)[each.span.start : each.span.stop])


def differing(changed: list[str]) -> str:
    return compare_layouts(WHOLE, holder([]), list(parts_of(2)), holder(changed), next(iter(parts_of(1))))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ([], ""),
        (NAMES[3:4], "model.3"),
        (NAMES[:5], "model.0, model.1, model.2, model.3, model.4"),
        (NAMES[:6], "model.0, model.1, model.2, model.3, model.4 and 1 more"),
        (NAMES, "model.0, model.1, model.2, model.3, model.4 and 2 more"),
    ],
)
def test_the_first_tensors_that_differ_are_named_and_the_others_counted(changed: list[str], named: str) -> None:
    assert differing(changed) == named


def test_a_part_that_nobody_answers_for_is_missed() -> None:
    (first, _) = parts_of(2)
    found = compare_layouts(SHAPES[:1], holder([]), [first], holder([]), next(iter(parts_of(1))))
    assert found == "model.0"
    assert compare_layouts(SHAPES[:1], holder([]), list(parts_of(2)), holder([]), None) == "model.0"
    assert compare_layouts(WHOLE[-1:], holder([]), [first], holder([]), None) == "", "it has no parts"


def test_each_block_that_was_summed_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_checks, "_BLOCK", 4)
    beats: list[str] = []
    layouts = (list(parts_of(2)), holder([]), next(iter(parts_of(1))))
    assert compare_layouts(SHAPES[:1], holder([]), *layouts, lambda: beats.append("one")) == ""
    assert len(beats) == 8, "sixteen elements in both layouts"


def test_each_tensor_whose_digest_was_computed_is_progress() -> None:
    beats: list[str] = []
    compare_shards(Members({"model": nn.Linear(2, 3)}), [0], 0, "now", lambda: beats.append("one"))
    assert len(beats) == 2


def test_shards_of_a_wrapped_module_are_those_of_each_rank() -> None:
    """`checkpoint_wrapper` takes its own part of the name out of `state_dict()`, and not out of `named_parameters()`."""
    port = free_port()

    def body(rank: int) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
        with world(rank, 2, port):
            mesh = init_device_mesh("cpu", (2,))
            for module in (*model, model):
                fully_shard(module, mesh=mesh)
            members = Members({"model": model})
            found = raised_by(lambda: compare_shards(members, [0, 1], 0, "now", lambda: None))
        return [sorted(members.sharded_keys()) == sorted(members.digests()), found]

    assert run_ranks(2, body) == [[True, []]] * 2


@pytest.mark.parametrize(("wrong", "reference", "holders"), [(0, 1, [1]), (2, 0, [1]), (1, 0, [2])])
@pytest.mark.parametrize("what", ["common", "sharded"])
def test_only_ranks_that_differ_from_those_that_held_the_state_are_refused(
    what: str, wrong: int, reference: int, holders: list[int]
) -> None:
    """A newcomer may have any number, also the first one."""
    port = free_port()

    def body(rank: int) -> Any:
        model = nn.Linear(2, 2)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        if rank == wrong:
            nn.init.zeros_(model.weight)
        members = Members({"model": model})
        members.sharded_keys = lambda: frozenset({"model.weight"} if what == "sharded" else ())  # type: ignore[method-assign]
        with world(rank, 3, port):
            return raised_by(lambda: compare_shards(members, holders, reference, "now", lambda: None))

    told = {
        rank: ["WorldLost", f"now the state of rank {wrong} differs from that of its replicas"] for rank in range(3)
    }
    told[wrong] = [
        "StateDiffersError", f"now the state of rank {wrong} differs from that of its replicas, in model.weight"
    ]  # fmt: skip
    assert run_ranks(3, body) == [told[rank] for rank in range(3)]
