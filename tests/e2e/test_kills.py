"""Any process killed at any time while a job trains in memory: `make test-long NAME=kills`.

Operator, API server, etcd, scheduler, controller manager, Kueue's manager, kubelets, containerd, agents with their fork servers, and
workers, those of rank 0 included; alone and in pairs, while the job trains, is resized and recovers. Steps go on, or the next one
follows from memory. Environment: KILLS, how many (100). VICTIMS: whom to kill, as `Victim` names them, separated by commas (all).
RUN_SECONDS: no further round begins after so long. RESUME=1: go on with what an earlier run left in .run/long/kills.jsonl.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.api.kueue_objects import apply, queues
from tests.e2e.conftest import ROOT
from tests.e2e.host_view import overlaps
from tests.e2e.job_run import JobRun
from tests.e2e.kill_rounds import OPERATORS, SIZES, Rounds
from tests.e2e.kills import Kill, Victim, shares_of
from tests.e2e.operator_processes import operators_outside
from tests.long_runs import LongRun

from elastipod_local.cluster import Cluster

KILLS = int(os.environ.get("KILLS", "100"))
SHARES = shares_of(os.environ.get("VICTIMS", ""))
RUN_SECONDS = float(os.environ.get("RUN_SECONDS", "3600"))
GOES_ON = os.environ.get("RESUME") == "1"
PACE_S = 0.15
SCHEDULED_S = 2  # a pod that is placed at once; the API server keeps whole seconds
REPORTS = ROOT / ".run" / "long"
FOUND = REPORTS / "kills.jsonl"
QUEUE = "kills"
SCRIPT = Path(__file__).with_name("kills_training.py")


@contextmanager
def queue(cluster: Cluster) -> Iterator[None]:
    """A queue of Kueue with quota for the maximum size, so that the job needs Kueue's manager when it grows or loses a pod."""
    cluster.add_kueue()
    quota = [{"name": name, "nominalQuota": amount} for name, amount in (("cpu", "1"), ("memory", "4Gi"))]
    groups = [{"coveredResources": ["cpu", "memory"], "flavors": [{"name": QUEUE, "resources": quota}]}]
    apply(cluster, *queues(QUEUE, "default", resourceGroups=groups))
    try:
        yield
    finally:
        cluster.kubectl(
            "delete", f"localqueue/{QUEUE}", f"clusterqueue/{QUEUE}", f"resourceflavor/{QUEUE}", "--wait=false"
        )


@contextmanager
def training(cluster: Cluster, name: str) -> Iterator[tuple[JobRun, Path]]:
    """A job of two or three replicas; gives it with its folder on this machine."""
    claim = json.loads(cluster.kubectl("get", "pvc", "training-data", "-o", "json"))
    volume: Path = cluster.shared / claim["spec"]["volumeName"]
    volume.mkdir(exist_ok=True)
    shutil.copy(SCRIPT, volume / SCRIPT.name)
    job = JobRun(cluster, name, labels={"kueue.x-k8s.io/queue-name": QUEUE})
    command = ["hyperpodrun", f"/data/{SCRIPT.name}", f"--folder=/data/{name}", f"--steps={int(RUN_SECONDS / PACE_S)}"]
    command += [f"--pace={PACE_S}", f"--hurry=/data/{name}/hurry"]
    try:
        job.apply(
            command=command,
            minimum=min(SIZES),
            maximum=max(SIZES),
            step=1,
            cpu="100m",
            runPolicy={"jobMaxRetryCount": 10_000},
            elastipod={"minStableSeconds": 1, "backoff": {"baseSeconds": 1, "maxSeconds": 4}},
        )
        yield job, volume / name
    finally:
        job.delete()


@pytest.mark.long("kills")
@pytest.mark.timeout(int(RUN_SECONDS) + 1800)
def test_any_process_is_killed_at_any_time(cluster: Cluster, long_run: LongRun) -> None:
    if not GOES_ON:
        FOUND.unlink(missing_ok=True)
    kills = [Kill(**json.loads(line)) for line in FOUND.read_text().splitlines()] if FOUND.exists() else []
    rng = random.Random(f"{long_run.seed} {len(kills)}")  # another piece of a run goes another way
    logs = REPORTS / "kills-operators"
    logs.mkdir(parents=True, exist_ok=True)
    name = f"kills-{len(kills)}"
    with queue(cluster), operators_outside(cluster, logs) as operators, training(cluster, name) as (job, folder):
        for name in OPERATORS:
            operators.start(name)
        rounds = Rounds(job, folder / "samples", operators, rng, SHARES)
        until = time.monotonic() + RUN_SECONDS
        while len(kills) < KILLS and time.monotonic() < until:
            found = rounds.round()
            kills += found
            with FOUND.open("a") as file:
                file.writelines(json.dumps(asdict(each)) + "\n" for each in found)
            count(long_run, kills, operators.complaints())
            long_run.write()
        rounds.until_whole()
        (folder / "hurry").touch()
        job.until("completion", lambda: job.state() == "Completed", 600)
        audit = job.audit()
    assert audit["exit_code"] == 0, audit
    assert not overlaps(folder / "samples")
    assert audit["optimizer_norms_differ"] == []
    problems = [f"{each.victim}: {each.problem}" for each in kills if each.problem]
    assert not problems, "\n".join(problems)
    assert len(kills) >= KILLS, f"{len(kills)} of {KILLS} kills in {RUN_SECONDS:g} s; RESUME=1 goes on"


def count(long_run: LongRun, kills: list[Kill], complaints: list[str]) -> None:
    long_run.count(
        kills=len(kills),
        kinds_of_victims=len({each.victim for each in kills}),
        problems=sum(bool(each.problem) for each in kills),
        changes_in_memory=sum(each.depths.count("memory") for each in kills if not each.with_others),
        most_steps_repeated=max(each.repeated for each in kills),
    )
    long_run.detail(
        by_victim={str(victim): of_victim(kills, victim) for victim in Victim},
        by_moment=dict(Counter(each.moment for each in kills)),
        complaints_of_operators=complaints,
        problems=[asdict(each) for each in kills if each.problem],
    )


def of_victim(kills: list[Kill], victim: str) -> dict[str, Any]:
    """Give the figures of one kind; gaps are of rounds in which nothing else was killed and the job was not resized."""
    own = [each for each in kills if each.victim == victim]
    alone = [each for each in own if not each.with_others and each.moment == "training"]
    gaps = [each.gap_s for each in alone if each.generations]
    quick = [each.gap_s for each in alone if each.generations and each.unscheduled_s <= SCHEDULED_S]
    return {
        "kills": len(own),
        "alone_while_training": len(alone),
        "steps_went_on": sum(not each.generations for each in alone),
        "depths": dict(Counter(depth for each in alone for depth in each.depths)),
        "gap_s_median": round(statistics.median(gaps), 2) if gaps else None,
        "gap_s_most": max(gaps, default=None),
        "gap_s_median_where_pods_were_scheduled": round(statistics.median(quick), 2) if quick else None,
        "repeated_most": max((each.repeated for each in own), default=0),
        "problems": sum(bool(each.problem) for each in own),
    }
