"""Fine-tune a small causal language model by LoRA, with TRL's SFTTrainer or DPOTrainer, on however many workers there are.

Two lines make it elastic: the import of `elastic_train`, and its call in place of `trainer.train()`. The model has random
weights and the data is made here, so that nothing is downloaded. Start it with `hyperpodrun train.py --method=sft ...`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from elastipod.integrations.transformers import elastic_train

WORDS = 30


def make_trainer(options: argparse.Namespace) -> Any:
    names = ["<pad>", "<eos>", *(f"w{number}" for number in range(WORDS))]
    vocabulary = {name: number for number, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = {"pad_token": "<pad>", "eos_token": "<eos>"}
    common: dict[str, Any] = {
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, **specials),
        "peft_config": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
        "callbacks": [Slow(options.min_step_time)],
    }
    settings: dict[str, Any] = {
        "output_dir": options.checkpoint_dir,
        "per_device_train_batch_size": 4,  # at most, in one pass
        "num_train_epochs": options.epochs,
        "learning_rate": 2e-2,
        "logging_steps": 1,
        "save_strategy": "epoch",
        "max_length": 32,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
    }
    texts = [" ".join(f"w{(at + row) % WORDS}" for at in range(4 + row % 9)) for row in range(options.samples)]
    model = base_model()
    if options.method == "sft":
        data = datasets.Dataset.from_dict({"text": texts})
        return SFTTrainer(model, args=SFTConfig(**settings), train_dataset=data, **common)
    pairs = {"prompt": texts, "chosen": [" w1 w2 w3"] * len(texts), "rejected": [" w3 w1"] * len(texts)}
    # Without the adapter the model is its own reference.
    return DPOTrainer(model, args=DPOConfig(**settings), train_dataset=datasets.Dataset.from_dict(pairs), **common)


def base_model() -> LlamaForCausalLM:
    """Give the frozen weights, the same on every rank and in every generation: checkpoints hold the adapter alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config)


class Slow(TrainerCallback):
    """Slows down a demonstration."""

    def __init__(self, step_time: float) -> None:
        self._step_time = step_time

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        time.sleep(self._step_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint-dir", required=True, help="shared by all workers; it resumes from what is there")
    parser.add_argument("--sample-log-dir", help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--method", choices=("sft", "dpo"), default="sft")
    parser.add_argument("--samples", type=int, default=3840)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=12, help="sequences or pairs per step over all workers")
    parser.add_argument("--min-step-time", type=float, default=0.0, help="seconds; slows down a demonstration")
    options = parser.parse_args()
    trainer = make_trainer(options)
    elastic_train(trainer, global_batch=options.global_batch, sample_log=options.sample_log_dir)
    if trainer.is_world_process_zero():
        print(f"done: {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
