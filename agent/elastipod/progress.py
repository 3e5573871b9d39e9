"""Progress reports from the training loop to the agent, which passes them on to the operator."""

from __future__ import annotations

import os

from elastipod.local_worker import local_worker


def report(
    step: int,
    samples: int,
    loss: float | None = None,
    samples_per_s: float | None = None,
    total_steps: int | None = None,
) -> None:
    """Report this rank's progress. Takes about a microsecond, so call it once per step. Any rank may call it; no collective.

    step: completed optimizer steps of the job. samples: consumed by the whole job so far. samples_per_s: of the whole job.
    total_steps: at which the job is complete, from which the operator says when that will be.
    Does nothing outside a `hyperpodrun` pod. Raises WorkerFileError when the agent's worker file cannot be used.

    A rank that has reported and then stays silent counts as hung: its agent dumps all stacks and reports a fault, after 10 times
    the usual interval between reports and at least 10 minutes. ``hyperpodrun --hang-timeout`` sets this time or turns it off. In a
    process that lives on after a change of the world, it counts from the start of the new generation.
    During a phase without steps, such as a long evaluation or a final export, report the same step from time to time; every
    report counts as a sign of life.
    """
    worker = local_worker()
    if worker is None:
        return
    worker.file.report(
        worker.local_rank,
        step=step,
        samples=samples,
        loss=loss,
        samples_per_s=samples_per_s,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        total_steps=total_steps,
    )
