"""Kueue in the local cluster: it admits, its webhooks refuse and convert, it dies and comes back, and two live side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.api.kueue_objects import (
    FAIR_KUEUE,
    apply,
    batch_job,
    condition,
    is_converted_by_kueue,
    pod_spec,
    queues,
    wait_for,
    workload,
)
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.controlplane import KUEUE
from elastipod_local.errors import CommandError, LocalClusterError
from elastipod_local.host import wait_until
from elastipod_local.kueue_config import USER, KueueOptions


def field(cluster: Cluster, namespace: str, kind: str, name: str, path: str) -> str:
    return cluster.kubectl("-n", namespace, "get", kind, name, "-o", f"jsonpath={{{path}}}")


def test_a_workload_is_admitted_and_one_that_does_not_fit_waits(kueue_server: Cluster, kueue_namespace: str) -> None:
    name = kueue_namespace
    apply(kueue_server, *queues(name, name, cpu="4"), workload("fits", name, name, count=3))
    wait_for(kueue_server, name, "workload", "fits", "Admitted")
    apply(kueue_server, workload("waits", name, name, count=2))
    waiting = wait_for(kueue_server, name, "workload", "waits", "QuotaReserved", "False")
    assert "insufficient unused quota" in waiting["message"]
    assert field(kueue_server, name, "workload", "fits", ".status.admission.podSetAssignments[0].count") == "3"
    kueue_server.kubectl("-n", name, "delete", "workload", "fits")
    wait_for(kueue_server, name, "workload", "waits", "Admitted")


def test_the_webhook_refuses_what_the_schema_lets_pass(kueue_server: Cluster, kueue_namespace: str) -> None:
    with pytest.raises(CommandError, match=r"vworkload\.kb\.io.*denied the request"):
        apply(kueue_server, workload("malformed", kueue_namespace, "any", pods="1"))


def test_both_versions_are_served_whatever_is_stored(kueue_server: Cluster, kueue_namespace: str) -> None:
    name = kueue_namespace
    body = workload("classed", name, name)
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    body["spec"] |= {"priority": 7, "priorityClassRef": reference}
    apply(kueue_server, body)
    assert json.loads(field(kueue_server, name, "workload", "classed", ".spec.priorityClassRef")) == reference
    # The older version spells it otherwise: only Kueue's conversion knows how.
    old = "workloads.v1beta1.kueue.x-k8s.io"
    assert field(kueue_server, name, old, "classed", ".spec.priorityClassName") == "high"


def test_a_job_with_a_queue_is_held_until_there_is_room(kueue_server: Cluster, kueue_namespace: str) -> None:
    name = kueue_namespace
    apply(kueue_server, *queues(name, name, cpu="4"), batch_job("first", name, name, cpu="3"))
    wait_for(kueue_server, name, "job", "first", "Suspended", "False")
    apply(kueue_server, batch_job("second", name, name, cpu="3"))
    wait_for(kueue_server, name, "job", "second", "Suspended")
    kueue_server.kubectl("-n", name, "delete", "job", "first")
    wait_for(kueue_server, name, "job", "second", "Suspended", "False")


def test_kueue_away_and_back(kueue_server: Cluster, kueue_namespace: str) -> None:
    name = kueue_namespace
    apply(kueue_server, *queues(name, name, cpu="2"), workload("before", name, name))
    wait_for(kueue_server, name, "workload", "before", "Admitted")
    kueue_server.kill_role(KUEUE)
    try:
        with pytest.raises(CommandError, match="failed calling webhook"):
            apply(kueue_server, workload("meanwhile", name, name))
        if is_converted_by_kueue(kueue_server):
            with pytest.raises(CommandError, match="conversion webhook"):
                field(kueue_server, name, "workload", "before", ".metadata.name")
        else:
            assert field(kueue_server, name, "workload", "before", ".metadata.name") == "before"
    finally:
        kueue_server.start_role(KUEUE)
    assert condition(kueue_server, name, "workload", "before", "Admitted")["status"] == "True"
    apply(kueue_server, workload("after", name, name), workload("too-many", name, name))
    wait_for(kueue_server, name, "workload", "after", "Admitted")
    wait_for(kueue_server, name, "workload", "too-many", "QuotaReserved", "False")


@pytest.mark.slow
def test_a_frozen_kueue_keeps_the_api_server_waiting(kueue_server: Cluster, kueue_namespace: str) -> None:
    name = kueue_namespace
    apply(kueue_server, *queues(name, name))
    kueue_server.freeze_role(KUEUE)
    try:
        with pytest.raises(CommandError):
            kueue_server.kubectl("create", "-f", "-", input=json.dumps(workload("late", name, name)), timeout_s=1)
    finally:
        kueue_server.thaw_role(KUEUE)
    apply(kueue_server, workload("in-time", name, name))
    wait_for(kueue_server, name, "workload", "in-time", "Admitted")


def test_kueue_has_the_rights_of_its_chart_and_needs_no_more(kueue_server: Cluster) -> None:
    def may(*question: str) -> str:
        return kueue_server.kubectl("auth", "can-i", *question, f"--as={USER}", check=False).strip()

    assert may("update", "workloads.kueue.x-k8s.io", "--subresource=status") == "yes"
    assert may("list", "hyperpodpytorchjobs.sagemaker.amazonaws.com") == "yes"
    assert may("delete", "hyperpodpytorchjobs.sagemaker.amazonaws.com") == "no"
    assert may("delete", "nodes") == "no"
    log = (kueue_server.folder / "logs" / "kueue.log").read_text()
    assert "forbidden" not in log


@pytest.mark.long("variants")
def test_two_clusters_have_a_kueue_each(
    kueue_server: Cluster, fair_kueue_server: Cluster, kueue_namespace: str
) -> None:
    both = ((kueue_server, kueue_namespace), (fair_kueue_server, "other"))
    for cluster, namespace in both:
        apply(cluster, *queues("side", namespace, cpu="1"), workload("one", namespace, "side"))
    for cluster, namespace in both:
        wait_for(cluster, namespace, "workload", "one", "Admitted")


@pytest.mark.long("variants")
def test_the_pod_integration_holds_labelled_pods_where_it_is_on(fair_kueue_server: Cluster) -> None:
    apply(fair_kueue_server, *queues("pods", "other", cpu="1"))
    labels = {"kueue.x-k8s.io/queue-name": "pods"}
    metadata = {"name": "held", "namespace": "other", "labels": labels}
    apply(fair_kueue_server, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec(cpu="2")})
    assert "kueue.x-k8s.io/admission" in field(
        fair_kueue_server, "other", "pod", "held", ".spec.schedulingGates[*].name"
    )
    metadata |= {"name": "let-go"}
    apply(fair_kueue_server, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec(cpu="1")})
    wait_until(
        lambda: "kueue" not in field(fair_kueue_server, "other", "pod", "let-go", ".spec.schedulingGates[*].name"),
        deadline_s=PATIENCE_S,
        what="the pod to be let go",
    )


@pytest.mark.long("variants")
def test_settings_that_kueue_refuses(fair_kueue_server: Cluster) -> None:
    with pytest.raises(LocalClusterError, match=r"kueue ended at its start: .*noSuchSetting"):
        fair_kueue_server.add_kueue(KueueOptions(settings={"noSuchSetting": 1}))
    fair_kueue_server.add_kueue(FAIR_KUEUE)
    apply(fair_kueue_server, *queues("again", "other", cpu="1"), workload("again", "other", "again"))
    wait_for(fair_kueue_server, "other", "workload", "again", "Admitted")


@pytest.mark.long("variants")
def test_the_folder_holds_all_that_kueue_has(fair_kueue_server: Cluster) -> None:
    assert not Path("/etc/kueue").exists()
    assert not Path("/visibility").exists()
    held = {path.name for path in (fair_kueue_server.folder / "kueue").rglob("*") if path.is_file()}
    assert held == {"config.yaml", "kubeconfig", "applied.json", "ca.crt", "ca.key", "tls.crt", "tls.key"}
