"""A save to which only some ranks pass a sample log: refused on all of them, since the others' part of it would never come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import elastipod
from elastipod.checkpoint import CheckpointManager

RANKS = 3
REFUSED = (
    "sample_log was passed on ranks 0,2 and not on rank 1; pass one on every rank (SampleLog(..., writes=False) where another rank "
    "logs the samples), or on none"
)


def trained(*, is_sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("is_sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("is_async", [False, True], ids=["save", "save_async"])
def test_every_rank_refuses_it_and_can_save_afterwards(tmp_path: Path, *, is_sharded: bool, is_async: bool) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, RANKS, port):
            model, optimizer = trained(is_sharded=is_sharded)
            plan = elastipod.ElasticBatches(12, 3)
            with (
                CheckpointManager(tmp_path / "checkpoints", memory=False) as checkpoints,
                elastipod.SampleLog(
                    tmp_path / "samples", plan, generation=checkpoints.claim(), rank=rank, world_size=RANKS
                ) as log,
            ):
                save = checkpoints.save_async if is_async else checkpoints.save
                refused = raised_by(
                    lambda: save(1, model=model, optimizer=optimizer, sample_log=None if rank == 1 else log)
                )
                return [refused, Path(checkpoints.save(1, model=model, optimizer=optimizer, sample_log=log)).name]

    assert run_ranks(RANKS, body) == [[["CheckpointError", REFUSED], "step-0000000001-gen-000001"]] * RANKS
