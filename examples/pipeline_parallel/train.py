"""Train a small transformer as a pipeline of two stages, copied over the data-parallel axis, which changes with the size of the job.

Start it with `hyperpodrun train.py ...` (elastic) or `torchrun train.py ...`.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

from elastipod import (
    CheckpointManager,
    ElasticBatches,
    SampleLog,
    accumulate_padded,
    build_mesh,
    elastic_event_detected,
    report,
)

DIM, LAYERS = 32, 4
MICRO_BATCHES, MICRO_BATCH = 4, 2  # of one run through the pipeline, and rows of each; the same at every size


class Classifier(nn.Module):
    """Reads a digit as eight rows of eight pixels. A stage has some of its parts, under the names that they have in the whole."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights at every size
        layers = {str(at): nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, 0.0, batch_first=True) for at in range(LAYERS)}
        embed, head = nn.Linear(8, DIM), nn.Linear(8 * DIM, 10)
        own = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        self.embed = embed if stage == 0 else None
        self.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if int(name) in own})
        self.head = head if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x.flatten(1)) if self.head is not None else x


def weighted_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """targets: label and weight of each row."""
    return cross_entropy(outputs, targets[:, 0].long(), reduction="none") @ targets[:, 1]


def pipeline(mesh: DeviceMesh) -> tuple[nn.Module, ScheduleGPipe]:
    stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    model = fully_shard(Classifier(stage, stages), mesh=mesh["dp"])
    runs = PipelineStage(model, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    return model, ScheduleGPipe(runs, MICRO_BATCHES, loss_fn=weighted_loss, scale_grads=False)


def train(options: argparse.Namespace) -> None:
    mesh = build_mesh(pp=2, device_type="cpu")
    images, labels = read_digits()
    plan = ElasticBatches(len(images), 16, epochs=options.epochs)
    model, schedule = pipeline(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.total_steps, eta_min=1e-3)

    checkpoints = CheckpointManager(options.checkpoint_dir, mesh=mesh)  # the stages have different tensors
    members = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    resume = checkpoints.load_latest(**members)
    if resume:
        plan = plan.resumed(resume.extra["data"])
    log = SampleLog(
        options.sample_log_dir,
        plan,
        generation=checkpoints.generation,
        dp_mesh=mesh,  # one rank of each pipeline writes
        resume=resume,
    )
    if dist.get_rank() == 0:
        print(f"{mesh['pp'].size()} stages, {mesh['dp'].size()} pipelines", flush=True)

    for batch in plan.iterate(dp_mesh=mesh):  # the stages of one pipeline train the same samples
        started = time.monotonic()
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []  # filled on the last stage
        for part in accumulate_padded(model, batch, size=MICRO_BATCHES * MICRO_BATCH):
            chosen = list(part.indices)
            targets = torch.stack([labels[chosen].float(), torch.tensor(part.row_weights)], dim=1)
            first, of_pass = mesh.get_local_rank("pp") == 0, []
            schedule.step(*([images[chosen]] if first else []), target=None if first else targets, losses=of_pass)
            losses += of_pass
        optimizer.step()
        scheduler.step()
        total = sum(losses, torch.zeros(())).detach()
        dist.all_reduce(total)
        mean = total.item() / batch.world_size
        time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))
        log.step(batch, mean)
        report(batch.step, batch.samples_seen, mean)

        is_last = batch.step == plan.total_steps
        leaving = not is_last and elastic_event_detected()
        if leaving or is_last or batch.step % options.checkpoint_every == 0:
            extra = {"data": plan.state_dict(batch.step)}
            checkpoints.save(batch.step, **members, extra=extra, sample_log=log)
        if leaving or is_last:
            log.end(batch.step, "drained" if leaving else "completed")
            if dist.get_rank() == 0:
                print(f"left after step {batch.step}, loss {mean:.4f}", flush=True)
        if leaving:
            return


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Give 300 images as float32, shape (300, 8, 8), in 0..1, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:300], dtype=torch.float32).view(-1, 8, 8) / 16
    return images, torch.tensor(labels[:300], dtype=torch.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint-dir", required=True, help="shared by all workers")
    parser.add_argument("--sample-log-dir", required=True, help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--min-step-time", type=float, default=0.0, help="seconds; slows down a demonstration")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
