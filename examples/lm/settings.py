"""What both scripts have in common: their options, the plan of the batches, and the learning rate."""

from __future__ import annotations

import argparse
import math
import os

import torch
from corpus import Corpus

from elastipod import ElasticBatches


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Give the options of a script; it adds those that it alone has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
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
    parser.add_argument("--print-every", type=int, default=1, help="steps")
    parser.add_argument(
        "--min-step-time",
        type=float,
        default=0.0,
        help="minimum time of a step in seconds, to slow down a demonstration",
    )
    return parser


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


def prepare_torch() -> torch.device:
    """Make the same run give the same losses, and give the device of this process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
