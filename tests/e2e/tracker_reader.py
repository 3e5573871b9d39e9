"""Reads the runs in MLflow's folder with its own client, and prints them as JSON."""

from __future__ import annotations

import json
from typing import Any


def mlflow_runs() -> list[dict[str, Any]]:
    """Give all runs of the experiment, with all values of each metric."""
    import mlflow

    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name("llm")
    runs = client.search_runs([found.experiment_id]) if found is not None else []
    return [
        {
            "status": run.info.status, "name": run.info.run_name, "tags": run.data.tags,
            "metrics": {
                key: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics
            },
        }
        for run in runs
    ]  # fmt: skip


print(json.dumps(mlflow_runs()))
