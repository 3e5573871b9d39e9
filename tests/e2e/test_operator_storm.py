"""The operator killed every 5 to 15 seconds while ten jobs resize and crash: nothing is lost, counted twice or done twice.

Seconds of the storm: the environment variable STORM_SECONDS (600).
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.host_view import generations, overlaps, training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.operator_processes import Operators, operators_outside
from tests.e2e.operator_storm import Life, Storm, losses
from tests.long_runs import LongRun

from elastipod_local.cluster import Cluster

SECONDS = float(os.environ.get("STORM_SECONDS", "600"))
REPORTS = ROOT / ".run" / "long"
SCRIPT = Path(__file__).with_name("light_training.py")
LIGHT, HEAVY = 8, 2
LIGHT_PACE_S, HEAVY_PACE_S = 0.1, 0.4
SETTLE_S = 600.0
UNLIMITED = {"jobMaxRetryCount": 10_000}
QUICK = {"minStableSeconds": 1, "backoff": {"baseSeconds": 1, "maxSeconds": 4}}
# What jobs differ in, taken in turn.
VARIANTS: list[dict[str, Any]] = [
    {"elastipod": {**QUICK, "payback": "Off"}},
    {"elastipod": QUICK},
    {
        "elastipod": {**QUICK, "payback": "Off"},
        "runPolicy": {**UNLIMITED, "restartPolicy": {"evalPeriodSeconds": 60, "numRestartBeforeFullJobRestart": 2}},
    },
    {"elastipod": {**QUICK, "payback": "Off"}, "runPolicy": {**UNLIMITED, "cleanPodPolicy": "None"}},
]


@contextmanager
def storm_jobs(cluster: Cluster, folder: Path) -> Iterator[list[Life]]:
    """Ten jobs: light ones of up to three replicas, and two that train the example model with torch."""
    lives: list[Life] = []
    shutil.copy(SCRIPT, folder / SCRIPT.name)
    try:
        for number in range(LIGHT + HEAVY):
            is_light = number < LIGHT
            job = JobRun(cluster, f"storm-{number}" if is_light else f"storm-torch-{number}")
            maximum = 3 if is_light else 2
            lives.append(Life(job, maximum, folder / job.name / "samples"))
            variant = {"runPolicy": UNLIMITED, **VARIANTS[number % len(VARIANTS)]}
            if is_light:
                steps = max(200, int(1.5 * SECONDS / LIGHT_PACE_S))
                command = ["hyperpodrun", "--no-warm-workers", f"/data/{SCRIPT.name}", f"--folder=/data/{job.name}"]
                command += [f"--steps={steps}", f"--pace={LIGHT_PACE_S}", "--hurry=/data/hurry"]
                job.apply(command=command, minimum=1, maximum=maximum, step=1, cpu="50m", **variant)
            else:
                steps = max(100, int(0.8 * SECONDS / HEAVY_PACE_S))
                arguments = (
                    f"--steps={steps}",
                    f"--min-step-time={HEAVY_PACE_S}",
                    "--checkpoint-every=10",
                    "--epochs=10",
                )
                job.apply(*arguments, minimum=1, maximum=maximum, step=1, cpu="50m", **variant)
        yield lives
    finally:
        for life in lives:
            life.job.delete(wait=False)
        for life in lives:
            life.job.delete()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print at once, captured or not: it takes minutes."""

    def printed(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    return printed


@pytest.fixture
def volume(cluster: Cluster) -> Path:
    """The folder on this machine that jobs see as /data."""
    claim = json.loads(cluster.kubectl("get", "pvc", "training-data", "-o", "json"))
    folder: Path = cluster.shared / claim["spec"]["volumeName"]
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.long("storm")
@pytest.mark.timeout(int(SECONDS + SETTLE_S + 600))
def test_the_operator_dies_again_and_again(
    cluster: Cluster, volume: Path, long_run: LongRun, say: Callable[[str], None]
) -> None:
    logs = REPORTS / "storm-operators"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    with operators_outside(cluster, logs) as operators, storm_jobs(cluster, volume) as lives:
        operators.start("operator-a")
        operators.start("operator-b")
        storm = Storm(operators, lives, random.Random(long_run.seed), say)
        try:
            storm.run(SECONDS)
            (volume / "hurry").touch()
            storm.settle(SETTLE_S)
            told = {life.job.name: verdict(life) for life in lives}
        finally:
            write_report(storm, operators, {})
        write_report(storm, operators, told)
        count(long_run, storm)
        assert not operators.complaints()


def verdict(life: Life) -> dict[str, Any]:
    """Hold a completed job against what must be true of it, and give the figures."""
    name, numbers, audit = life.job.name, sorted(life.entries), life.job.audit()
    assert audit["exit_code"] == 0, (name, audit)
    assert not overlaps(life.samples), name
    assert not training_processes(name), name
    assert numbers == list(range(1, len(numbers) + 1)), (name, numbers)
    assert {generation.number for generation in generations(life.samples)} <= set(numbers), name
    assert not losses(generations(life.samples), life.entries), name
    harm = life.acts["crashes"] + life.acts["deleted pods"]
    assert life.restarts <= harm, f"{name} counts {life.restarts} restarts, {harm} workers and pods were hit"
    kinds = Counter(entry["kind"] for entry in life.entries.values())
    causes = Counter(entry["cause"] for entry in life.entries.values())
    return {
        "acts": dict(life.acts), "generations": len(numbers), "kinds": dict(kinds), "causes": dict(causes),
        "restarts": life.restarts, "steps": audit["final_step"], "steps_repeated": sum(audit["steps_repeated"].values()),
        "samples": audit["samples_unique"], "audit": "exact",
    }  # fmt: skip


def write_report(storm: Storm, operators: Operators, told: dict[str, Any]) -> None:
    """Write .run/long/storm-jobs.json: what the storm did and how each job came through."""
    body = {
        "seconds": SECONDS,
        "operators killed": dict(storm.kills),
        "leaders when killed": dict(storm.leaders),
        "leases lost": storm.leases_lost,
        "looks": storm.looks,
        "complaints of operators": operators.complaints(),
        "state": storm.summary(),
        "jobs": told,
    }
    (REPORTS / "storm-jobs.json").write_text(json.dumps(body, indent=1) + "\n")


def count(long_run: LongRun, storm: Storm) -> None:
    lives = storm.lives.values()
    acts = sum((life.acts for life in lives), Counter[str]())
    long_run.count(
        seconds=SECONDS,
        jobs=len(lives),
        kills=storm.kills.total(),
        leases_lost=storm.leases_lost,
        looks=storm.looks,
        generations=sum(len(life.entries) for life in lives),
        restarts=sum(life.restarts for life in lives),
        **acts,
    )
