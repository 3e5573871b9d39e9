"""A GradScaler in resizes and recoveries in memory: steps that overflow are left out everywhere, and the scale is the same everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.inmemory_job import InMemoryJob, train_alone
from tests.e2e.inmemory_scaled_worker import OVERFLOWS
from tests.e2e.inmemory_schedules import Played
from tests.e2e.inmemory_slots import Resize
from tests.e2e.torch_fork_server import TorchForkServer
from tests.patience import PATIENCE_S

from elastipod.chaos import FaultKind, Moment, PlannedFault

WORKER = Path(__file__).with_name("inmemory_scaled_worker.py")
SCALE = re.compile(r"step (\d+) scale (\S+)")


@pytest.fixture(scope="module")
def undisturbed(fork_server: TorchForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a single process has left, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_alone(folder, fork_server, WORKER)
    return folder


def scales(folder: Path) -> dict[int, set[float]]:
    """Give the scales that ranks have told after each step."""
    found: dict[int, set[float]] = {}
    for path in folder.glob("output*"):
        for step, scale in SCALE.findall(path.read_text()):
            found.setdefault(int(step), set()).add(float(scale))
    return found


def final(folder: Path) -> str:
    """Give what a single process has left: a digest of its weights and moments, and the state of its scaler."""
    text = (folder / "final-single").read_text()
    assert json.loads(text)["_growth_tracker"] > 0, "steps since the scale changed are part of the state"
    return text


def halved(told: Mapping[int, set[float]]) -> set[int]:
    """Give the steps with which the scale went down."""
    return {step for step in told if step > 1 and min(told[step]) < min(told[step - 1])}


def play(folder: Path, fork_server: TorchForkServer, *, options: Mapping[str, Any] | None = None, **job: Any) -> Played:
    """Play a job to its end. Its steps take long enough for a resize to follow soon after the step that it waits for."""
    options = {"step_s": 0.05, **(options or {})}
    played = InMemoryJob(folder, fork_server, size=2, worker=WORKER, options=options, **job)
    return Played(folder, played.run(PATIENCE_S))


def test_a_scaler_ends_as_if_nothing_had_happened_when_the_world_changes_beside_overflows(
    tmp_path: Path, fork_server: TorchForkServer, undisturbed: Path
) -> None:
    expected = scales(undisturbed)
    assert halved(expected) == set(OVERFLOWS[1:])
    job = play(tmp_path, fork_server, resizes=[Resize(5, 4), Resize(12, 2)])
    worlds = [job.joined(generation) for generation in (1, 2, 3)]
    assert [len(world) for world in worlds] == [2, 4, 2], job.told()
    assert worlds[0][0][0] == worlds[1][0][0] == worlds[2][0][0], "rank 0 is one process"
    for world in worlds:
        assert world[0][2] + 1 in OVERFLOWS, "the first step of each world overflows"
    assert not any(job.report.steps_repeated.values()), job.told()
    assert (job.finals, job.report.exact) == ({final(undisturbed)}, True), job.told()
    assert scales(tmp_path) == expected, job.told()


@pytest.mark.parametrize(
    ("moment", "begins"), [(Moment.BACKWARD, 9), pytest.param(Moment.BEFORE_APPLY, 10, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_lost_in_a_step_that_overflows_is_replaced_with_the_scale_of_the_others(
    moment: Moment, begins: int, tmp_path: Path, fork_server: TorchForkServer, undisturbed: Path
) -> None:
    """Those who have the reduced gradients leave the step out alone; otherwise the new world repeats it."""
    job = play(tmp_path, fork_server, faults=[PlannedFault(FaultKind.KILL, moment, rank=1, step=10)])
    assert {step for _, _, step in job.joined(2).values()} == {begins}, job.told()
    assert (job.finals, job.report.exact) == ({final(undisturbed)}, True), job.told()
    assert scales(tmp_path) == scales(undisturbed), job.told()


def test_the_reduction_of_ddp_carries_an_overflow_to_all_ranks(tmp_path: Path, fork_server: TorchForkServer) -> None:
    """Only one rank's own gradients overflow, in the first step of a world too, whose gradients are compared."""
    job = play(tmp_path, fork_server, resizes=[Resize(5, 3), Resize(12, 2)], options={"is_exact": False})
    assert job.ended.generations == 3, job.told()
    assert len(job.finals) == 1, "all ranks end with the same weights and the same scale"
    assert not any(job.report.steps_repeated.values()), job.told()
    told = scales(tmp_path)
    assert all(job.joined(generation)[0][2] + 1 in OVERFLOWS for generation in (2, 3)), job.told()
    assert {len(each) for each in told.values()} == {1}, told
    assert halved(told) == set(OVERFLOWS[1:])
