"""The sides of the data benchmark: the same windows of the same file, for one of two ranks, in shuffled order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from elastipod.data import ElasticBatches
from elastipod.data.loader import ElasticLoader
from elastipod.data.token_format import HEADER_BYTES
from elastipod.data.tokens import TokenFile, TokenWindows

SEQ_LEN, BATCH, WORLD = 1024, 8, 2
OURS, OURS_PLAIN, STATEFUL = "elastipod", "elastipod, plain dataset", "torchdata StatefulDataLoader"
TORCH, TORCH_TOKENS = "torch DataLoader", "torch DataLoader, our TokenWindows"


class ArrayWindows(Dataset[torch.Tensor]):
    """What people write by hand: windows of a numpy memory map of two-byte tokens."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r", offset=HEADER_BYTES)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1].astype(np.int64))


def token_windows(path: Path) -> Any:
    return TokenWindows(TokenFile(path), SEQ_LEN)


def open_ours(dataset: Any, workers: int, step: int = 0) -> tuple[Iterator[torch.Tensor], ElasticLoader[torch.Tensor]]:
    """Give rank 0's passes from the one after ``step`` completed steps on, and the loader to close."""
    plan = ElasticBatches(len(dataset), WORLD * BATCH)
    loader = ElasticLoader[torch.Tensor](
        dataset, plan, rank=0, world_size=WORLD, micro_batch=BATCH, start_step=step, num_workers=workers
    )
    return (data for _, passes in loader for _, data in passes), loader


def open_torch(dataset: Any, workers: int, step: int = 0) -> Iterator[torch.Tensor]:
    """The usual loader of a distributed run; a place in it is found by reading and dropping what came before."""
    sampler: Any = DistributedSampler(dataset, WORLD, 0, seed=0)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=workers)
    return islice(iter(loader), step, None)


def stateful(path: Path, workers: int) -> StatefulDataLoader[Any]:
    dataset = ArrayWindows(path)
    sampler: Any = DistributedSampler(dataset, WORLD, 0, seed=0)
    return StatefulDataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=workers)
