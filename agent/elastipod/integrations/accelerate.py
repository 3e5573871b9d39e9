"""Elastic training in loops written with Hugging Face's Accelerate: `elastic_steps` in place of the loops over epochs and batches.

Accelerate keeps the wrapping of the model, precision and devices. Checkpoints are those of `CheckpointManager`, which,
unlike Accelerate's own `save_state`, appear only when they are complete, and keep a copy in memory. Design: docs/frameworks.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from elastipod.audit.sample_log import SampleLog
from elastipod.batches.batch_plan import plan_batch
from elastipod.checkpoint import CheckpointManager, Resume
from elastipod.collectives import sum_over_ranks
from elastipod.data.elastic_batches import Batch, ElasticBatches, MicroBatch
from elastipod.data.loader import ElasticLoader
from elastipod.elastic_event import elastic_event_detected
from elastipod.errors import DataError, FrameworkError
from elastipod.fsdp1 import refuse_fsdp1
from elastipod.gradients import gradient_sync
from elastipod.integrations.loaders import check_loader
from elastipod.integrations.packages import require
from elastipod.process_restarts import need_not_tell
from elastipod.progress import report
from elastipod.rank_in_world import RankInWorld

require("accelerate")

from accelerate.scheduler import AcceleratedScheduler  # noqa: E402  # after the sentence that says what is missing
from accelerate.utils import send_to_device  # noqa: E402

# In a checkpoint's `extra`, not a member of its state: those of earlier versions and of other precisions lack it, and can be loaded.
_SCALER = "grad_scaler"


class AccelerateStep:
    """One optimizer step on one rank: iterate over it for the inputs of its passes, and call `backward` once in each."""

    def __init__(
        self, accelerator: Any, model: torch.nn.Module, batch: Batch, passes: Iterator[tuple[MicroBatch, Any]]
    ) -> None:
        self._accelerator, self._model = accelerator, model
        self._batch, self._passes = batch, passes
        self._part: MicroBatch | None = None
        self._sum = 0.0  # of this rank's weighted losses
        self._loss: float | None = None

    @property
    def number(self) -> int:
        """The optimizer step, counted over the job from 1."""
        return self._batch.step

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._batch.epoch

    def __iter__(self) -> Iterator[Any]:
        """Give the inputs of each pass, on the device. Gradients are reduced over the ranks in the last one."""
        for part, inputs in self._passes:
            self._part = part
            with gradient_sync(self._model, part.is_last):
                yield send_to_device(inputs, self._accelerator.device)
            if self._part is not None:
                raise FrameworkError(
                    "step.backward(loss) was not called in a pass; call it once for the inputs of each pass"
                )

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass. loss: the mean over the samples of the pass."""
        if self._part is None:
            raise FrameworkError(
                "step.backward(loss) was called twice in a pass, or outside of one; call it once in each"
            )
        weighted = loss * self._part.weight
        self._part = None
        self._accelerator.backward(weighted)
        self._sum += weighted.detach().double().item()

    @property
    def loss(self) -> float:
        """The mean loss over the global batch. Collective at the first use in a step; use it on every rank or on none."""
        if self._loss is None:
            self._loss = sum_over_ranks(self._sum) / self._batch.world_size
        return self._loss

    @property
    def known_loss(self) -> float | None:
        """The loss if the loop has asked for it. No collective."""
        return self._loss


def elastic_steps(
    accelerator: Any,
    loader: DataLoader[Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    *,
    global_batch: int,
    checkpoints: str | os.PathLike[str] | CheckpointManager,
    epochs: int = 1,
    seed: int = 0,
    checkpoint_every: int | None = None,
    sample_log: str | os.PathLike[str] | None = None,
) -> Iterator[AccelerateStep]:
    """Give the steps of a training, from the newest checkpoint on, at any world size.

    loader: as it was passed to nothing else; its dataset, ``collate_fn`` and worker settings are used, its ``batch_size`` is the
    maximum for one pass. model, optimizer: from ``accelerator.prepare``. scheduler: not prepared, stepped by the loop once per
    step. global_batch: samples of one optimizer step over all ranks, the same at every size. checkpoints: a folder that all
    ranks share, or a manager. checkpoint_every: steps; None: only at an elastic event and at the end. sample_log: folder for
    sample logs (`elastipod audit`).

    Every rank iterates. At an elastic event it saves a checkpoint and the process ends with exit code 0 (SystemExit), so
    what follows the loop is for a finished training only. An event in the last step changes nothing: the training is finished.
    A training that is started again after its end gives no step. Raises BatchSizeError for a world size that the global batch cannot
    be divided by, FrameworkError for settings with which a resize would not be exact, DataError for a checkpoint of other data.
    """
    _check(accelerator, loader, model, scheduler)
    plan = ElasticBatches(len(loader.dataset), global_batch, seed=seed, epochs=epochs)  # type: ignore[arg-type]
    job = _Job(plan, optimizer, scheduler, checkpoints, model, accelerator.scaler)
    job.resume(sample_log)
    step: AccelerateStep | None = None
    with _elastic_loader(loader, job) as own:
        for batch, passes in own:
            step = AccelerateStep(accelerator, model, batch, passes)
            yield step
            job.step_done(batch, step.known_loss)
            if batch.step < job.plan.total_steps and elastic_event_detected():
                job.save(batch.step)
                job.end(batch.step, is_drained=True)
                raise SystemExit(0)
            if checkpoint_every and batch.step % checkpoint_every == 0:
                job.save(batch.step)
    job.save(job.plan.total_steps)
    job.end(job.plan.total_steps, is_drained=False)


class _Job:
    """The plan, the objects that are saved, and the sample log of one generation."""

    def __init__(
        self,
        plan: ElasticBatches,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        checkpoints: str | os.PathLike[str] | CheckpointManager,
        model: torch.nn.Module,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        need_not_tell()
        self.plan, self.place = plan, RankInWorld.current()
        self._scaler = scaler
        self._objects: dict[str, Any] = {
            "model": model, "optimizer": getattr(optimizer, "optimizer", optimizer), "scheduler": scheduler
        }  # fmt: skip
        self._checkpoints = (
            checkpoints if isinstance(checkpoints, CheckpointManager) else CheckpointManager(checkpoints)
        )
        self._log: SampleLog | None = None

    def resume(self, sample_log: str | os.PathLike[str] | None) -> None:
        resume: Resume | None = self._checkpoints.load_latest(**self._objects)
        if resume is not None:
            if "data" not in resume.extra:
                raise DataError(
                    f"{resume.path} holds no position in the data, because another script has saved it; name another directory"
                )
            self.plan = self.plan.resumed(resume.extra["data"])
            if self._scaler is not None and resume.extra.get(_SCALER):
                self._scaler.load_state_dict(resume.extra[_SCALER])
        if sample_log:
            self._log = SampleLog(
                sample_log,
                self.plan,
                generation=self._checkpoints.generation,
                rank=self.place.rank,
                world_size=self.place.world_size,
                resume=resume,
            )

    def step_done(self, batch: Batch, loss: float | None) -> None:
        if self._log:
            self._log.step(batch, loss)
        report(batch.step, batch.samples_seen, loss, total_steps=self.plan.total_steps)

    def save(self, step: int) -> None:
        extra = {"data": self.plan.state_dict(step)}
        if self._scaler is not None:
            extra[_SCALER] = self._scaler.state_dict()
        self._checkpoints.save(step, **self._objects, extra=extra, sample_log=self._log)

    def end(self, step: int, *, is_drained: bool) -> None:
        if self._log:
            self._log.end(step, "drained" if is_drained else "completed")
            self._log.close()
        self._checkpoints.close()


def _elastic_loader(loader: DataLoader[Any], job: _Job) -> ElasticLoader[Any]:
    assert loader.batch_size is not None
    cut = plan_batch(job.plan.global_batch, job.place.world_size, max_micro_batch=loader.batch_size)
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "collate_fn",
            "num_workers",
            "pin_memory",
            "worker_init_fn",
            "multiprocessing_context",
            "prefetch_factor",
        )
    }
    return ElasticLoader(
        loader.dataset,
        job.plan,
        rank=job.place.rank,
        world_size=job.place.world_size,
        micro_batch=cut.micro_batch,
        persistent_workers=loader.persistent_workers,
        **options,
    )


def _check(accelerator: Any, loader: Any, model: torch.nn.Module, scheduler: Any) -> None:
    refuse_fsdp1(model)
    kind = getattr(accelerator.distributed_type, "name", "")
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise FrameworkError(
            f"Accelerate would train with {kind}, whose checkpoints belong to one world size; use DDP or FSDP2 (fsdp_version 2)"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise FrameworkError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}): the number of passes follows "
            "from global_batch, the world size and the loader's batch_size; leave it out"
        )
    if isinstance(scheduler, AcceleratedScheduler):
        raise FrameworkError(
            "the scheduler was prepared: Accelerate steps it once for each process, so the learning rate would depend on the "
            "world size; leave it out of accelerator.prepare"
        )
    if not isinstance(loader, DataLoader) or hasattr(loader, "base_dataloader"):
        raise FrameworkError(
            f"loader is a {type(loader).__name__}; give torch's DataLoader, and leave it out of accelerator.prepare"
        )
    check_loader(loader)
