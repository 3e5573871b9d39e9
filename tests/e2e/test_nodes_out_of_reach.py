"""A node below a job hangs, or loses its network, and comes back with workers that know of nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.e2e.recoveries import one_of_its_nodes, recovery_after, until_in_memory

from elastipod_local.cluster import Cluster

QUICK = {"minStableSeconds": 0, "payback": "Off"}


@pytest.mark.long("out-of-reach")
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [("frozen", Cluster.freeze_node, Cluster.thaw_node), ("cut-off", Cluster.partition_node, Cluster.heal_node)],
)
def test_the_others_go_on_and_what_comes_back_changes_nothing(
    job: JobRun, cluster: Cluster, name: str, begin: Callable[[Cluster, str], None], end: Callable[[Cluster, str], None]
) -> None:
    job.name = f"node-{name}"
    train = ("--steps=3000", "--epochs=3", "--min-step-time=0.2", "--checkpoint-every=1000")
    job.apply(*train, script="train.py", start=4, step=1, minimum=1, elastipod=QUICK)
    job.until_training(4, beyond_step=10)
    before, generation = training_processes(job.name), job.history()[-1]["generation"]
    victim = one_of_its_nodes(job, cluster)
    begin(cluster, victim)
    try:
        entry = recovery_after(job, generation)
        assert (entry["from"], entry["to"], entry["depth"]) == (4, 3, "memory"), job.story()
        until_in_memory(job, before, generation, staying=3)
    finally:
        end(cluster, victim)
    cluster.kubectl("wait", "--for=condition=Ready", f"node/{victim}", "--timeout=240s")
    job.until_training(4, beyond_step=job.until("a step that an agent knows", job.step))
    kinds = [e["kind"] for e in job.history() if e["generation"] > generation]
    assert kinds.count("recovery") == 1, job.story()
    audit = job.audit()  # of a job that goes on
    assert (audit["duplicates"], audit["foreign"]) == (0, 0), audit
    assert sum(audit["steps_repeated"].values()) <= 1, audit
