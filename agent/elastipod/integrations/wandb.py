"""Weights & Biases: a job's run goes on over resizes and recoveries, with size, generation and cause in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastipod.integrations.packages import require
from elastipod.integrations.tracking import RunOutcome, TrackedRun

require("wandb")


def wandb_run(project: str | None = None, *, name: str = "", **settings: Any) -> TrackedRun:
    """Give the job's run in W&B, whose ID is the UID of the job. Call it on every rank; rank 0 writes.

    settings: more arguments of wandb.init, such as entity or mode. Metrics have the step as their axis, because steps come again
    after a recovery. Importing this module raises FrameworkError without the package.
    """
    return TrackedRun(_Wandb(project, settings), name=name)


class _Wandb:
    """W&B's own client. Offline it cannot know what earlier generations wrote; `wandb sync` joins their folders by the run's ID."""

    def __init__(self, project: str | None, settings: Mapping[str, Any]) -> None:
        self._project = project
        self._settings = settings
        self._run: Any = None

    def open(self, job_uid: str, name: str) -> Mapping[str, str]:
        import wandb

        self._run = wandb.init(
            project=self._project, id=job_uid or None, name=name or None, resume="allow", **self._settings
        )
        self._run.define_metric("*", step_metric="step")
        return {key: str(value) for key, value in dict(self._run.config).items() if key.startswith("elastipod.")}

    def tag(self, tags: Mapping[str, str]) -> None:
        self._run.config.update(dict(tags), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, outcome: RunOutcome) -> None:
        self._run.finish(exit_code=1 if outcome is RunOutcome.FAILED else 0)
