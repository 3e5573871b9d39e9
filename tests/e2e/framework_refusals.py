"""What the integrations refuse, with the real packages: prints each case and its sentence as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import trl
from accelerate import Accelerator, DistributedType
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler
from transformers import Trainer, TrainingArguments

from elastipod.errors import ElastipodError
from elastipod.integrations.accelerate import _check as check_accelerate
from elastipod.integrations.accelerate import elastic_steps
from elastipod.integrations.lightning import check_trainer as check_lightning
from elastipod.integrations.lightning import elastic_fit
from elastipod.integrations.transformers import check_trainer as check_hf_trainer
from elastipod.integrations.transformers import elastic_train


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(1)])


class OwnOrder(Trainer):  # type: ignore[misc]  # the package is not installed where mypy runs
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


def trainer(data: Any = None, kind: Any = Trainer, **settings: Any) -> Any:
    arguments = TrainingArguments(sys.argv[1], use_cpu=True, report_to="none", **{"max_steps": -1, **settings})
    return kind(torch.nn.Linear(1, 1), arguments, train_dataset=data or Rows())


def train(global_batch: int = 6, data: Any = None, options: Any = None, **settings: Any) -> None:
    elastic_train(trainer(data, **settings), global_batch=global_batch, **(options or {}))


def loop(loader: Any = None, scheduler: Any = None, accumulation: int = 1, prepares: bool = False) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    if scheduler:
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        scheduler = accelerator.prepare(scheduler)
    loader = DataLoader(Rows(), batch_size=2) if loader is None else loader
    if prepares:
        loader = accelerator.prepare(loader)
    next(elastic_steps(accelerator, loader, model, optimizer, scheduler, global_batch=6, checkpoints=sys.argv[1]))


class Module(L.LightningModule):  # type: ignore[misc]  # the package is not installed where mypy runs
    automatic_optimization = True

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass


class ManualModule(Module):
    automatic_optimization = False


class ModuleWithoutLoss(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters())


def fit(loader: Any = None, module: Any = None, options: Any = None, **settings: Any) -> None:
    loader = DataLoader(Rows(), batch_size=2) if loader is None else loader
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
    }
    lightning_trainer = L.Trainer(**{"max_epochs": 1, **quiet, **settings})
    elastic_fit(
        lightning_trainer, module or Module(), loader, global_batch=6, checkpoints=sys.argv[1], **(options or {})
    )


def shard_trainer(*, version: int = 2, deepspeed: bool = False) -> None:
    """Check a Trainer that says it is set up for another strategy, which would need a device that is not here."""
    made = trainer()
    made.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=version)
    made.is_deepspeed_enabled = deepspeed
    check_hf_trainer(made)


def trainer_of_trl(name: str) -> None:
    """Check a trainer of TRL with the settings of a plain one: which samples it trains depends on its class alone."""
    made = trainer()
    made.__class__ = getattr(trl, name)
    check_hf_trainer(made)


def trainer_with_devices(count: int) -> None:
    made = trainer()
    made.args._n_gpu = count
    check_hf_trainer(made)


def accelerator_of(kind: str) -> None:
    """Check an accelerator that says that it trains with something which would need devices that are not here."""
    accelerator = SimpleNamespace(distributed_type=DistributedType[kind])
    check_accelerate(accelerator, None, torch.nn.Linear(1, 1), None)


def backward(times: int) -> None:
    """Train one step whose passes call `step.backward` so many times."""
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loader, where = DataLoader(Rows(), batch_size=2), f"{sys.argv[1]}-{times}"
    steps = elastic_steps(accelerator, loader, model, optimizer, global_batch=6, checkpoints=where)
    step = next(steps)
    for inputs in step:
        for _ in range(times):
            step.backward(model(inputs).mean())


def strategy_of_lightning(name: str) -> None:
    check_lightning(SimpleNamespace(strategy=type(name, (), {})()), Module(), None)


CASES: dict[str, Callable[[], None]] = {
    "trainer: stream": lambda: train(data=Stream(), max_steps=5),
    "trainer: grouped": lambda: train(train_sampling_strategy="group_by_length"),
    "trainer: auto_find_batch_size": lambda: train(auto_find_batch_size=True),
    "trainer: ignore_data_skip": lambda: train(ignore_data_skip=True),
    "trainer: dataloader_drop_last": lambda: train(dataloader_drop_last=True),
    "trainer: average_tokens_across_devices": lambda: train(average_tokens_across_devices=False),
    "trainer: save_only_model": lambda: train(save_only_model=True),
    "trainer: resume_from_checkpoint": lambda: train(options={"resume_from_checkpoint": True}),
    "trainer: one checkpoint": lambda: train(save_total_limit=1),
    "trainer: own order": lambda: train(kind=OwnOrder),
    "trainer: FSDP1": lambda: shard_trainer(version=1),
    "trainer: DeepSpeed": lambda: shard_trainer(deepspeed=True),
    "trainer: several devices": lambda: trainer_with_devices(2),
    "trainer: GRPO": lambda: trainer_of_trl("GRPOTrainer"),
    "trainer: RLOO": lambda: trainer_of_trl("RLOOTrainer"),
    "trainer: KTO": lambda: trainer_of_trl("KTOTrainer"),
    "accelerate: DeepSpeed": lambda: accelerator_of("DEEPSPEED"),
    "accelerate: Megatron-LM": lambda: accelerator_of("MEGATRON_LM"),
    "accelerate: no backward": lambda: backward(0),
    "accelerate: backward twice": lambda: backward(2),
    "accelerate: stream": lambda: loop(DataLoader(Stream(), batch_size=2)),
    "accelerate: batch_sampler": lambda: loop(DataLoader(Rows(), batch_sampler=[[0], [1]])),
    "accelerate: subset": lambda: loop(DataLoader(Rows(), batch_size=2, sampler=SubsetRandomSampler([0, 1]))),
    "accelerate: drop_last": lambda: loop(DataLoader(Rows(), batch_size=2, drop_last=True)),
    "accelerate: prepared loader": lambda: loop(prepares=True),
    "accelerate: prepared scheduler": lambda: loop(scheduler=True),
    "accelerate: accumulation": lambda: loop(accumulation=4),
    "lightning: stream": lambda: fit(DataLoader(Stream(), batch_size=2)),
    "lightning: batch_sampler": lambda: fit(DataLoader(Rows(), batch_sampler=[[0], [1]])),
    "lightning: subset": lambda: fit(DataLoader(Rows(), batch_size=2, sampler=SubsetRandomSampler([0, 1]))),
    "lightning: drop_last": lambda: fit(DataLoader(Rows(), batch_size=2, drop_last=True)),
    "lightning: no loader": lambda: fit([torch.ones(1)]),
    "lightning: accumulation": lambda: fit(accumulate_grad_batches=3),
    "lightning: limit": lambda: fit(limit_train_batches=4),
    "lightning: no end": lambda: fit(max_epochs=-1),
    "lightning: no loss": lambda: fit(module=ModuleWithoutLoss()),
    "lightning: manual": lambda: fit(module=ManualModule()),
    "lightning: FSDP1": lambda: strategy_of_lightning("FSDPStrategy"),
    "lightning: DeepSpeed": lambda: strategy_of_lightning("DeepSpeedStrategy"),
    "lightning: ckpt_path": lambda: fit(options={"ckpt_path": "last"}),
}


def sentence(case: Callable[[], None]) -> str:
    try:
        case()
    except ElastipodError as error:
        return str(error)
    return "not refused"


if __name__ == "__main__":
    print(json.dumps({name: sentence(case) for name, case in CASES.items()}))
