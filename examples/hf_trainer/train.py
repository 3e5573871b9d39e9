"""Train a small causal language model with Hugging Face's Trainer on however many workers there are.

Two lines make it elastic: the import of `elastic_train`, and its call in place of `trainer.train()`. The model has random
weights and the data is made here, so that nothing is downloaded. Start it with `hyperpodrun train.py ...`.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from elastipod.integrations.transformers import elastic_train

VOCABULARY, LENGTH = 64, 24


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards from a start, in steps of one to three."""

    def __init__(self, size: int, sample_time: float) -> None:
        self._size, self._sample_time = size, sample_time

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self._sample_time)
        tokens = (torch.arange(LENGTH) * (1 + index % 3) + index) % VOCABULARY
        labels = tokens.clone()
        labels[: index % 7] = -100  # as prompts are; samples then differ in how many tokens count
        return {"input_ids": tokens, "labels": labels}


def main() -> None:
    options = parse_options()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)  # the same weights on every rank
    arguments = TrainingArguments(
        options.checkpoint_dir,
        per_device_train_batch_size=4,  # at most, in one pass
        num_train_epochs=options.epochs,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=options.save_steps,
        save_total_limit=2,
        enable_jit_checkpoint=options.jit,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    data = Counting(options.samples, options.sample_time)
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
    elastic_train(trainer, global_batch=options.global_batch, sample_log=options.sample_log_dir)
    if trainer.is_world_process_zero():
        print(f"done: {trainer.state.global_step} steps", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint-dir", required=True, help="shared by all workers; it resumes from what is there")
    parser.add_argument("--sample-log-dir", help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--global-batch", type=int, default=24, help="sequences per step over all workers")
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--sample-time", type=float, default=0.0, help="seconds, to slow down a demonstration")
    parser.add_argument("--jit", action="store_true", help="with the Trainer's own just-in-time checkpoint as well")
    return parser.parse_args()


if __name__ == "__main__":
    main()
