"""Train a small language model on the Python standard library's sources, on however many workers there are.

Start it with `hyperpodrun train.py ...` (elastic), `torchrun train.py ...` or plain `python train.py ...`. The function `train`
makes it elastic: it resumes from the latest checkpoint, calls `elastic_event_detected()` once per step, and when that gives True
it saves a checkpoint and returns.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from corpus import Corpus, read_corpus
from model import ByteTransformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastipod import (
    Batch,
    CheckpointManager,
    ElasticBatches,
    SampleLog,
    accumulate,
    elastic_event_detected,
    optimizer_norm,
    report,
)


def train(options: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    corpus = read_corpus(options.seq_len, options.corpus_kib << 10)
    plan = plan_batches(options, corpus)
    model = build_model(options, device, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, plan.total_steps))

    checkpoints = CheckpointManager(options.checkpoint_dir, keep=2)
    resume = checkpoints.load_latest(model=model, optimizer=optimizer, scheduler=schedule)
    if resume and resume.extra["corpus"] != corpus.digest:
        raise SystemExit(f"{resume.path} was trained on other sources than this Python's; use another --checkpoint-dir")
    step = resume.step if resume else 0
    if resume:
        plan = plan.resumed(resume.extra["data"])
    log = SampleLog(
        options.sample_log_dir,
        plan,
        generation=checkpoints.generation,
        rank=rank,
        world_size=world_size,
        resume=resume,
    )
    if resume:
        log.loaded(resume.step, optimizer_norm(optimizer))
    if rank == 0:
        print(
            f"generation {checkpoints.generation}: {world_size} workers continue after step {step} of {plan.total_steps}",
            flush=True,
        )

    loss = resume.extra["loss"] if resume else math.nan

    def state() -> dict[str, Any]:
        """Give the content of a checkpoint of the current step."""
        extra = {"corpus": corpus.digest, "data": plan.state_dict(step), "loss": loss}
        return {"model": model, "optimizer": optimizer, "scheduler": schedule, "extra": extra, "sample_log": log}

    for batch in plan.iterate(rank, world_size):
        started = time.monotonic()
        loss = train_step(model, optimizer, corpus, batch, options.micro_batch, device)
        schedule.step()
        step = batch.step
        time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))
        samples_per_s = batch.global_size / (time.monotonic() - started)
        log.step(batch, loss)
        report(step, batch.samples_seen, loss, samples_per_s)
        if rank == 0 and (step % options.print_every == 0 or step == plan.total_steps):
            print(
                f"step {step}/{plan.total_steps} loss {loss:.4f} samples/s {samples_per_s:.1f} workers {world_size}",
                flush=True,
            )

        if elastic_event_detected():  # the same answer after the same step on every rank
            checkpoints.save(step, **state())
            log.end(step, "drained")
            if rank == 0:
                print(f"step {step} is saved; leaving, to continue at another size", flush=True)
            return
        if step % options.checkpoint_every == 0:
            checkpoints.save(step, **state())
        elif options.memory_every and step % options.memory_every == 0:
            checkpoints.save_async(step, **state(), durable=False)  # a crash resumes from here

    checkpoints.save(step, **state())
    log.end(step, "completed")
    if rank == 0:
        print(f"done: {step} steps, {plan.samples_after(step)} samples, final loss {loss:.4f}", flush=True)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    batch: Batch,
    micro_batch: int,
    device: torch.device,
) -> float:
    """Run one optimizer step and give the mean loss over the global batch. Collective."""
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for micro in accumulate(model, batch, micro_batch):
        loss = model(*corpus.batch(tuple(micro.indices), device)) * micro.weight
        loss.backward()
        total += loss.detach().double()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if batch.world_size > 1:
        dist.all_reduce(total)
    return total.item() / batch.world_size


def plan_batches(options: argparse.Namespace, corpus: Corpus) -> ElasticBatches:
    """Give the plan of the whole job. With --steps the corpus is limited to that many batches over all epochs."""
    windows = options.steps * options.global_batch // options.epochs if options.steps else len(corpus)
    if not 1 <= windows <= len(corpus):
        raise SystemExit(
            f"{options.steps} steps need {windows} windows, the corpus has {len(corpus)}; raise --corpus-kib"
        )
    return ElasticBatches(windows, options.global_batch, seed=options.seed, epochs=options.epochs)


def learning_rate(step: int, total_steps: int) -> float:
    """Give the factor on the learning rate: a short linear warm-up, then a cosine decay to a tenth."""
    warm_up = max(1, total_steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total_steps - warm_up)))


def build_model(options: argparse.Namespace, device: torch.device, world_size: int) -> nn.Module:
    """Create the same weights on every rank, then replicate or shard them."""
    torch.manual_seed(options.seed)
    model = ByteTransformer(options.dim, options.layers, options.heads, options.seq_len).to(device)
    if not dist.is_initialized():
        return model
    if options.parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp", help="replicate or shard the model")
    parser.add_argument(
        "--checkpoint-dir", required=True, help="shared by all workers; a run resumes from its latest checkpoint"
    )
    parser.add_argument("--sample-log-dir", required=True, help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--steps", type=int, default=0, help="length of the job in steps; 0: train on the whole corpus")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--global-batch", type=int, default=16, help="windows per step over all workers; stays the same after a resize"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=4, help="maximum number of windows per forward pass of one worker"
    )
    parser.add_argument("--seq-len", type=int, default=64, help="bytes per window")
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus-kib", type=int, default=4096, help="how much of the standard library to read")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps")
    parser.add_argument(
        "--memory-every",
        type=int,
        default=0,
        help="steps between memory checkpoints, from which a crash resumes; 0: none",
    )
    parser.add_argument("--print-every", type=int, default=1, help="steps")
    parser.add_argument(
        "--min-step-time",
        type=float,
        default=0.0,
        help="minimum time of a step in seconds, to slow down a demonstration",
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        train(options, device, rank=0, world_size=1)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
