"""A load on the ranks whose node holds the checkpoint: two ranks have saved it, and of the four that resume, two are on new nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.checkpoint.memory_places import save_async
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.in_memory.forked_ranks import run_ranks, world

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.image_inventory import ImageInfo, ImageInventory
from elastipod.checkpoint.image_source import replicas_agree
from elastipod.checkpoint.load_on_holders import can_load_on_holders
from elastipod.checkpoint.manifest import CheckpointId

STEP = 2  # in memory only; step 1 is in storage too


class CollectiveAdamW(torch.optim.AdamW):
    """An optimizer that this library does not know, whose first step may run collectives."""


def manager_of(root: Path, rank: int) -> CheckpointManager:
    return CheckpointManager(root / "disk", memory=root / f"memory of rank {rank}")


def save(root: Path, rank: int, *, differs: bool) -> None:
    """Save step 1 to storage, and step 2 to this rank's memory only. differs: this rank has trained something else."""
    trainer = Trainer()
    with manager_of(root, rank) as manager:
        trainer.step(1)
        trainer.save(manager, 1)
        trainer.step(5 if differs else 2)
        save_async(trainer, manager, STEP, durable=False)


def flip_first_byte(memory: Path, slots: str) -> None:
    for image in memory.rglob(f"*-slot-[{slots}].bin"):
        data = image.read_bytes()
        image.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def weights_after(*steps: int) -> list[Any]:
    trainer = Trainer()
    for step in steps:
        trainer.step(step)
    return [each.tolist() for each in trainer.weights()]


def resume(
    root: Path,
    *,
    damaged: tuple[int, ...] = (),
    slots: str = "1",
    differing: int | None = None,
    optimizer: type = torch.optim.AdamW,
) -> list[Any]:
    """Save on two ranks and resume on four.

    Give what each was told and whether it has connected to the others, its weights, whether its optimizer has a state, and whether its
    objects may have been changed.

    damaged: ranks whose images in ``slots`` are; step 1 is in slot 0, and step 2 in slot 1.
    """
    first, second = free_port(), free_port()

    def body(rank: int) -> Any:
        if rank < 2:
            with world(rank, 2, first):
                save(root, rank, differs=rank == differing)
            if rank in damaged:
                flip_first_byte(root / f"memory of rank {rank}", slots)
        again = Trainer(seed=3)
        again.optimizer = optimizer(again.model.parameters(), lr=0.1)
        again.scheduler = torch.optim.lr_scheduler.MultiStepLR(again.optimizer, [2, 4], gamma=0.5)
        with world(rank, 4, second), manager_of(root, rank) as manager:
            found = manager.load_on_holders(model=again.model, optimizer=again.optimizer, scheduler=again.scheduler)
            assert found is not None
            told = [found.tier, found.step, found.world_size, found.holders, manager._run().comm.is_open]
        return [told, [each.tolist() for each in again.weights()], len(again.optimizer.state) > 0, found.has_changed]

    return run_ranks(4, body)


def test_ranks_of_new_nodes_are_left_as_they_are_for_the_caller_to_fill(tmp_path: Path) -> None:
    of_ranks = resume(tmp_path)
    assert [told for told, *_ in of_ranks] == [["memory", STEP, 2, [0, 1], False]] * 4
    saved, untouched = weights_after(1, 2), [each.tolist() for each in Trainer(seed=3).weights()]
    assert [weights for _, weights, *_ in of_ranks] == [saved, saved, untouched, untouched]
    assert [each[2:] for each in of_ranks] == [[True, True], [True, True], [False, False], [False, False]]
    images = [len(list((tmp_path / f"memory of rank {rank}").rglob("image-*.json"))) for rank in range(4)]
    assert images == [1, 1, 0, 0], "what was loaded stays until the next save, and nothing else of the former run"


def test_a_rank_whose_image_is_damaged_is_filled_from_others(tmp_path: Path) -> None:
    of_ranks = resume(tmp_path, damaged=(1,))
    assert [told for told, *_ in of_ranks] == [["memory", STEP, 2, [0], False]] * 4
    assert of_ranks[0][1] == weights_after(1, 2)
    assert [each[2:] for each in of_ranks] == [[True, True], [False, True], [False, False], [False, False]]


@pytest.mark.parametrize("trouble", [{"damaged": (0, 1)}, {"differing": 1}], ids=["damaged", "replicas differ"])
def test_a_step_that_no_node_can_be_trusted_with_gives_way_to_the_one_before(tmp_path: Path, trouble: Any) -> None:
    of_ranks = resume(tmp_path, **trouble)
    assert [told for told, *_ in of_ranks] == [["memory", 1, 2, [0, 1], True]] * 4
    assert [weights for _, weights, *_ in of_ranks[:2]] == [weights_after(1)] * 2
    assert [has_changed for *_, has_changed in of_ranks] == [True, True, *["damaged" in trouble] * 2]


def test_where_all_images_are_damaged_every_rank_loads_from_storage(tmp_path: Path) -> None:
    of_ranks = resume(tmp_path, damaged=(0, 1), slots="01")
    assert of_ranks == [[["durable", 1, 2, None, True], weights_after(1), True, True]] * 4


def test_an_optimizer_that_may_run_collectives_is_loaded_by_all_ranks_together(tmp_path: Path) -> None:
    of_ranks = resume(tmp_path, optimizer=CollectiveAdamW)
    assert of_ranks == [[["memory", STEP, 2, None, True], weights_after(1, 2), True, True]] * 4


def test_it_is_not_tried_without_an_image_on_the_node_of_any_rank() -> None:
    of = CheckpointId(7, 1)
    found = (ImageInfo("gone", of, 0, 0, "plan"),)
    restore: Any = SimpleNamespace(
        live=SimpleNamespace(stage=SimpleNamespace(count=1), optimizers={"": Trainer().optimizer})
    )
    assert not can_load_on_holders(restore, ImageInventory(("a", "b"), found), of)
    assert can_load_on_holders(restore, ImageInventory(("a", "gone"), found), of)
    assert not can_load_on_holders(restore, ImageInventory(("a", "gone"), found), CheckpointId(8, 1))
    restore.live.stage.count = 2
    assert not can_load_on_holders(restore, ImageInventory(("a", "gone"), found), of), "stages learn from each other"


@pytest.mark.parametrize(
    ("answers", "agree"),
    [
        ([[], []], True),
        ([[["a", 0, 0, "x"], ["a", 0, 1, "y"]], [], [["b", 1, 0, "x"]]], True),
        ([[["a", 0, 0, "x"], ["a", 0, 1, "y"]], [["b", 1, 1, "x"]]], False),
    ],
)
def test_replicas_agree_when_each_group_has_one_digest(answers: Any, agree: bool) -> None:
    assert replicas_agree(answers) is agree
