"""The layouts of examples/kueue on a real Kueue: every queue becomes active, and who gives way is who the comments say."""

from __future__ import annotations

import json

import pytest
import yaml
from tests.api.kueue_objects import COOKBOOK, FAIR_KUEUE, apply, condition, lay_out, wait_for
from tests.nonempty import every

from elastipod_local.cluster import Cluster

INCREMENT = -1_000_000_000


def test_one_queue_gives_up_increments_and_spares_bases(kueue_server: Cluster) -> None:
    layout = lay_out(kueue_server, "one-queue.yaml")
    layout.admit("a", "elastic", 2, priority=0)
    for index in (1, 2):
        layout.admit("a", f"elastic-more-{index}", 7, INCREMENT)
    layout.ask(
        "a", "newcomer", 3, priority=-10
    )  # less important than the elastic job's base, and still before its increments
    (evicted,) = layout.wait_for_eviction()  # no more than are needed; of those admitted in one second any
    assert evicted in ("elastic-more-1", "elastic-more-2")
    assert "preemption of 1 workload" in layout.wait_for_decision("a", "newcomer")
    layout.release("a", evicted)
    wait_for(layout.cluster, layout.namespace("a"), "workload", "newcomer", "Admitted")
    assert layout.evicted() == set()


def test_pending_increments_hold_nobody_up(kueue_server: Cluster) -> None:
    layout = lay_out(kueue_server, "one-queue.yaml")
    layout.admit("a", "elastic", 10)
    layout.ask("a", "elastic-more-1", 8, INCREMENT)
    assert "insufficient unused quota" in layout.wait_for_decision("a", "elastic-more-1")
    layout.admit("a", "other-more-1", 6, INCREMENT)


@pytest.mark.slow
def test_a_lender_takes_increments_back_and_no_bases(kueue_server: Cluster) -> None:
    layout = lay_out(kueue_server, "cohort.yaml")
    layout.admit("b", "own", 8)
    layout.admit("b", "lent-base", 4)
    layout.admit("b", "lent-more", 4, INCREMENT)
    layout.ask("a", "owner", 2)
    assert layout.wait_for_eviction() == {"lent-more"}
    layout.release("b", "lent-more")
    wait_for(layout.cluster, layout.namespace("a"), "workload", "owner", "Admitted")
    layout.ask("a", "owner-more", 6, INCREMENT)  # within team-a's own quota, but only 2 are free
    assert "insufficient unused quota" in layout.wait_for_decision("a", "owner-more")
    assert layout.evicted() == set()
    # What the comment warns of.
    patch = {"spec": {"preemption": {"reclaimWithinCohort": "Any", "borrowWithinCohort": {"policy": "Never"}}}}
    queue = layout.namespace("a")
    layout.cluster.kubectl("patch", "clusterqueue", queue, "--type=merge", "-p", json.dumps(patch))
    (evicted,) = layout.wait_for_eviction()
    assert evicted in ("own", "lent-base")  # the newer one; of those admitted in one second any


@pytest.mark.slow
def test_a_base_that_borrows_pushes_only_borrowing_increments_aside(kueue_server: Cluster) -> None:
    layout = lay_out(kueue_server, "cohort.yaml")
    layout.admit("b", "small", 4, priority=-100)
    layout.admit("b", "small-more", 8, INCREMENT)
    layout.ask("a", "big", 10, priority=1000)
    assert layout.wait_for_eviction() == {"small-more"}
    layout.release("b", "small-more")
    wait_for(layout.cluster, layout.namespace("a"), "workload", "big", "Admitted")

    layout = lay_out(kueue_server, "cohort.yaml")
    layout.admit("b", "small", 12, priority=-100)
    layout.ask("a", "big", 10, priority=1000)  # the higher class is within its rights up to 8, but asks for more
    assert "insufficient unused quota" in layout.wait_for_decision("a", "big")
    assert layout.evicted() == set()


def test_classes_are_values_of_bases(kueue_server: Cluster) -> None:
    classes = list(yaml.safe_load_all((COOKBOOK / "priorities.yaml").read_text()))
    apply(kueue_server, *classes)
    values = {item["metadata"]["name"]: item["value"] for item in classes}
    assert values == {"important": 1000, "normal": 0}
    assert every(abs(value) <= 1_000_000 for value in values.values())


def test_the_job_names_what_the_layouts_have(kueue_server: Cluster) -> None:
    layout = lay_out(kueue_server, "one-queue.yaml")
    job = yaml.safe_load((COOKBOOK / "job.yaml").read_text())
    labels = job["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] in {
        item["metadata"]["name"] for item in layout.objects if item["kind"] == "LocalQueue"
    }
    covered = next(item for item in layout.objects if item["kind"] == "ClusterQueue")["spec"]["resourceGroups"][0]
    for spec in job["spec"]["replicaSpecs"]:
        for container in spec["template"]["spec"]["containers"]:
            asked = {**container["resources"]["requests"], **container["resources"]["limits"]}
            assert set(asked) <= set(covered["coveredResources"])
    job["metadata"]["namespace"] = layout.namespace("a")
    apply(kueue_server, job)


@pytest.mark.long("variants")
def test_fair_sharing_is_set_as_the_comment_says(fair_kueue_server: Cluster) -> None:
    header = [line.removeprefix("#   ") for line in (COOKBOOK / "fair-sharing.yaml").read_text().splitlines()]
    start = header.index("fairSharing:")
    assert yaml.safe_load("\n".join(header[start : start + 2])) == FAIR_KUEUE.settings
    # What runs there is started with it.
    config = yaml.safe_load((fair_kueue_server.folder / "kueue" / "config.yaml").read_text())
    assert config["fairSharing"] == FAIR_KUEUE.settings["fairSharing"]


@pytest.mark.long("variants")
def test_a_pool_is_shared_by_weight(fair_kueue_server: Cluster) -> None:
    layout = lay_out(fair_kueue_server, "fair-sharing.yaml")
    layout.admit("b", "elastic", 4)
    for index in (1, 2, 3):
        layout.admit("b", f"elastic-more-{index}", 4, INCREMENT)
    layout.ask("a", "newcomer", 4)
    (first,) = layout.wait_for_eviction()
    assert first.startswith("elastic-more-")
    layout.release("b", first)
    wait_for(layout.cluster, layout.namespace("a"), "workload", "newcomer", "Admitted")
    layout.ask("a", "newcomer-more", 4, INCREMENT)  # 12 to 4 with weights of 1 to 2: an increment moves too
    (second,) = layout.wait_for_eviction()
    assert second.startswith("elastic-more-")
    layout.release("b", second)
    wait_for(layout.cluster, layout.namespace("a"), "workload", "newcomer-more", "Admitted")
    assert condition(layout.cluster, layout.namespace("b"), "workload", "elastic", "Evicted").get("status") != "True"
