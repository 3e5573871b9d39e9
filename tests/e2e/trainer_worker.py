"""A worker with Hugging Face's Trainer: `mean` trains a plain module whose loss is a mean over samples, `sft` and `dpo` TRL's trainers."""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from elastipod.integrations.transformers import elastic_train


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of eight numbers, whose target is a fixed mixture of them."""

    def __init__(self, size: int) -> None:
        rows = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
        self._rows, self._targets = rows, rows @ torch.arange(8.0) / 8

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": self._rows[index], "labels": self._targets[index]}


class Regression(torch.nn.Module):
    """A module that knows nothing of the Trainer's token counts."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        middle = (torch.nn.Tanh(), torch.nn.Dropout(dropout))
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), *middle, torch.nn.Linear(16, 1))

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(rows).squeeze(-1) - labels).pow(2).mean()}


class Leave(TrainerCallback):  # type: ignore[misc]  # the package is not installed where mypy runs
    """Raises the elastic event in given steps, and leaves a test time to act between two steps."""

    def __init__(self, after: list[int], step_s: float) -> None:
        self._after = set(after)
        self._step_s = step_s

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        time.sleep(self._step_s)
        if state.global_step + 1 in self._after:
            self._after.clear()
            os.kill(os.getpid(), signal.SIGUSR1)


def trl_trainer(options: argparse.Namespace, settings: dict[str, Any]) -> Any:
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(f"w{(at + row) % 30}" for at in range(4 + row % 9)) for row in range(options.samples)]
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    model, common = LlamaForCausalLM(config), {"max_length": 32, "bf16": False, **settings}
    if options.kind == "sft":
        data = datasets.Dataset.from_dict({"text": texts})
        arguments = SFTConfig(options.checkpoint_dir, **common)
        return SFTTrainer(model, args=arguments, train_dataset=data, processing_class=processing)
    pairs = {"prompt": texts, "chosen": [" w1 w2 w3"] * len(texts), "rejected": [" w3 w1"] * len(texts)}
    return DPOTrainer(
        model, LlamaForCausalLM(config), args=DPOConfig(options.checkpoint_dir, **common), train_dataset=datasets.Dataset.from_dict(pairs),
        processing_class=processing,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("mean", "sft", "dpo"))
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--sample-log-dir", required=True)
    parser.add_argument("--leave-after", type=int, nargs="*", default=[])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--min-step-time", type=float, default=0.0)
    for name in ("samples", "epochs", "global-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4, "num_train_epochs": options.epochs, "learning_rate": 3e-3, "logging_steps": 1,
        "save_strategy": "epoch", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    torch.manual_seed(0)
    if options.kind != "mean":
        trainer = trl_trainer(options, settings)
    else:
        arguments = TrainingArguments(options.checkpoint_dir, **settings)
        trainer = Trainer(Regression(options.dropout), arguments, train_dataset=Rows(options.samples))
    trainer.add_callback(Leave(options.leave_after, options.min_step_time))
    elastic_train(trainer, global_batch=options.global_batch, sample_log=options.sample_log_dir)
    print(f"done: {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
