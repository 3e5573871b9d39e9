"""How many samples a fate loses or repeats: ours by the audit of its logs, the usual sampler's by counting what it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tests.e2e.data_run import CHECKPOINT_EVERY, EPOCHS, GLOBAL_BATCH, SAMPLES, Stay
from torch.utils.data import DistributedSampler

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

USUAL = "DistributedSampler"
Position = tuple[int, int]  # the epoch, and the batch of it that comes next
START: Position = (0, 0)


def in_logs(logs: Path) -> int:
    """Count the samples that the final weights of a job contain too often or never. Raises UnusableLogsError."""
    found = audit(read_logs(logs))
    return found.duplicates + found.missing + found.foreign


def with_usual_sampler(fate: list[Stay], seed: int) -> int:
    """Count the same for torch's sampler through the same fate: changes of size, and crashes that go back to a checkpoint.

    The ranks share the global batch, and a loop that resumes skips as many batches of the epoch as were trained.
    """
    trained: list[tuple[Position, list[int]]] = []  # the steps that the weights contain: where each began, its samples
    position = START
    for number, stay in enumerate(fate):
        is_last = number == len(fate) - 1
        steps = _steps(stay.world_size, position, seed)
        for began, indices in steps if is_last else islice(steps, stay.leave_after - len(trained)):
            trained.append((began, indices))
        if stay.dies is not None:
            del trained[len(trained) - len(trained) % CHECKPOINT_EVERY :]
        position = (trained[-1][0][0], trained[-1][0][1] + 1) if trained else START
    counts = Counter((epoch, index) for (epoch, _), indices in trained for index in indices)
    lost = EPOCHS * SAMPLES - len(counts)
    return lost + sum(count - 1 for count in counts.values())


def _steps(world_size: int, position: Position, seed: int) -> Iterator[tuple[Position, list[int]]]:
    """Give the steps of one world from a position to the end: where each begins, and the samples of all ranks."""
    first, skipped = position
    size = max(1, GLOBAL_BATCH // world_size)  # of one rank
    for epoch in range(first, EPOCHS):
        shares: list[list[int]] = []
        for rank in range(world_size):
            sampler: DistributedSampler[int] = DistributedSampler(
                range(SAMPLES),  # type: ignore[arg-type] # it asks for the length alone
                world_size,
                rank,
                seed=seed,
            )
            sampler.set_epoch(epoch)
            shares.append(list(sampler))
        for batch in range(skipped if epoch == first else 0, -(-len(shares[0]) // size)):
            yield (epoch, batch), [index for share in shares for index in share[batch * size : (batch + 1) * size]]
