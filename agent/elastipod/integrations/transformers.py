"""Elastic training with Hugging Face's Trainer and its subclasses (TRL's too): `elastic_train` in place of `Trainer.train`.

The Trainer keeps its loop, its wrappers and its checkpoints. What changes: the samples of every step come from
`ElasticBatches`, so the global batch and the order are those of any other world size; every rank asks for the elastic event
once per step; and a checkpoint counts only once it is marked as complete. Design: docs/frameworks.md.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from elastipod.checkpoint.rng import seed_new_rank
from elastipod.data.elastic_batches import ElasticBatches, MicroBatch
from elastipod.errors import FrameworkError
from elastipod.fsdp1 import refuse_fsdp1
from elastipod.integrations.elastic_run import ElasticRun
from elastipod.integrations.marks import MarkedCheckpoints
from elastipod.integrations.packages import require
from elastipod.local_worker import local_worker

require("transformers")

from transformers import Trainer, TrainerCallback  # noqa: E402  # after the sentence that says which package is missing

log = logging.getLogger(__name__)

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_OWN_ORDER = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples")
_GATHER_SAMPLES = ("DPOTrainer", "RewardTrainer")  # gather tensors with a number for each sample of a pass
_IGNORED_LABEL = -100  # of torch's cross-entropy, and of the Trainer's count of tokens


def elastic_train(
    trainer: Any,
    *,
    global_batch: int,
    sample_log: str | os.PathLike[str] | None = None,
    equal_passes: bool | None = None,
    adopt: bool = False,
    **options: Any,
) -> Any:
    """Train as ``trainer.train()`` does, from the newest complete checkpoint in ``output_dir`` on, at any world size.

    global_batch: samples of one optimizer step over all ranks, the same at every size. The Trainer's
    ``per_device_train_batch_size`` is the maximum for one pass; it and ``gradient_accumulation_steps`` are set from the global
    batch and the world size. sample_log: folder for sample logs (`elastipod audit`). equal_passes: all passes of all ranks
    must have the same number of samples, because the Trainer gathers numbers of each sample; by default for TRL's
    DPOTrainer and RewardTrainer, which do. adopt: take over another job's ``output_dir``. options: of `Trainer.train`.

    Every rank calls it. It returns what `Trainer.train` returns, when the training is finished. At an elastic event the Trainer
    saves a checkpoint and the process ends with exit code 0 (SystemExit), so what follows the call is for a finished
    training only. Raises BatchSizeError for a world size that the global batch cannot be divided by, FrameworkError for
    settings of the Trainer with which a resize would not be exact, DataError for a checkpoint of other data.
    """
    if "resume_from_checkpoint" in options:
        raise FrameworkError(
            "resume_from_checkpoint cannot be given: elastic_train resumes from the newest complete checkpoint in output_dir"
        )
    check_trainer(trainer)
    args = trainer.args
    steps_per_epoch = -(-len(trainer.train_dataset) // global_batch)
    epochs = args.max_steps / steps_per_epoch if args.max_steps > 0 else args.num_train_epochs
    plan = ElasticBatches(
        len(trainer.train_dataset),
        global_batch,
        seed=args.seed if args.data_seed is None else args.data_seed,
        epochs=max(1, math.ceil(epochs)),
        shuffle=args.train_sampling_strategy != "sequential",
    )
    checkpoints = MarkedCheckpoints(args.output_dir, CHECKPOINT, adopt=adopt)
    if equal_passes is None:
        equal_passes = any(kind.__name__ in _GATHER_SAMPLES for kind in type(trainer).__mro__)
    run = ElasticRun(
        plan,
        checkpoints,
        max_micro_batch=args.per_device_train_batch_size,
        sample_log=sample_log,
        equal_passes=equal_passes,
    )
    args.per_device_train_batch_size = trainer._train_batch_size = run.cut.micro_batch
    args.gradient_accumulation_steps = run.cut.passes
    Feed(trainer, run).install()
    trainer.add_callback(ElasticTrainerCallback(trainer, run))
    result = trainer.train(resume_from_checkpoint=str(run.resumed.path) if run.resumed else None, **options)
    if run.is_leaving:
        raise SystemExit(0)
    return result


def check_trainer(trainer: Any) -> None:
    """Raise FrameworkError, with what would work, for a Trainer whose training could not be resized exactly."""
    args, data = trainer.args, trainer.train_dataset
    refuse_fsdp1(trainer.model)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) == 1:
        raise FrameworkError(
            "the Trainer would wrap the model in FullyShardedDataParallel (FSDP1), which cannot be resumed at every world size; "
            "set fsdp_config={'version': 2}"
        )
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise FrameworkError(
            f"train_dataset is a {type(data).__name__}, which gives no sample by its index, so its position would be lost at a "
            "resize; give a dataset with __getitem__ and __len__ (of Hugging Face's datasets: load_dataset without streaming)"
        )
    for name in _OWN_ORDER:
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            raise FrameworkError(
                f"{type(trainer).__name__} has a {name} of its own, so it chooses which samples a step trains; elastic_train works "
                "with trainers that leave this to Trainer, such as TRL's SFTTrainer and DPOTrainer"
            )
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise FrameworkError(
            f"train_sampling_strategy is {args.train_sampling_strategy!r}, an order that depends on the world size; set "
            "'random' or 'sequential'"
        )
    refused = {
        "auto_find_batch_size": (args.auto_find_batch_size, False),
        "ignore_data_skip": (args.ignore_data_skip, False),
        "dataloader_drop_last": (args.dataloader_drop_last, False),
        "average_tokens_across_devices": (args.average_tokens_across_devices, True),
        "save_only_model": (args.save_only_model, False),
    }
    for name, (value, needed) in refused.items():
        if value != needed:
            raise FrameworkError(f"TrainingArguments.{name} is {value}; an exact resize needs {needed}")
    if args.save_total_limit == 1:
        raise FrameworkError(
            "TrainingArguments.save_total_limit is 1, so the Trainer deletes the last checkpoint before the new one is known to be "
            "complete; set 2 or more"
        )
    if args.n_gpu > 1:
        raise FrameworkError(
            f"one process drives {args.n_gpu} devices (DataParallel); start one process per device with hyperpodrun or torchrun"
        )
    if trainer.is_deepspeed_enabled:
        raise FrameworkError(
            "DeepSpeed's checkpoints of ZeRO stages belong to one world size; use DDP, or FSDP2 with fsdp_config={'version': 2}"
        )


class EpochSampler(Sampler[list[int]]):
    """A batch sampler for one rank: the passes of the epoch in which the run stands, from the epoch's first step on.

    The Trainer itself skips the passes of the steps that were made. It would make one more step when it is started again
    after an end within an epoch, so there is no pass then.
    """

    def __init__(self, trainer: Any, run: ElasticRun) -> None:
        self._trainer, self._run = trainer, run

    def __iter__(self) -> Iterator[list[int]]:
        if self._run.step >= self._trainer.state.max_steps:
            return iter(())
        return self._run.epoch_passes(self._run.step // self._run.plan.steps_per_epoch)

    def __len__(self) -> int:
        return self._run.passes_per_epoch


class Feed:
    """Gives a Trainer the samples of a run, and each pass its weight in the gradient of the global batch."""

    def __init__(self, trainer: Any, run: ElasticRun) -> None:
        self._trainer, self._run = trainer, run
        self._parts: Iterator[MicroBatch] = iter(())
        self._own_loader: Callable[[], Any] = trainer.get_train_dataloader
        self._own_samples: Callable[..., Any] = trainer.get_batch_samples
        self._own_loss: Callable[..., Any] = trainer.compute_loss

    def install(self) -> None:
        """Take the place of three methods that subclasses of the Trainer override."""
        self._trainer.get_train_dataloader = self.loader
        self._trainer.get_batch_samples = self.batch_samples
        self._trainer.compute_loss = self.loss

    def loader(self) -> DataLoader[Any]:
        """Give a loader with the Trainer's own settings, but with the samples of the plan."""
        own = self._own_loader()
        return DataLoader(
            own.dataset,
            batch_sampler=EpochSampler(self._trainer, self._run),
            collate_fn=own.collate_fn,
            num_workers=own.num_workers,
            pin_memory=own.pin_memory,
            worker_init_fn=own.worker_init_fn,
            multiprocessing_context=own.multiprocessing_context,
            prefetch_factor=own.prefetch_factor,
            persistent_workers=own.persistent_workers,
        )

    def batch_samples(self, batches: Iterator[Any], num_batches: int, *more: Any) -> Any:
        """Give the passes of the next step. A pass of a rank without samples of its own counts no token."""
        parts = self._run.passes(self._trainer.state.global_step + 1)
        self._parts = iter(parts)
        own = (batch if part.weight else without_labels(batch) for part, batch in zip(parts, batches, strict=False))
        return self._own_samples(own, num_batches, *more)

    def loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        """Give the Trainer's loss, so that its gradient is the rank's part of the mean over the global batch.

        Losses that the Trainer divides by the tokens of the global batch are right for any split; means over a pass are
        weighted by its share.
        """
        found = self._own_loss(model, inputs, *more, **options)
        if not model.training:
            return found
        part = next(self._parts)
        if self._is_of_global_batch(options.get("num_items_in_batch")):
            return found
        factor = part.weight * self._trainer.current_gradient_accumulation_steps
        if factor == 1:
            return found
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    def _is_of_global_batch(self, num_items: Any) -> bool:
        """Return whether the Trainer takes the loss as a part of the global batch's, and does not divide it by the passes."""
        trainer = self._trainer
        if trainer.loss_is_scaled_for_ga is not None:
            return bool(trainer.loss_is_scaled_for_ga)
        return (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None


def without_labels(batch: Any) -> Any:
    """Give a batch whose labels are all ignored, if it has labels."""
    if "labels" in batch and hasattr(batch["labels"], "new_full"):
        batch["labels"] = batch["labels"].new_full(batch["labels"].shape, _IGNORED_LABEL)
    return batch


class ElasticTrainerCallback(TrainerCallback):  # type: ignore[misc]  # the package is not installed where mypy runs
    """Asks for the elastic event after every step, on every rank; has the Trainer save and stop when it is there."""

    def __init__(self, trainer: Any, run: ElasticRun) -> None:
        self._trainer, self._run = trainer, run
        self._jit = JitCheckpoint.of(trainer)
        self._has_random_state = run.resumed is None

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not self._has_random_state:
            self._has_random_state = True
            self._seed_new_rank(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._run.step_done(state.global_step, is_last=state.global_step >= state.max_steps):
            control.should_save, control.should_training_stop = True, True
            control.should_evaluate = False  # it may take longer than the drain has
            args.load_best_model_at_end = False
            self._jit.withdraw()
        self._begin_save(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if logs and "loss" in logs:
            self._run.note_loss(float(logs["loss"]))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._run.sign_of_life()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._run.is_leaving:  # the step is saved
            control.should_save = control.should_evaluate = False
        self._begin_save(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._run.finish_save(self._folder(state))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        is_completed = state.global_step >= self._run.plan.total_steps
        self._run.end("drained" if self._run.is_leaving else "completed" if is_completed else None)

    def _begin_save(self, args: Any, state: Any, control: Any) -> None:
        """Begin a save where the Trainer will make one, or may: an evaluation may lead to a save.

        Only with ``save_strategy="best"`` does it lead to another save of a step that is saved already. Any other evaluation leaves the
        checkpoint of its step as it is, which would lose its mark otherwise.
        """
        may_save = control.should_evaluate and (
            args.save_strategy == "best" or self._run.saved_step != state.global_step
        )
        if control.should_save or may_save:
            self._run.begin_save(self._folder(state), is_certain=control.should_save)

    def _folder(self, state: Any) -> Path:
        return self._run.checkpoints.directory / f"checkpoint-{state.global_step}"

    def _seed_new_rank(self, step: int) -> None:
        """Give a rank that the saving run did not have a random state of its own; the Trainer leaves it at the seed."""
        assert self._run.resumed is not None
        place = self._run.place
        name = f"rng_state_{place.rank}.pth" if place.world_size > 1 else "rng_state.pth"
        if not (self._run.resumed.path / name).exists():
            seed_new_rank(step, place.rank)


class JitCheckpoint:
    """The Trainer's own just-in-time checkpoint (``enable_jit_checkpoint``), if it is in use.

    It saves on SIGTERM, on each rank at whatever step that rank is. Outside a pod SIGTERM to any rank becomes the elastic
    event, so that all save the same step. In a pod the agent raises the event long before it sends SIGTERM, and the
    Trainer's own handler stays as a last resort.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        if manager is not None and local_worker() is None:
            signal.signal(signal.SIGTERM, _raise_event)

    @classmethod
    def of(cls, trainer: Any) -> JitCheckpoint:
        """Give that of a Trainer."""
        managers = (getattr(callback, "jit_manager", None) for callback in trainer.callback_handler.callbacks)
        return cls(next((manager for manager in managers if manager is not None), None))

    def withdraw(self) -> None:
        """Withdraw a request that came with the elastic event: the step is saved already."""
        if self._manager is not None:
            self._manager.is_checkpoint_requested = False


def _raise_event(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
