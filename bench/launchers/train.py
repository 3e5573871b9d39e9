"""The training script that every launcher of the benchmark runs: a small DDP model, and a line in a log for every step.

Each process writes `<log dir>/<pid>.log`; a line is a word, the monotonic clock of this machine in seconds, and what belongs to
the word: `begin <is torch loaded already>`, `imported`, `grouped <rank> <world size>`, `step <number> <rank> <world size>`.
The log dir is BENCH_LOGS, or else BENCH_FOLDER, which holds the checkpoint.
The clock is one for all processes of a machine, so that lines of different processes can be compared.
"""

import os
import sys
import time
from pathlib import Path

BEGUN = time.monotonic()
IS_WARM = "torch" in sys.modules

import torch  # noqa: E402 the clock comes first
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

try:  # each agent's own package answers to this name; torchrun has none and never asks
    from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
except ImportError:

    def elastic_event_detected() -> bool:
        return False


try:  # to the watch for hangs of our agent; no peer has one that takes reports
    from elastipod import report
except ImportError:

    def report(step: int, samples: int) -> None:  # type: ignore[misc]
        pass


IMPORTED = time.monotonic()
STEP_S = 0.05  # sleep in every step, in the place of a larger model's work
CHECKPOINT_EVERY = 20  # steps
LAST_STEP = 1_000_000
BATCH = 32  # samples of each rank in a step


def main() -> None:
    folder = Path(os.environ["BENCH_FOLDER"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logs = Path(os.environ.get("BENCH_LOGS", folder))
    with open(logs / f"{os.getpid()}.log", "a", buffering=1) as log:
        log.write(f"begin {BEGUN:.6f} {int(IS_WARM)}\nimported {IMPORTED:.6f}\n")
        log.write(f"grouped {time.monotonic():.6f} {rank} {world}\n")
        train(folder / "checkpoint.pt", log, rank, world)
    dist.destroy_process_group()


def train(checkpoint, log, rank, world) -> None:  # type: ignore[no-untyped-def] # runs with torch of any age
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < LAST_STEP:
        time.sleep(STEP_S)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(torch.randn(BATCH, 64)), torch.randint(10, (BATCH,))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        log.write(f"step {time.monotonic():.6f} {step} {rank} {world}\n")
        report(step, step * BATCH * world)
        is_asked_to_leave = elastic_event_detected()
        if rank == 0 and (is_asked_to_leave or step % CHECKPOINT_EVERY == 0):
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
        if is_asked_to_leave:
            return


if __name__ == "__main__":
    main()
