"""What is asked of MLflow and W&B, whose packages are not in this environment; tests/e2e runs the real ones."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from elastipod.integrations import packages
from elastipod.integrations.tracking import RunOutcome, TrackedRun


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a stand-in in the place of a package, and give the integration that uses it."""

    def put(name: str, package: Mock) -> ModuleType:
        monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.setattr(packages, "installed_version", lambda name: "99.0")
        module = importlib.import_module(f"elastipod.integrations.{name}")
        monkeypatch.delitem(sys.modules, module.__name__)
        return module

    for name, value in {"ELASTIPOD_RUN_ID": "uid", "ELASTIPOD_JOB": "team/llm", "ELASTIPOD_GENERATION": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    return put


def mlflow_with(*found: str, tags: dict[str, str]) -> Mock:
    package = Mock()
    package.search_runs.return_value = [SimpleNamespace(info=SimpleNamespace(run_id=each)) for each in found]
    run = SimpleNamespace(info=SimpleNamespace(run_id="run-1"), data=SimpleNamespace(tags=tags))
    package.start_run.return_value = run
    return package


def test_mlflow_goes_on_with_the_run_of_the_job(place: Any) -> None:
    package = mlflow_with("run-1", tags={"elastipod.generation": "1", "elastipod.size": "1", "elastipod.has_left": "1"})
    run: TrackedRun = place("mlflow", package).mlflow_run("an experiment", name="ignored, for the run has a name")
    run.log(7, loss=0.5)
    run.close(RunOutcome.COMPLETED)
    assert package.mock_calls == [
        call.set_experiment("an experiment"),
        call.search_runs(
            filter_string="tags.`elastipod.job_uid` = 'uid'",
            order_by=["attributes.start_time ASC"],
            max_results=1,
            output_format="list",
        ),
        call.start_run(run_id="run-1"),
        call.set_tags(
            {
                "elastipod.generation": "2",
                "elastipod.size": "1",
                "elastipod.cause": "restart",
                "elastipod.job": "team/llm",
                "elastipod.job_uid": "uid",
            }
        ),
        call.log_metrics({"elastipod.generation": 2, "elastipod.size": 1}, step=7),
        call.log_metrics({"loss": 0.5}, step=7),
        call.end_run("FINISHED"),
    ]


@pytest.mark.parametrize(("uid", "name", "begun_as"), [("uid", "", "team/llm"), ("", "mine", "mine")])
def test_mlflow_begins_a_run_where_the_job_has_none(
    place: Any, monkeypatch: pytest.MonkeyPatch, uid: str, name: str, begun_as: str
) -> None:
    """A process outside a pod has no job whose run it could go on with."""
    monkeypatch.setenv("ELASTIPOD_RUN_ID", uid)
    package = mlflow_with(tags={})
    place("mlflow", package).mlflow_run(name=name).log(1, loss=1.0)
    assert package.search_runs.call_count == (1 if uid else 0)
    assert package.start_run.mock_calls == [call(run_name=begun_as)]
    assert not package.set_experiment.called
    assert package.set_tags.mock_calls[0].args[0]["elastipod.cause"] == "start"


@pytest.mark.parametrize(
    ("outcome", "ended", "goes_on"),
    [
        (RunOutcome.COMPLETED, "FINISHED", False),
        (RunOutcome.FAILED, "FAILED", False),
        (RunOutcome.LEFT, "FINISHED", True),
        (RunOutcome.LOST, "FINISHED", True),
    ],
)
def test_mlflow_shows_a_run_that_goes_on_as_running(place: Any, outcome: RunOutcome, ended: str, goes_on: bool) -> None:
    package = mlflow_with(tags={})
    run: TrackedRun = place("mlflow", package).mlflow_run()
    run.log(1, loss=1.0)
    run.close(outcome)
    assert package.end_run.mock_calls == [call(ended)]
    running = [call("run-1", status="RUNNING")] if goes_on else []
    assert package.MlflowClient.return_value.update_run.mock_calls == running


def test_mlflow_has_no_name_to_begin_a_run_with_outside_a_pod(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIPOD_JOB")
    package = mlflow_with(tags={})
    place("mlflow", package).mlflow_run().log(1, loss=1.0)
    assert package.start_run.mock_calls == [call(run_name=None)]


class Config(dict[str, Any]):
    """A run's configuration, which refuses a changed value unless that is allowed."""

    def update(self, values: dict[str, Any], allow_val_change: bool | None = None) -> None:  # type: ignore[override]
        assert allow_val_change
        super().update(values)


def test_wandb_goes_on_with_the_run_of_the_job(place: Any) -> None:
    package, config = Mock(), Config({"elastipod.generation": 1, "elastipod.size": 4, "rate": 0.1})
    wandb = package.init.return_value
    wandb.config = config
    run: TrackedRun = place("wandb", package).wandb_run("a project", entity="us", mode="offline")
    run.log(7, loss=0.5)
    assert package.mock_calls == [
        call.init(project="a project", id="uid", name="team/llm", resume="allow", entity="us", mode="offline"),
        call.init().define_metric("*", step_metric="step"),
        call.init().log({"elastipod.generation": 2, "elastipod.size": 1, "step": 7}),
        call.init().log({"loss": 0.5, "step": 7}),
    ]
    assert config == {
        "elastipod.generation": "2",
        "elastipod.size": "1",
        "elastipod.cause": "recovery",
        "elastipod.job": "team/llm",
        "elastipod.job_uid": "uid",
        "rate": 0.1,
    }


def test_wandb_is_told_what_earlier_generations_wrote_as_text(place: Any) -> None:
    package = Mock()
    package.init.return_value.config = Config({"elastipod.size": 4, "rate": 0.1})
    client = place("wandb", package)._Wandb(None, {})
    assert client.open("", "") == {"elastipod.size": "4"}
    assert package.init.mock_calls[0] == call(project=None, id=None, name=None, resume="allow")


@pytest.mark.parametrize("outcome", list(RunOutcome))
def test_wandb_shows_a_run_as_failed_only_when_it_has(place: Any, outcome: RunOutcome) -> None:
    package = Mock()
    package.init.return_value.config = Config()
    run: TrackedRun = place("wandb", package).wandb_run(name="mine")
    run.log(1, loss=1.0)
    run.close(outcome)
    assert package.init.mock_calls[0].kwargs["name"] == "mine"
    assert package.init.return_value.finish.mock_calls == [call(exit_code=1 if outcome is RunOutcome.FAILED else 0)]
