"""The same training as train.py with `elastipod.State`: processes outlive worlds, and the state stays in memory.

Each process writes `<log dir>/<pid>-<generation>.log` for each world that it trains in, with the lines of train.py.
Usage: train_in_memory.py [GLOBAL_BATCH]
"""

import os
import sys
import time
from pathlib import Path

IS_WARM = "torch" in sys.modules

import torch  # noqa: E402 the line above must come first
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from elastipod import ElasticBatches, State  # noqa: E402

STEP_S = 0.05  # these three as in train.py
CHECKPOINT_EVERY = 20
LAST_STEP = 1_000_000
GLOBAL_BATCH = 128


def build() -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def main() -> None:
    folder = Path(os.environ["BENCH_FOLDER"])
    logs = Path(os.environ.get("BENCH_LOGS", folder))
    torch.set_num_threads(1)
    global_batch = int(sys.argv[1]) if len(sys.argv) > 1 else GLOBAL_BATCH
    plan = ElasticBatches(LAST_STEP * global_batch, global_batch)
    state = State(
        build, wrap=DistributedDataParallel, checkpoints=folder / "checkpoints", checkpoint_every=CHECKPOINT_EVERY
    )
    generation, log = -1, None
    for step in state.steps(plan):
        if state.generation != generation:
            is_warm, generation = IS_WARM or generation >= 0, state.generation
            log = open(logs / f"{os.getpid()}-{generation}.log", "a", buffering=1)  # noqa: SIM115 as long as its world
            now = time.monotonic()  # a process may have waited for this world: it began when the world did
            log.write(f"begin {now:.6f} {int(is_warm)}\nimported {now:.6f}\n")
            log.write(f"grouped {time.monotonic():.6f} {state.rank} {state.world_size}\n")
        with step as batch:
            time.sleep(STEP_S)
            logits = state.model(torch.randn(len(batch.indices), 64))
            nn.functional.cross_entropy(logits, torch.randint(10, (len(batch.indices),))).backward()  # type: ignore[no-untyped-call]
        if step.is_done and log is not None:
            log.write(f"step {time.monotonic():.6f} {batch.step} {state.rank} {state.world_size}\n")


if __name__ == "__main__":
    main()
