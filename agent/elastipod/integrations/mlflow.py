"""MLflow: a job's run goes on over resizes and recoveries, with size, generation and cause as tags.

Importing this module raises FrameworkError without MLflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastipod.integrations.packages import require
from elastipod.integrations.tracking import JOB_UID, RunOutcome, TrackedRun

require("mlflow")

_ENDED = {RunOutcome.COMPLETED: "FINISHED", RunOutcome.FAILED: "FAILED"}  # any other run goes on


def mlflow_run(experiment: str | None = None, *, name: str = "") -> TrackedRun:
    """Give the job's run in MLflow. Call it on every rank; rank 0 writes.

    The tracking server or folder is MLflow's own setting (MLFLOW_TRACKING_URI). experiment: None for MLflow's present one. On rank 0
    the run is MLflow's active run while it is open, so autologging writes into it.
    """
    return TrackedRun(_Mlflow(experiment), name=name)


class _Mlflow:
    """MLflow's own client; the run is found by the UID of the job."""

    def __init__(self, experiment: str | None) -> None:
        self._experiment = experiment
        self._mlflow: Any = None
        self._run_id = ""

    def open(self, job_uid: str, name: str) -> Mapping[str, str]:
        import mlflow  # on rank 0 only: it takes seconds

        self._mlflow = mlflow
        if self._experiment is not None:
            mlflow.set_experiment(self._experiment)
        wanted = f"tags.`{JOB_UID}` = '{job_uid}'"
        options = {"order_by": ["attributes.start_time ASC"], "max_results": 1, "output_format": "list"}
        found: list[Any] = mlflow.search_runs(filter_string=wanted, **options) if job_uid else []
        run = mlflow.start_run(run_id=found[0].info.run_id) if found else mlflow.start_run(run_name=name or None)
        self._run_id = run.info.run_id
        return dict(run.data.tags)

    def tag(self, tags: Mapping[str, str]) -> None:
        self._mlflow.set_tags(dict(tags))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self, outcome: RunOutcome) -> None:
        self._mlflow.end_run(_ENDED.get(outcome, "FINISHED"))
        if outcome not in _ENDED:
            self._mlflow.MlflowClient().update_run(self._run_id, status="RUNNING")
