"""The progress that is written on a job while it trains: few writes, and nothing else changes because of them."""

from __future__ import annotations

from tests.sim.scripted_schedules import SCHEDULES
from tests.sim.simulation import Simulation

from elastipod_operator.core.names import ANNOTATION_STEP

TRAINS_S = 3600.0


def trained(*, writes_progress: bool) -> tuple[Simulation, int]:
    """Let a job train for an hour in which nothing happens; give the writes of the last 50 minutes."""
    simulation = Simulation(SCHEDULES["nothing happens"])
    assert simulation.shell is not None
    simulation.shell.writes_progress = writes_progress
    simulation.kernel.run(600.0)
    before = simulation.cluster.writes
    simulation.kernel.run(TRAINS_S)
    assert not simulation.checker.record.outcome
    return simulation, simulation.cluster.writes - before


def test_an_hour_of_training_costs_few_writes() -> None:
    simulation, writes = trained(writes_progress=True)
    job, shell = simulation.cluster.job, simulation.shell
    assert job is not None
    assert shell is not None
    assert 8 <= writes <= 30, simulation.cluster.last_write
    made = max(run.step for run in simulation.training.runs.values())
    told = int(job.annotations[ANNOTATION_STEP])
    assert made * 0.8 <= told <= made
    quiet, none = trained(writes_progress=False)
    assert none == 0
    assert quiet.cluster.job is not None
    assert ANNOTATION_STEP not in quiet.cluster.job.annotations
    assert quiet.shell is not None
    assert shell.passes <= quiet.shell.passes + 3 * writes
