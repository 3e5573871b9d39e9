"""New processes of a state that a drain left in the memory of two nodes: four ranks resume, and two of them are on new nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import run_ranks
from tests.unit.in_memory.models import build
from torch.nn.parallel import DistributedDataParallel

from elastipod import ElasticBatches, State
from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.in_memory import state_transfer

PLAN = ElasticBatches(dataset_size=48, global_batch=8, seed=1)  # two samples for each rank, as a BatchNorm needs
STOPPED_AT = 4
DATA = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))


def train(state: State, *, until: int = 0) -> list[int]:
    """Train to the end, or stop after a step that is saved; give the steps."""
    done = []
    for step in state.steps(PLAN):
        with step as batch:
            loss = state.model(DATA[list(batch.indices)]).square().mean()
            loss.backward()
            step.loss = loss.item()
        done.append(batch.step)
        if batch.step == until:
            state._save(until, waits=True)
            break
    return done


def be_in_world(root: Path, rank: int, size: int, port: int, generation: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ELASTIPOD_GENERATION": str(generation), "ELASTIPOD_MEMORY_DIR": str(root / f"memory of rank {rank}"),
    }  # fmt: skip


@pytest.mark.parametrize("checkpoint_every", [3, 0], ids=["saves often", "must write what the drain left"])
def test_the_ranks_of_new_nodes_are_filled_from_those_that_have_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int
) -> None:
    first, second = free_port(), free_port()
    transfer = state_transfer.transfer
    filled: list[list[int]] = []

    def noted(members: Any, donors: Sequence[int], receivers: Sequence[int], *more: Any, **named: Any) -> Any:
        filled.append([*donors, *receivers])
        return transfer(members, donors, receivers, *more, **named)

    monkeypatch.setattr("elastipod.in_memory.memory_state.transfer", noted)

    def state() -> State:
        return State(
            build,
            wrap=DistributedDataParallel,
            checkpoints=tmp_path / "checkpoints",
            checkpoint_every=checkpoint_every,
            sample_log=tmp_path / "samples",
        )

    def body(rank: int) -> Any:
        before = []
        if rank < 2:
            be_in_world(tmp_path, rank, 2, first, 1)
            before = train(state(), until=STOPPED_AT)
        filled.clear()
        be_in_world(tmp_path, rank, 4, second, 2)
        again = state()
        done = train(again)
        return [before, done, filled, again._members.digests()]

    of_ranks = run_ranks(4, body)
    saved = list(range(1, STOPPED_AT + 1))
    assert [before for before, *_ in of_ranks] == [saved, saved, [], []]
    assert [done for _, done, *_ in of_ranks] == [list(range(STOPPED_AT + 1, PLAN.total_steps + 1))] * 4
    fills = [[0, 1, 2, 3]] if checkpoint_every else []
    assert [each for _, _, each, _ in of_ranks] == [fills] * 4
    assert len({json.dumps(digests, sort_keys=True) for *_, digests in of_ranks}) == 1
    assert audit(read_logs(tmp_path / "samples")).exact
