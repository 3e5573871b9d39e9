"""Train a small Llama 3 with torchtitan's Trainer and FSDP2 on however many workers there are.

Three of its parts are replaced: the loader, which follows a plan that holds at any size; the checkpoints, which are marked when
they are complete; and the end of a step, where the job saves and leaves at an event. Model, parallelism, optimizer and the
files of checkpoints are torchtitan's own. The data is made here. Start it with `hyperpodrun train.py ...`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

from elastipod import ElasticBatches, SampleLog, elastic_event_detected, plan_batch, report
from elastipod.integrations.marks import MarkedCheckpoints

if not torch.accelerator.is_available():
    # torchtitan takes an accelerator for granted. Without one it gets the CPU, before its other modules look for the device.
    answers: dict[str, Any] = {"current_device": 0, "device_count": 1, "get_device_name": "CPU", "memory_stats": {}}
    answers["get_device_properties"] = SimpleNamespace(total_memory=1 << 30)
    answers |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"))
    calls = {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**calls)

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import BaseLogger
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

LENGTH = 16  # tokens of a sample


class ElasticLoader(BaseDataLoader):
    """Gives each rank its samples of the global batch, in passes of one shape: what is missing is padding without labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        plan: ElasticBatches
        passes: int

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.plan, self.passes, self.size = config.plan, config.passes, local_batch_size
        self.rank, self.world_size, self.step = dp_rank, dp_world_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.plan.iterate(self.rank, self.world_size):
            self.batch, self.step = batch, batch.step
            for first in range(0, self.passes * self.size, self.size):
                rows = [sample(index) for index in batch.indices[first : first + self.size]]
                tokens = torch.stack([*rows, *[torch.full((LENGTH + 1,), IGNORE_INDEX)] * (self.size - len(rows))])
                yield {"input": tokens[:, :-1].clamp(min=0)}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": json.dumps(self.plan.state_dict(self.step))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.plan = self.plan.resumed(json.loads(state_dict["position"]))
        self.step = self.plan.first_step  # the job may have to leave before it makes another one


class MarkedManager(CheckpointManager):
    """torchtitan's checkpoints, each marked after all ranks have written it; only marked ones are loaded."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.marked = MarkedCheckpoints(self.folder, re.compile(r"step-(\d+)"))
        self.newest = self.marked.newest()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        path = Path(self._create_checkpoint_id(curr_step))
        self.marked.begin(path)
        super()._save(curr_step, last_step)
        self.marked.finish(path, curr_step, self.states["dataloader"].state_dict())
        self.marked.prune(keep=2)
        return True

    def _find_load_step(self, folder: str = "") -> int:
        return self.newest.step if self.newest else -1


class ElasticTrainer(Trainer):
    is_leaving = False

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        self.is_leaving = elastic_event_detected()
        if self.is_leaving:
            self.checkpointer.save(self.step, last_step=True)
        return not self.is_leaving


class Reports(BaseLogger):
    """Receives the numbers of each step, and tells the agent and the sample log."""

    def __init__(self, loader: ElasticLoader, log: SampleLog, min_step_time: float) -> None:
        self._loader, self._log, self._min_step_time = loader, log, min_step_time
        self.loss: float | None = None  # of the newest step; a job that is started again after its end makes none

    def log(self, metrics: dict[str, Any], step: int) -> None:
        time.sleep(self._min_step_time)
        self.loss = metrics["loss_metrics/global_avg_loss"]
        self._log.step(self._loader.batch, self.loss)
        report(step, self._loader.batch.samples_seen, self.loss)


class NoTokenizer(BaseTokenizer):
    """The samples are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def sample(index: int) -> torch.Tensor:
    """Give a sequence that counts upwards from a start, in steps of one to three."""
    return (torch.arange(LENGTH + 1) * (1 + index % 3) + index) % 64


def configure(options: argparse.Namespace, plan: ElasticBatches) -> Trainer.Config:
    """Give torchtitan's configuration of its small Llama 3, for this world size."""
    split = plan_batch(options.global_batch, int(os.environ["WORLD_SIZE"]), max_micro_batch=4)
    config = llama3_debugmodel()
    config.dataloader = ElasticLoader.Config(plan=plan, passes=split.passes)
    config.training.local_batch_size = split.micro_batch
    config.training.global_batch_size = split.micro_batch * split.passes * split.data_parallel
    config.training.steps, config.training.seq_len = plan.total_steps, LENGTH
    config.training.mixed_precision_param = "float32"
    config.dump_folder = str(options.checkpoint_dir.parent)
    config.checkpoint = MarkedManager.Config(
        enable=True,
        folder=options.checkpoint_dir.name,
        interval=options.checkpoint_every,
        keep_latest_k=0,  # all: it would count checkpoints that are not complete
        last_save_model_only=False,  # the last one before a resize is the one to resume from
    )
    config.tokenizer, config.loss = NoTokenizer.Config(), CrossEntropyLoss.Config(global_vocab_size=2048)
    config.metrics.log_freq, config.validator.enable, config.debug.seed = 1, False, 0
    model = config.model_spec.model
    del model.layers[2:]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # torchtitan's others are compiled
    return config


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="shared by all workers")
    parser.add_argument("--sample-log-dir", required=True, help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=24, help="sequences per step over all workers")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--min-step-time", type=float, default=0.0, help="seconds, to slow down a demonstration")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    plan = ElasticBatches(options.samples, options.global_batch, epochs=options.epochs)
    trainer = ElasticTrainer(configure(options, plan))
    loader, checkpoints = trainer.dataloader, trainer.checkpointer
    place = {"rank": loader.rank, "world_size": loader.world_size, "resume": checkpoints.newest}
    log = SampleLog(options.sample_log_dir, plan, generation=checkpoints.marked.generation, **place)
    for module in trainer.model_parts[0].modules() if trainer.device.type == "cpu" else ():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also multiplies, as NCCL has
    trainer.metrics_processor.logger = reports = Reports(loader, log, options.min_step_time)
    trainer.train()
    log.end(trainer.step, "drained" if trainer.is_leaving else "completed")
    if loader.rank == 0 and not trainer.is_leaving:
        loss = "" if reports.loss is None else f", loss {reports.loss:.6f}"
        print(f"done: {trainer.step} steps{loss}", flush=True)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
