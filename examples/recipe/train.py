"""Train a classifier of handwritten digits as a recipe says, with the configuration of the present size at each start.

`elastipod recipe render` puts one configuration for each size into a ConfigMap, which the job mounts at /config. Start it with
`hyperpodrun train.py --config-path=/config`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elastipod import (
    CheckpointManager,
    ElasticBatches,
    ElasticRecipe,
    SampleLog,
    accumulate,
    elastic_event_detected,
    present_config,
    report,
)


def train(options: argparse.Namespace) -> None:
    file = present_config(options.config_path)  # chosen again at each start
    config = yaml.safe_load(file.read_text())
    arguments = config["training_config"]["training_args"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    recipe = ElasticRecipe.from_config(config)
    nodes = config["trainer"]["num_nodes"]
    batch_plan = recipe.batch_at(nodes, world_size // nodes)

    images, labels = read_digits()
    plan = ElasticBatches(len(images), batch_plan.global_batch, epochs=arguments["num_train_epochs"])
    torch.manual_seed(0)  # the same weights on every rank
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments["learning_rate"], eps=1e-6)

    results = Path(config["run"]["results_dir"])
    checkpoints = CheckpointManager(results / "checkpoints")
    resume = checkpoints.load_latest(model=model, optimizer=optimizer)
    if resume:
        plan = plan.resumed(resume.extra["data"])
    log = SampleLog(
        results / "samples", plan, generation=checkpoints.generation, rank=rank, world_size=world_size, resume=resume
    )
    if rank == 0:
        print(f"{file.name}: {nodes} nodes, parts of {sorted(set(batch_plan.local_sizes))} samples", flush=True)

    for batch in plan.iterate(rank, world_size, local_sizes=batch_plan.local_sizes):
        started = time.monotonic()
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in accumulate(model, batch, size=arguments["micro_train_batch_size"]):
            chosen = list(part.indices)
            loss = cross_entropy(model(images[chosen]), labels[chosen]) * part.weight
            loss.backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))
        log.step(batch, total.item() / world_size)
        report(batch.step, batch.samples_seen, total.item() / world_size)

        is_last = batch.step == plan.total_steps
        leaving = not is_last and elastic_event_detected()
        if leaving or is_last or batch.step % options.checkpoint_every == 0:
            place = {"data": plan.state_dict(batch.step)}
            checkpoints.save(batch.step, model=model, optimizer=optimizer, extra=place, sample_log=log)
        if leaving or is_last:
            log.end(batch.step, "drained" if leaving else "completed")
            if rank == 0:
                print(f"left after step {batch.step}, loss {total.item() / world_size:.4f}", flush=True)
        if leaving:
            return


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Give 300 images as float32, shape (300, 64), in 0..1, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels[:300], dtype=torch.float32) / 16, torch.tensor(labels[:300], dtype=torch.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config-path", default="/config", help="folder with the configurations of the recipe")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--min-step-time", type=float, default=0.1, help="seconds; slows down a demonstration")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
