"""Runs in pods: training as written for the original agent, with its event and a checkpoint file, and nothing of ours.

Usage: original_training.py FOLDER SECONDS_PER_STEP. Every rank appends a line for each step to FOLDER/steps-<rank>. The
number of the last step is read from FOLDER/last, which may be written at any time before it is reached.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected

SAVE_EVERY = 20


def last_step(folder: Path) -> float:
    """Give the last step; infinity while nobody said."""
    try:
        return int((folder / "last").read_text())
    except FileNotFoundError:
        return float("inf")


def main() -> None:
    """Train from the checkpoint, if there is one, to the last step or the event."""
    folder, step_s = Path(sys.argv[1]), float(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    module = torch.nn.Linear(8, 1)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved["model"])
        step = saved["step"]
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    where = {"restart": int(os.environ["JOB_RESTART_COUNT"]), "world_size": world_size, "torch": torch.__version__}

    def save() -> None:
        if rank == 0:
            torch.save({"step": step, "model": module.state_dict()}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        dist.barrier()

    with (folder / f"steps-{rank}").open("a", buffering=1) as log:
        while step < last_step(folder):
            began = time.monotonic()
            sample = torch.randn(4, 8)
            loss = (model(sample) - sample.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            log.write(json.dumps({**where, "step": step}) + "\n")
            has_event = elastic_event_detected()
            if has_event or step % SAVE_EVERY == 0:
                save()
            if has_event:
                print(f"rank {rank} leaves after step {step}", flush=True)
                break
            time.sleep(max(0.0, step_s - (time.monotonic() - began)))
    dist.destroy_process_group()


main()
