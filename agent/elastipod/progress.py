"""Progress: how a training loop tells its agent, and through it everybody else, where it is."""

from __future__ import annotations

import os

from elastipod.local_worker import local_worker


def report(step: int, samples: int, loss: float | None = None, samples_per_s: float | None = None) -> None:
    """Publish where this rank is; about a microsecond, so once per step is fine. Any rank may call; no collective.

    step: completed optimizer steps of the job; samples: consumed by the whole job so far; samples_per_s: of the whole job.
    Outside a `hyperpodrun` pod it does nothing.

    A rank that has reported and then falls silent for long is taken for hung: its agent dumps all stacks and faults (after
    10 times the usual time between reports, at least 10 minutes; ``hyperpodrun --hang-timeout`` sets or ends that). In a
    phase without steps, such as a long evaluation or an export at the end, report the same step now and then: every
    report is a sign of life.
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
    )
