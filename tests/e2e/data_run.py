"""A job of `data_worker.py` that is resized, drained and killed at given steps."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.torch_fork_server import TorchForkServer
from tests.e2e.training_run import REPOSITORY, TrainingRun, wait_until

from elastipod.data.tokens_command import build

SAMPLES, EPOCHS, GLOBAL_BATCH = 331, 3, 14
STEPS = 3 * 24  # an epoch has 23 full batches and one of 9 samples
CHECKPOINT_EVERY = 4


@dataclass(frozen=True, slots=True)
class Stay:
    """One generation: its world, the step after which it leaves, and the rank that dies there instead, if any."""

    world_size: int
    leave_after: int
    dies: int | None = None


def stays(seed: int, *, resizes: int = 10, kills: bool = True) -> list[Stay]:
    """Draw a fate: so many changes of size at random steps; some are crashes, which go back to the last checkpoint."""
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(1, STEPS), resizes))
    found: list[Stay] = []
    for cut in [*cuts, STEPS]:
        world_size = chance.choice([size for size in (1, 2, 3, 4) if not found or size != found[-1].world_size])
        dies = chance.randrange(world_size) if kills and cut < STEPS and chance.random() < 0.3 else None
        found.append(Stay(world_size, cut, dies))
    return found


class DataRun:
    """The job, generation after generation, in one folder."""

    def __init__(self, fork_server: TorchForkServer, folder: Path, mode: str) -> None:
        folder.mkdir(parents=True)
        tokens = folder / "corpus.tokens"
        build(tokens, sorted((REPOSITORY / "agent" / "elastipod").glob("*.py")))
        self._orders = orders_of(Stay(1, STEPS))
        arguments = [f"--mode={mode}", f"--tokens={tokens}", f"--samples={SAMPLES}", f"--epochs={EPOCHS}"]
        arguments += [f"--global-batch={GLOBAL_BATCH}", f"--checkpoint-every={CHECKPOINT_EVERY}"]
        script = REPOSITORY / "tests" / "e2e" / "data_worker.py"
        self.run = TrainingRun(fork_server, folder / "job", script, arguments, self._orders)

    def play(self, fate: list[Stay]) -> None:
        for stay in fate:
            self._orders.update(orders_of(stay))
            self.run.start(stay.world_size)
            if stay.dies is None:
                self.run.finish()
                continue
            worker = self.run.workers[stay.dies]
            wait_until(lambda worker=worker: worker.poll() is not None, f"rank {stay.dies} kills itself")  # type: ignore[misc]
            assert worker.returncode == -signal.SIGKILL, self.run.output(stay.dies)
            self.run.kill(stay.dies)


def orders_of(stay: Stay) -> dict[str, str]:
    """Give what a generation is told by its environment."""
    if stay.dies is None:
        return {"LEAVE_AFTER": str(stay.leave_after), "DIE_AFTER": "0", "DIE_RANK": "0"}
    return {"LEAVE_AFTER": str(STEPS), "DIE_AFTER": str(stay.leave_after), "DIE_RANK": str(stay.dies)}
