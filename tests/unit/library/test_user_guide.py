"""The Python of the user guide, run as it stands, with a small model and small data for the names that it leaves open."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.guide import (
    ACCUMULATE,
    APPLY,
    LOADER,
    LOG,
    LOOP,
    OBJECTS,
    RATE,
    SAVES,
    VALIDATION,
    function_of,
    stateful_script,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

import elastipod
from elastipod import CheckpointManager, ElasticBatches, State
from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit

SIZE, LEFT_AFTER = 600, 2  # samples; the step after which the first run is told to leave


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are their indices."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Job:
    """Runs scripts of the guide, each with the objects of a new process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples: list[int] = []  # that went into a loss

    def run(self, script: str, **more: Any) -> dict[str, Any]:
        """Run a script as the body of a function, for its ``return``; gives the names it could use."""
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        checkpoints = CheckpointManager(self.folder / "checkpoints")
        names: dict[str, Any] = {name: getattr(elastipod, name) for name in elastipod.__all__}
        names |= {"model": model, "optimizer": optimizer, "loss_of": self.loss_of}
        names |= {"LambdaLR": LambdaLR, "schedule": LambdaLR(optimizer, lambda step: 1.0)}
        names |= {"dataset": Rows(), "plan": ElasticBatches(SIZE, 256), "rank": 0, "world_size": 1}
        names |= {
            "checkpoints": checkpoints,
            "resume": checkpoints.load_latest(model=model, optimizer=optimizer),
            **more,
        }
        exec(function_of(script, self.folder) + "script()", names)
        return names

    def loss_of(self, model: nn.Module, data: Any) -> torch.Tensor:
        rows = torch.as_tensor(data, dtype=torch.float32).reshape(-1, 1)
        self.samples += rows.flatten().int().tolist()
        loss: torch.Tensor = model(rows).pow(2).mean()
        return loss


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    calls = count(1)
    monkeypatch.setattr(elastipod, "elastic_event_detected", lambda: next(calls) == LEFT_AFTER)
    return Job(tmp_path)


def test_several_objects_are_saved_and_loaded(job: Job) -> None:
    for step in (1, 2):
        model = nn.Linear(2, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * step)
        more = {"checkpoints": CheckpointManager(job.folder / "objects"), "torch": torch}
        names = job.run(OBJECTS, model=model, average=AveragedModel(model), scaler=scaler, **more)
        names["checkpoints"].close()
        assert scaler.get_scale() == 4.0, "of the first run"
    assert sorted(path.name[:15] for path in (job.folder / "objects").glob("step-*")) == [
        "step-0000000001",
        "step-0000000002",
    ]


@pytest.mark.parametrize("script", [LOOP, LOADER], ids=["loop", "loader"])
def test_a_loop_that_leaves_and_comes_back_trains_every_sample_once(job: Job, script: str) -> None:
    job.run(script)
    assert len(job.samples) == LEFT_AFTER * 256
    job.run(script)
    assert sorted(job.samples) == list(range(SIZE))
    job.run(script)  # there is nothing left
    assert len(job.samples) == SIZE


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")
def test_the_loop_with_a_stateful_data_loader_does_so_too(job: Job) -> None:
    found = pytest.importorskip("torchdata.stateful_dataloader", reason="the extra elastipod[data] is not installed")
    for samples in (LEFT_AFTER * 256, SIZE):
        job.run(stateful_script(), StatefulDataLoader=found.StatefulDataLoader)
        assert len(set(job.samples)) == len(job.samples) == samples


def test_saves_passes_rates_and_the_sample_log_run(job: Job, tmp_path: Path) -> None:
    plan = ElasticBatches(SIZE, SIZE)
    (batch,) = plan.iterate(0, 1)
    job.run(SAVES.replace("...\n", ""), step=7, loss=0.5)
    job.run(ACCUMULATE, batch=batch)
    assert sorted(job.samples) == list(range(SIZE))
    checkpoints = CheckpointManager(tmp_path / "logged")
    checkpoints.claim()  # as `load_latest` in the guide's loop
    job.run(LOG, batch=batch, loss=0.5, plan=plan, checkpoints=checkpoints, resume=None)
    assert audit(read_logs(tmp_path / "samples")).exact


def test_the_rate_of_a_batch_that_grew_is_there_at_the_first_step(job: Job, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "rated")
    rates = []
    for global_batch in (256, 512):
        names: dict[str, Any] = {"cosine": lambda step: 1.0, "checkpoints": checkpoints}
        found: dict[str, Any] = {}
        names |= {"plan": ElasticBatches(SIZE, global_batch), "found": found}
        used = job.run(RATE.replace("warm_up_steps=100", "warm_up_steps=0") + "found.update(locals())", **names)
        rates.append(used["optimizer"].param_groups[0]["lr"])
        extra = {"rate": found["rate"].state_dict()}
        checkpoints.save(1, model=used["model"], optimizer=used["optimizer"], scheduler=found["schedule"], extra=extra)
    assert rates == [1e-4, 2e-4]


def test_an_apply_of_the_scripts_own_steps_everything() -> None:
    class Average:
        updates = 0

        def update(self, model: nn.Module) -> None:
            self.updates += 1

        def state_dict(self) -> dict[str, int]:
            return {"updates": self.updates}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.updates = state["updates"]

    def build() -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda epoch: 0.1**epoch)
        return {"model": model, "optimizer": optimizer, "scheduler": schedule, "average": Average()}

    plan = ElasticBatches(6, 2, epochs=2)
    names: dict[str, Any] = {"elastipod": elastipod, "build": build, "plan": plan}
    exec(APPLY, names | {"DistributedDataParallel": DistributedDataParallel}, names)
    state = names["state"]
    for step in state.steps(plan):
        with step as batch:
            state.model(torch.ones(len(batch.indices), 1)).sum().backward()
    assert state.average.updates == plan.total_steps == 6
    assert state.scheduler.last_epoch == 2


def test_a_validation_between_two_steps_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1, 1)
        return model, torch.optim.SGD(model.parameters(), lr=1e-4)

    modes: list[bool] = []

    def train_on(model: nn.Module, batch: elastipod.Batch) -> None:
        modes.append(model.training)
        model(torch.ones(len(batch.indices), 1)).sum().backward()

    def validate(model: nn.Module) -> float:
        modes.append(model.training)
        return 0.5

    names = {"state": State(build), "plan": ElasticBatches(202, 2), "train_on": train_on, "validate": validate}
    exec(VALIDATION, names)
    assert capsys.readouterr().out == "step 100: 50.0%\n"
    assert modes == [*[True] * 100, False, True]
