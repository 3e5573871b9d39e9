"""Elastic training with Lightning: `elastic_fit` in place of `Trainer.fit`, and `world_settings` for the Trainer.

Lightning keeps its loop, its strategies and its checkpoint format. The samples of every step come from `ElasticBatches`; every
rank asks for the elastic event once per step; checkpoints are Lightning's, in folders that are marked when they are complete.
Lightning measures progress in passes, so its counters are recomputed from the steps when a checkpoint is loaded at another world
size. Design: docs/frameworks.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from elastipod.checkpoint.rng import random_state, rank_seed, restore_random_state, seed_new_rank
from elastipod.collectives import sum_over_ranks
from elastipod.data.elastic_batches import ElasticBatches, MicroBatch
from elastipod.errors import FrameworkError
from elastipod.fsdp1 import refuse_fsdp1
from elastipod.integrations.elastic_run import ElasticRun
from elastipod.integrations.loaders import check_loader
from elastipod.integrations.marks import MarkedCheckpoints
from elastipod.integrations.packages import require

require("lightning")

from lightning.pytorch import Callback  # noqa: E402  # after the sentence that says which package is missing

CHECKPOINT = re.compile(r"step-(\d+)")
_FILE = "lightning.ckpt"
_REFUSED: Mapping[str, object] = {"limit_train_batches": 1.0, "overfit_batches": 0.0, "accumulate_grad_batches": 1}


def world_settings() -> dict[str, int]:
    """Give ``num_nodes`` and ``devices`` for Lightning's Trainer, as the launcher set the world; nothing outside of a launcher.

    Lightning refuses to start when they differ from the world's, so they cannot be constants in a job whose size changes.
    """
    if "WORLD_SIZE" not in os.environ:
        return {}
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {"num_nodes": world // local, "devices": local}


def elastic_fit(
    trainer: Any,
    module: Any,
    loader: DataLoader[Any],
    *,
    global_batch: int,
    checkpoints: str | os.PathLike[str],
    seed: int = 0,
    checkpoint_every: int | None = None,
    keep: int = 2,
    sample_log: str | os.PathLike[str] | None = None,
    adopt: bool = False,
    **options: Any,
) -> None:
    """Train as ``trainer.fit(module, loader)`` does, from the newest complete checkpoint on, at any world size.

    loader: its dataset, ``collate_fn`` and worker settings are used, its ``batch_size`` is the maximum for one pass.
    ``accumulate_grad_batches`` is set from the global batch and the world size. global_batch: samples of one optimizer step
    over all ranks, the same at every size. The loss that ``training_step`` gives is the mean over the samples of its batch.
    checkpoints: folder that all ranks share. checkpoint_every: steps; None: only at an elastic event and at the end. keep:
    number of newest checkpoints to keep. sample_log: folder for sample logs. adopt: take over another job's folder. options:
    of `Trainer.fit`.

    Every rank calls it. At an elastic event it saves a checkpoint and the process ends with exit code 0 (SystemExit), so what
    follows the call is for a finished training only. Raises BatchSizeError for a world size that the global batch cannot be
    divided by, FrameworkError for settings with which a resize would not be exact, DataError for a checkpoint of other data.
    """
    check_trainer(trainer, module, loader)
    if "ckpt_path" in options:
        raise FrameworkError(
            "ckpt_path cannot be given: elastic_fit resumes from the newest complete checkpoint in checkpoints"
        )
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    trainer.strategy.setup_environment()  # the process group, which `fit` would create a moment later
    size = len(loader.dataset)  # type: ignore[arg-type]
    epochs = trainer.max_epochs or -1
    if epochs < 1:
        epochs = max(1, -(-trainer.max_steps // -(-size // global_batch)))
    plan = ElasticBatches(size, global_batch, seed=seed, epochs=epochs)
    assert loader.batch_size is not None
    run = ElasticRun(
        plan,
        MarkedCheckpoints(checkpoints, CHECKPOINT, adopt=adopt),
        max_micro_batch=loader.batch_size,
        sample_log=sample_log,
    )
    trainer.accumulate_grad_batches = run.cut.passes
    trainer.callbacks.append(ElasticCallback(run, checkpoint_every, keep))
    resumed = str(run.resumed.path / _FILE) if run.resumed else None
    trainer.fit(module, StepLoader(loader, run), ckpt_path=resumed, **options)
    if run.is_leaving:
        raise SystemExit(0)


def check_trainer(trainer: Any, module: Any, loader: Any) -> None:
    """Raise FrameworkError, with what would work, for a training that could not be resized exactly."""
    refuse_fsdp1(module)
    strategy = type(trainer.strategy).__name__
    if strategy == "FSDPStrategy":
        raise FrameworkError(
            "FSDPStrategy wraps the model in FullyShardedDataParallel (FSDP1), which cannot be resumed at every world size; "
            "use DDPStrategy, or ModelParallelStrategy, which is FSDP2"
        )
    if strategy == "DeepSpeedStrategy":
        raise FrameworkError("DeepSpeed's checkpoints of ZeRO stages belong to one world size; use DDPStrategy")
    if not module.automatic_optimization:
        raise FrameworkError(
            "the module has automatic_optimization = False, so Lightning does not say when a step is complete; use a loop of your "
            "own with CheckpointManager (docs/user-guide.md)"
        )
    for name, needed in _REFUSED.items():
        if getattr(trainer, name) != needed:
            raise FrameworkError(
                f"Trainer({name}={getattr(trainer, name)}); an exact resize needs {needed}, so leave it out"
            )
    if trainer.max_epochs in (None, -1) and trainer.max_steps == -1:
        raise FrameworkError(
            "the Trainer has neither max_epochs nor max_steps, so the samples of the training are not known; set one of them, also "
            "with max_time"
        )
    if not isinstance(loader, DataLoader):
        raise FrameworkError(f"loader is a {type(loader).__name__}; give torch's DataLoader over the training data")
    check_loader(loader)


class _RestOfEpoch(Sampler[list[int]]):
    """The passes of the present epoch that follow the steps that were made."""

    def __init__(self, run: ElasticRun) -> None:
        self._run = run

    def __iter__(self) -> Iterator[list[int]]:
        return self._run.epoch_passes(*divmod(self._run.step, self._run.plan.steps_per_epoch))

    def __len__(self) -> int:
        return self._run.passes_per_epoch


class StepLoader:
    """Gives Lightning the passes of this rank. It is no DataLoader, so that Lightning does not divide it among the ranks again.

    Its length is that of a whole epoch; the first iteration after a resume begins in the middle of one.
    """

    def __init__(self, loader: DataLoader[Any], run: ElasticRun) -> None:
        self._run = run
        self._loader = DataLoader(
            loader.dataset,
            batch_sampler=_RestOfEpoch(run),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            # Worker processes take their seeds from it, and the default generator's state stays that of the steps.
            generator=torch.Generator().manual_seed(rank_seed(run.step, run.place.rank)),
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Give the position, for Lightning, which asks a loader for it. Resuming takes it from the mark."""
        return self._run.plan.state_dict(self._run.step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the run knows its position."""


class ElasticCallback(Callback):  # type: ignore[misc]  # the package is not installed where mypy runs
    """Weighs every pass, asks for the elastic event after every step, and has Lightning save and stop when it is there."""

    def __init__(self, run: ElasticRun, checkpoint_every: int | None, keep: int) -> None:
        self._run, self._checkpoint_every, self._keep = run, checkpoint_every, keep
        self._step = 0  # the one that `_parts` belong to
        self._parts: list[MicroBatch] = []
        self._part: MicroBatch | None = None
        self._sum = 0.0  # of this rank's weighted losses in the step
        self._has_random_state = run.resumed is None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Set Lightning's counts of passes to those of this world size, as if it had made the steps."""
        passes, before = self._run.passes_made(), max(0, self._run.step - 1) // self._run.plan.steps_per_epoch
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts, made in (("current", passes), ("total", before * self._run.passes_per_epoch + passes)):
            # It is saved in the last pass, which is not completed then.
            progress[counts] = {"ready": made, "started": made, "processed": made, "completed": made - 1}
        progress["is_last_batch"] = passes == self._run.passes_per_epoch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._has_random_state:
            self._has_random_state = True
            self._restore_random_state()
        if self._step != self._run.step + 1:
            self._step, self._sum = self._run.step + 1, 0.0
            self._parts = self._run.passes(self._step)
        self._part = self._parts[batch_idx % self._run.cut.passes]

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Weigh the loss, which Lightning has divided by the number of passes of a full step."""
        assert self._part is not None
        factor = self._part.weight * self._run.cut.passes
        if factor != 1:
            loss.mul_(factor)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._part is not None
        if not outputs or outputs["loss"] is None:
            raise FrameworkError(
                f"training_step gave no loss in step {self._step}, whose passes all count; for samples to leave out, give a loss "
                "that is multiplied by 0"
            )
        self._sum += float(outputs["loss"]) * self._run.cut.passes * self._part.weight
        if not self._part.is_last:
            return
        loss = None
        if self._step % trainer.log_every_n_steps == 0:
            loss = sum_over_ranks(self._sum) / self._run.place.world_size
        is_last = self._step in (self._run.plan.total_steps, trainer.max_steps)
        is_leaving = self._run.step_done(self._step, loss, is_last=is_last)
        is_due = self._checkpoint_every and self._step % self._checkpoint_every == 0
        if is_leaving or is_due or is_last:
            self._save(trainer)
        if is_leaving:
            self._stop(trainer)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *more: Any, **options: Any) -> None:
        if not trainer.sanity_checking:
            self._run.sign_of_life()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        is_completed = self._run.step == self._run.plan.total_steps
        self._run.end("drained" if self._run.is_leaving else "completed" if is_completed else None)

    def _save(self, trainer: Any) -> None:
        path = self._run.checkpoints.directory / f"step-{self._run.step}"
        self._run.begin_save(path)
        path.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(path / _FILE)
        (path / self._random_file()).write_text(random_state(), encoding="utf-8")
        self._run.finish_save(path)
        self._run.checkpoints.prune(self._keep)

    def _stop(self, trainer: Any) -> None:
        """Have the loops end here, whatever minimum of epochs they were given, and without a validation, which may take long."""
        trainer.should_stop = True
        trainer.limit_val_batches = 0
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def _random_file(self) -> Path:
        return Path(f"random-state-{self._run.place.rank}.json")

    def _restore_random_state(self) -> None:
        assert self._run.resumed is not None
        file = self._run.resumed.path / self._random_file()
        if file.exists():
            restore_random_state(file.read_text(encoding="utf-8"))
        else:
            seed_new_rank(self._run.step, self._run.place.rank)
