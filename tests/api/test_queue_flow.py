"""Jobs in queues of a real Kueue: pods only on granted quota, growth, partial preemption, eviction and the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api import rights
from tests.api.compat_lives import operator
from tests.api.compat_nodes import PlayedNodes
from tests.api.jobs import get
from tests.api.kueue_objects import API, COOKBOOK, apply, lay_out, queues, wait_for
from tests.api.queue_jobs import FLAVOR_LABELS, KIND, QUICK, TOLERATION, Team, conditions
from tests.nonempty import every

from elastipod_local.cluster import Cluster
from elastipod_local.controlplane import KUEUE

CHART = Path(__file__).resolve().parents[2] / "charts" / "elastipod"
RELEASE = "aws-hyperpod"
NODES = 8
# For the cookbook's job, which asks for GPUs.
GPU_KIND = "ml.p5.48xlarge"
PREEMPTS = {"withinClusterQueue": "LowerPriority"}
CLASS = "kueue.x-k8s.io/priority-class"
HIGH = {CLASS: "high"}


@pytest.fixture(scope="module")
def played(kueue_server: Cluster) -> Iterator[PlayedNodes]:
    """Nodes with room for the jobs of all tests, whose pods answer like agents."""
    for name, value in (("high", 1000), ("higher", 2000)):
        body = {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
        apply(kueue_server, body)
    with PlayedNodes(kueue_server.kubeconfig, {KIND: NODES, GPU_KIND: 1}, {}) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def running(kueue_server: Cluster, played: PlayedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The operator, for all namespaces, with the rights that the chart gives it; its log."""
    folder = tmp_path_factory.mktemp("operator")
    kueue_server.helm(
        "upgrade", "--install", "elastipod", str(CHART), f"--namespace={RELEASE}", "--create-namespace",
        "--set=replicas=0,crds.install=false",
    )  # fmt: skip
    token = kueue_server.kubectl("-n", RELEASE, "create", "token", "elastipod", "--duration=2h").strip()
    access = yaml.safe_load(kueue_server.kubeconfig.read_text())
    access["users"][0]["user"] = {"token": token}
    (folder / "kubeconfig").write_text(json.dumps(access))
    (folder / "kubeconfig").chmod(0o600)
    more = {"KUBECONFIG": str(folder / "kubeconfig"), "POD_NAMESPACE": RELEASE, "POD_NAME": "elastipod-0"}
    with operator(kueue_server, folder, (), more) as log:
        yield log


@pytest.fixture
def team(kueue_server: Cluster, kueue_namespace: str, running: Path) -> Team:
    """A namespace with a queue of its own name, for four pods."""
    flavor, *others = queues(kueue_namespace, kueue_namespace, cpu="4", preemption=PREEMPTS)
    flavor["spec"] = {"nodeLabels": FLAVOR_LABELS, "tolerations": [TOLERATION]}
    apply(kueue_server, flavor, *others)
    return Team(kueue_server, kueue_namespace)


def test_a_job_grows_gives_way_grows_back_and_ends(team: Team, played: PlayedNodes) -> None:
    team.submit("elastic")
    team.trains("elastic", 4)
    workloads = team.workloads("elastic")
    assert {number: body["spec"]["podSets"][0]["count"] for number, body in workloads.items()} == {0: 2, 1: 1, 2: 1}
    assert [body["spec"]["priority"] for _, body in sorted(workloads.items())] == [0, -1_000_000_000, -1_000_000_000]
    assert every("finalizers" not in body["metadata"] for body in workloads.values())
    names = {body["metadata"]["name"]: number for number, body in workloads.items()}
    for pod in team.pods("elastic"):
        assert pod["spec"]["nodeSelector"] == FLAVOR_LABELS
        assert TOLERATION in pod["spec"]["tolerations"]
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "pods"
        assert "kueue.x-k8s.io/queue-name" not in pod["metadata"]["labels"]
        ordinal = int(pod["metadata"]["labels"]["elastipod.io/ordinal"])
        assert names[pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"]] == max(0, ordinal - 1)

    def all_ready() -> bool:
        return all(conditions(body).get("PodsReady") == "True" for body in team.workloads("elastic").values())

    team.until(all_ready, "Kueue to know that all pods are ready", "elastic")

    team.submit("urgent", labels=HIGH, elasticPolicy=None)
    team.trains("urgent", 2)
    team.trains("elastic", 2)
    assert len(team.pods("elastic")) == 2
    gone = {body["metadata"]["uid"] for body in workloads.values()} - {
        body["metadata"]["uid"] for body in team.workloads("elastic").values()
    }
    assert len(gone) == 2, "increments are given back by deletion"
    assert workloads[0]["metadata"]["uid"] not in gone

    played.complete({"urgent"})
    team.until(lambda: team.state("urgent")["type"] == "Completed", "the newcomer to end", "urgent")
    team.trains("elastic", 4)
    played.complete({"elastic"})
    team.until(lambda: team.state("elastic")["type"] == "Completed", "the job to end", "elastic")

    def all_finished() -> bool:
        return all(conditions(body).get("Finished") == "True" for body in team.workloads("elastic").values())

    team.until(all_finished, "Kueue to know that the job has ended", "elastic")


def test_an_evicted_base_stops_the_job_and_is_granted_again(team: Team) -> None:
    team.submit("held")
    team.trains("held", 4)
    base = team.workloads("held")[0]["metadata"]["uid"]
    stop(team, "HoldAndDrain")
    assert "ClusterQueue" in team.waits("held")["message"]
    team.until(lambda: not team.pods("held"), "the pods to be gone", "held")
    team.until(
        lambda: {n: conditions(w).get("QuotaReserved") for n, w in team.workloads("held").items()} == {0: "False"},
        "the quota to be given back",
        "held",
    )
    assert team.workloads("held")[0]["metadata"]["uid"] == base, "it keeps its place in the queue"
    stop(team, "None")
    team.trains("held", 4)
    assert team.workloads("held")[0]["metadata"]["uid"] == base


def stop(team: Team, policy: str) -> None:
    """Set the stop policy of the queue."""
    edit(team, stopPolicy=policy)


def edit(team: Team, **spec: Any) -> None:
    """Edit the team's ClusterQueue."""
    patch = json.dumps({"spec": spec})
    team.cluster.kubectl("patch", "clusterqueue", team.namespace, "--type=merge", "-p", patch)


def test_a_queue_that_does_not_exist_is_told_in_kueues_own_words(team: Team) -> None:
    team.submit("lost", queue="nowhere")
    team.until(lambda: "LocalQueue nowhere doesn't exist" in team.waits("lost")["message"], "Kueue's sentence", "lost")
    assert team.pods("lost") == []
    assert "startTime" not in get(team.cluster, team.namespace, "lost")["status"]
    missing = f"LocalQueue nowhere does not exist in namespace {team.namespace}"
    team.until(lambda: missing in team.warning("lost"), "the warning", "lost")
    make_nowhere(team)
    team.trains("lost", 4)
    team.until(lambda: team.warning("lost") == "", "the warning to go", "lost")
    assert "startTime" in get(team.cluster, team.namespace, "lost")["status"]
    team.until(lambda: team.warned_of("lost") == {"QueueMissing"}, "the Event", "lost")


def make_nowhere(team: Team) -> None:
    """Make the queue that was missing."""
    body = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": "nowhere", "namespace": team.namespace}}
    apply(team.cluster, {**body, "spec": {"clusterQueue": team.namespace}})


@pytest.mark.slow
def test_what_is_wrong_with_a_queue_is_told_until_it_is_mended(team: Team) -> None:
    edit(team, preemption={"withinClusterQueue": "Never"}, queueingStrategy="StrictFIFO")
    backoff = {"minStableSeconds": 0, "backoff": {"baseSeconds": 1}}
    team.submit("warned", elasticPolicy={**QUICK, "maxReplicas": 6}, elastipod=backoff)
    team.trains("warned", 4)
    wanted = (
        "preemption.withinClusterQueue Never",
        "queueingStrategy StrictFIFO and increments of the job wait there",
    )
    team.until(lambda: all(text in team.warning("warned") for text in wanted), "the warnings", "warned")
    stop(team, "HoldAndDrain")
    stopped = (
        f"ClusterQueue {team.namespace} admits nothing more, and running jobs are evicted (stopPolicy HoldAndDrain)"
    )
    team.until(lambda: stopped in team.warning("warned"), "the warning that it is stopped", "warned")
    team.until(lambda: "Stopped: " in team.warning("warned"), "Kueue's own words", "warned")
    told = {"PreemptionNever", "StrictFIFO", "QueueStopped"}
    team.until(lambda: team.warned_of("warned") == told, "an Event each", "warned")
    larger = queues(team.namespace, team.namespace, cpu="6")[1]["spec"]["resourceGroups"]
    edit(team, preemption=PREEMPTS, queueingStrategy="BestEffortFIFO", resourceGroups=larger, stopPolicy="None")
    team.trains("warned", 6)
    team.until(lambda: team.warning("warned") == "", "the warnings to go", "warned")


@pytest.mark.slow
def test_an_edited_priority_class_acts_while_the_job_trains(team: Team) -> None:
    team.submit("ranked", labels=HIGH)
    team.trains("ranked", 4)
    before = {number: body["metadata"]["uid"] for number, body in team.workloads("ranked").items()}

    def ranks() -> dict[int, tuple[int, str]]:
        specs = {number: body["spec"] for number, body in team.workloads("ranked").items()}
        return {n: (s["priority"], (s.get("priorityClassRef") or {}).get("name", "")) for n, s in specs.items()}

    extra = (-999_998_000, "")
    team.cluster.kubectl("-n", team.namespace, "label", "hpjob", "ranked", f"{CLASS}=higher", "--overwrite")
    team.until(lambda: ranks() == {0: (2000, "higher"), 1: extra, 2: extra}, "the priorities to follow", "ranked")
    team.cluster.kubectl("-n", team.namespace, "label", "hpjob", "ranked", f"{CLASS}-")
    pending = "the edited priority takes effect when the job is suspended and resumed"
    team.until(lambda: pending in team.warning("ranked"), "what Kueue refuses to be told", "ranked")
    assert {number: body["metadata"]["uid"] for number, body in team.workloads("ranked").items()} == before


@pytest.mark.slow
def test_two_specs_with_a_class_each(kueue_server: Cluster, played: PlayedNodes, running: Path) -> None:
    layout = lay_out(kueue_server, "one-queue.yaml")
    *classes, job = yaml.safe_load_all((COOKBOOK / "two-priorities.yaml").read_text())
    team = Team(kueue_server, layout.namespace("a"))
    job["metadata"]["namespace"] = team.namespace
    job["spec"]["elasticPolicy"]["scalingTimeoutInSeconds"] = 0
    for spec in job["spec"]["replicaSpecs"]:  # there is no storage here
        spec["template"]["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
    apply(kueue_server, *classes, job)
    team.trains("pretrain", 4)
    specs = {number: body["spec"] for number, body in team.workloads("pretrain").items()}
    assert {n: (s["priority"], s["priorityClassRef"]["name"]) for n, s in specs.items()} == {
        0: (1000, "training-base"), 1: (-1000, "training-extra"), 2: (-1000, "training-extra"),
    }  # fmt: skip
    assert {pod["spec"]["priority"] for pod in team.pods("pretrain")} == {1000, -1000}
    layout.ask("a", "newcomer", 14)  # of 16 GPUs: both increments are in its way
    team.trains("pretrain", 2)
    wait_for(kueue_server, team.namespace, "workload", "newcomer", "Admitted")
    assert {pod["metadata"]["labels"]["elastipod.io/spec"] for pod in team.pods("pretrain")} == {"base"}


def test_a_job_that_its_queue_can_never_hold_quotes_what_kueue_counts(team: Team) -> None:
    """Its own 4, 3 of the neighbour's 8, and 1 that the cohort may borrow from the one above."""
    below, above, neighbour = (f"{team.namespace}-{name}" for name in ("below", "above", "neighbour"))

    def quota(nominal: int, **limits: str) -> dict[str, Any]:
        resource = {"name": "cpu", "nominalQuota": str(nominal), **limits}
        group = {"coveredResources": ["cpu"], "flavors": [{"name": team.namespace, "resources": [resource]}]}
        return {"resourceGroups": [group]}

    def cohort(name: str, **spec: Any) -> dict[str, Any]:
        return {"apiVersion": API, "kind": "Cohort", "metadata": {"name": name}, "spec": spec}

    other = queues(neighbour, team.namespace, cohortName=below, **quota(8, lendingLimit="3"))[1]
    apply(
        team.cluster, cohort(above, **quota(10)), cohort(below, parentName=above, **quota(0, borrowingLimit="1")), other
    )
    edit(team, cohortName=below, **quota(4, borrowingLimit="5"))
    team.submit("large", elasticPolicy=None, replicaSpecs=[{"name": "pods", "replicas": 9}])
    team.until(lambda: "maximum capacity (8)" in team.waits("large")["message"], "Kueue's sentence", "large")


def test_the_label_of_a_template_becomes_the_jobs(team: Team) -> None:
    labels = {"kueue.x-k8s.io/queue-name": team.namespace, "kueue.x-k8s.io/priority-class": "high"}
    template = {"metadata": {"labels": labels}}
    team.submit("templated", queue="", replicaSpecs=[{"name": "pods", "replicas": 2, "template": template}])
    team.trains("templated", 4)
    assert (
        get(team.cluster, team.namespace, "templated")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        == team.namespace
    )
    workloads = team.workloads("templated")
    assert [w["spec"]["priority"] for _, w in sorted(workloads.items())] == [1000, -999_999_000, -999_999_000]
    assert every("kueue.x-k8s.io/queue-name" not in pod["metadata"]["labels"] for pod in team.pods("templated"))


def test_a_missing_priority_class_is_told(team: Team) -> None:
    team.submit("classless", labels={"kueue.x-k8s.io/priority-class": "none"})
    assert "WorkloadPriorityClass none" in team.waits("classless", "PriorityClassMissing")["message"]


def test_the_default_queue_adopts_jobs_without_a_label(team: Team) -> None:
    queue = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": "default", "namespace": team.namespace}}
    apply(team.cluster, {**queue, "spec": {"clusterQueue": team.namespace}})
    team.submit("adopted", queue="")
    team.trains("adopted", 4)
    assert get(team.cluster, team.namespace, "adopted")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "default"
    assert set(team.workloads("adopted")) == {0, 1, 2}


def test_a_job_without_a_queue_has_no_workload(team: Team) -> None:
    team.submit("free", queue="")
    team.trains("free", 4)
    assert team.workloads("free") == {}


@pytest.mark.slow
def test_pods_are_replaced_while_kueue_is_away(team: Team) -> None:
    team.submit("steady")
    team.trains("steady", 4)
    before = {pod["metadata"]["uid"] for pod in team.pods("steady")}
    team.cluster.kill_role(KUEUE)
    try:
        victim = team.pods("steady")[0]["metadata"]["name"]
        team.cluster.kubectl("-n", team.namespace, "delete", "pod", victim, "--grace-period=1", "--wait=false")

        def replaced() -> bool:
            pods = team.pods("steady")
            return len(pods) == 4 and {p["metadata"]["uid"] for p in pods} != before

        team.until(replaced, "the pod to be replaced", "steady")
        team.trains("steady", 4)
        team.submit("newcomer")
        team.waits("newcomer", "KueueUnavailable")
    finally:
        team.cluster.start_role(KUEUE)
    team.until(lambda: "insufficient" in team.waits("newcomer")["message"], "Kueue's sentence", "newcomer")


def test_suspending_gives_the_quota_back(team: Team) -> None:
    team.submit("paused")
    team.trains("paused", 4)
    team.patch("paused", runPolicy={"suspend": True})
    team.waits("paused")
    team.until(lambda: team.workloads("paused") == {}, "the quota to be given back", "paused")
    assert team.pods("paused") == []
    team.patch("paused", runPolicy={"suspend": False})
    team.trains("paused", 4)


def test_quota_of_a_deleted_job_is_free(team: Team) -> None:
    team.submit("deleted", elasticPolicy=None, replicaSpecs=[{"name": "pods", "replicas": 4}])
    team.trains("deleted", 4)
    team.submit("next", elasticPolicy=None, replicaSpecs=[{"name": "pods", "replicas": 4}])
    team.until(lambda: "insufficient unused quota" in team.waits("next")["message"], "Kueue's sentence", "next")
    team.cluster.kubectl("-n", team.namespace, "delete", "hpjob", "deleted")
    team.trains("next", 4)


@pytest.mark.slow
@pytest.mark.parametrize("served", ["nothing", "v1beta1"])
def test_without_kueue_a_job_with_a_queue_waits(
    served: str, api_server: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As before Kueue 0.15, which serves no v1beta2."""
    without: Any = Team(api_server, namespace)
    names = {"plural": "workloads", "singular": "workload", "kind": "Workload", "listKind": "WorkloadList"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": served, "served": True, "storage": True, "schema": schema}
    spec = {"group": "kueue.x-k8s.io", "scope": "Namespaced", "names": names, "versions": [version]}
    older = {"kind": "CustomResourceDefinition", "metadata": {"name": "workloads.kueue.x-k8s.io"}, "spec": spec}
    if served != "nothing":
        apply(api_server, {"apiVersion": "apiextensions.k8s.io/v1", **older})
        api_server.kubectl("wait", "--for=condition=Established", "crd/workloads.kueue.x-k8s.io")
    try:
        with operator(api_server, tmp_path_factory.mktemp("without"), (namespace,)):
            without.submit("queued", queue="gpus")
            assert "install Kueue 0.15 or newer" in without.waits("queued", "KueueUnavailable")["message"]
            assert without.pods("queued") == []
    finally:
        api_server.kubectl("delete", "crd", "workloads.kueue.x-k8s.io", "--ignore-not-found")


@pytest.mark.slow
def test_what_admission_checks_say_and_add(team: Team) -> None:
    with_check(team, "prov")
    team.submit("checked", elasticPolicy=None)
    waits = "admission check prov is Pending"
    team.until(lambda: waits in team.waits("checked")["message"], "the admission check to be told of", "checked")
    assert team.pods("checked") == []
    update = {
        "name": "pods",
        "labels": {"reservation": "r1"},
        "annotations": {"reserved": "yes"},
        "tolerations": [EXTRA],
    }
    answer(team, "checked", state="Ready", podSetUpdates=[update])
    team.trains("checked", 2)
    for pod in team.pods("checked"):
        assert pod["metadata"]["labels"]["reservation"] == "r1"
        assert pod["metadata"]["annotations"]["reserved"] == "yes"
        assert EXTRA in pod["spec"]["tolerations"]
    answer(team, "checked", state="Retry", message="the reservation is over")
    team.waits("checked")
    team.until(lambda: not team.pods("checked"), "the pods to be gone", "checked")
    team.until(lambda: has_pending_check(team, "checked"), "Kueue to ask the check again", "checked")
    answer(team, "checked", state="Ready")
    team.trains("checked", 2)


@pytest.mark.slow
def test_pods_that_cannot_be_as_kueue_wants_them_are_not_made(team: Team) -> None:
    with_check(team, "prov")
    team.submit("clash", elasticPolicy=None)
    team.until(lambda: has_pending_check(team, "clash"), "the check to be asked", "clash")
    update = {"name": "pods", "nodeSelector": {"node.kubernetes.io/instance-type": "another"}}
    answer(team, "clash", state="Ready", podSetUpdates=[update])
    team.until(
        lambda: "admission check prov sets nodeSelector" in told(team, "clash"), "the clash to be told of", "clash"
    )
    assert team.pods("clash") == []


def told(team: Team, name: str) -> str:
    """Give all that a job's conditions say."""
    return json.dumps(get(team.cluster, team.namespace, name).get("status", {}).get("conditions"))


EXTRA = {"key": "reservation", "operator": "Exists"}


def with_check(team: Team, name: str) -> None:
    """Have the queue wait for an admission check, whose controller the test plays."""
    check = {
        "apiVersion": API,
        "kind": "AdmissionCheck",
        "metadata": {"name": name},
        "spec": {"controllerName": "test/plays"},
    }
    apply(team.cluster, check)
    active = {
        "type": "Active",
        "status": "True",
        "reason": "Active",
        "message": "played",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    patch = json.dumps({"status": {"conditions": [active]}})
    team.cluster.kubectl("patch", "admissioncheck", name, "--subresource=status", "--type=merge", "-p", patch)
    wanted = json.dumps({"spec": {"admissionChecksStrategy": {"admissionChecks": [{"name": name}]}}})
    team.cluster.kubectl("patch", "clusterqueue", team.namespace, "--type=merge", "-p", wanted)


def has_pending_check(team: Team, name: str) -> bool:
    """Whether Kueue waits for the check of a job's base, and for nothing else."""
    body = team.workloads(name).get(0, {})
    states = [check["state"] for check in body.get("status", {}).get("admissionChecks", ())]
    return (
        states == ["Pending"]
        and conditions(body).get("QuotaReserved") == "True"
        and conditions(body).get("Evicted") != "True"
    )


def answer(team: Team, name: str, *, state: str, message: str = "", **more: Any) -> None:
    """Say what the check says of a job's base."""
    body = team.workloads(name)[0]
    (check,) = body["status"]["admissionChecks"]
    check |= {"state": state, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z", **more}
    patch = json.dumps({"status": {"admissionChecks": [check]}})
    team.cluster.kubectl(
        "-n", team.namespace, "patch", "workloads.v1beta2.kueue.x-k8s.io", body["metadata"]["name"], "--subresource=status",
        "--type=merge", "-p", patch,
    )  # fmt: skip


@pytest.mark.slow
def test_kueue_places_pods_in_one_domain(team: Team, played: PlayedNodes) -> None:
    rack = "example.com/rack"
    racks = {f"c5-{number}": "ab"[number % 2] for number in range(NODES)}
    for node, domain in racks.items():
        team.cluster.kubectl("label", "node", node, f"{rack}={domain}", "--overwrite")
    levels = [{"nodeLabel": rack}, {"nodeLabel": "kubernetes.io/hostname"}]
    name = f"{team.namespace}-racks"
    flavor, queue, local = queues(name, team.namespace, cpu="16")
    flavor["spec"] = {"nodeLabels": FLAVOR_LABELS, "topologyName": name}
    topology = {"apiVersion": API, "kind": "Topology", "metadata": {"name": name}, "spec": {"levels": levels}}
    apply(team.cluster, topology, flavor, queue, local)
    template = {"metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": rack}}}
    specs = [{"name": "pods", "replicas": 2, "template": template}]
    team.submit("racked", queue=name, replicaSpecs=specs)
    team.trains("racked", 4)
    pods = team.pods("racked")
    (domain,) = {racks[pod["spec"]["nodeName"]] for pod in pods}
    assert every(pod["spec"]["nodeSelector"]["kubernetes.io/hostname"] == pod["spec"]["nodeName"] for pod in pods)
    asked = {number: body["spec"]["podSets"][0] for number, body in team.workloads("racked").items()}
    assert every(pod_set["topologyRequest"]["required"] == rack for pod_set in asked.values())
    assert [asked[number]["template"]["spec"]["nodeSelector"].get(rack) for number in (1, 2)] == [domain, domain]
    assert "nodeSelector" not in asked[0]["template"]["spec"]


@pytest.mark.slow
def test_each_right_of_the_operator_is_used(team: Team, played: PlayedNodes) -> None:
    """A life that needs nearly all of them; docs/reference/permissions.md names the test of each other one."""
    log = team.cluster.folder.parent / "audit.log"
    unused = {right for right, test in rights.told().items() if not test}
    team.submit("free", queue="", elasticPolicy=None, runPolicy={"ttlSecondsAfterFinished": 1})
    team.submit("ranked", labels=HIGH, elasticPolicy=None)
    pod = {"priorityClassName": "system-node-critical"}
    team.submit(
        "critical", elasticPolicy=None, replicaSpecs=[{"name": "pods", "replicas": 2, "template": {"spec": pod}}]
    )
    for name in ("free", "ranked", "critical"):
        team.trains(name, 2)
    played.complete({"free"})
    team.cluster.kubectl("-n", team.namespace, "label", "hpjob", "ranked", f"{CLASS}=higher", "--overwrite")
    team.patch("critical", runPolicy={"suspend": True})
    team.submit("plain", elasticPolicy=None)

    def all_used() -> bool:
        unused.difference_update(rights.used(log))
        return not unused

    team.until(all_used, "the use of each right", "plain")


def test_the_rights_of_the_chart_are_enough(team: Team, running: Path) -> None:
    """After all the others of this module: nothing that they had the operator do was forbidden."""
    assert "forbidden" not in running.read_text(encoding="utf-8")


@pytest.mark.slow
def test_without_the_right_to_read_cluster_queues_jobs_run_and_are_not_warned(team: Team, running: Path) -> None:
    """The last of this module, for what is forbidden here stands in the log."""
    role = f"{RELEASE}-elastipod"
    rules = json.loads(team.cluster.kubectl("get", "clusterrole", role, "-o", "json"))["rules"]
    fewer = [rule for rule in rules if "clusterqueues" not in rule["resources"]]
    assert len(fewer) == len(rules) - 1
    edit(team, preemption={"withinClusterQueue": "Never"})

    def give(rights: list[dict[str, Any]]) -> None:
        team.cluster.kubectl("patch", "clusterrole", role, "--type=merge", "-p", json.dumps({"rules": rights}))

    def told() -> int:
        return running.read_text(encoding="utf-8").count("jobs get no warnings about their queues")

    give(fewer)
    try:
        team.submit("unwarned")
        team.trains("unwarned", 4)
        team.until(lambda: told() == 1, "the log to say so", "unwarned")
        team.submit("second", queue="nowhere")  # has the queues read once more
        missing = "LocalQueue nowhere does not exist"
        team.until(lambda: missing in team.warning("second"), "what may be read", "second")
        assert team.warning("unwarned") == ""
        assert told() == 1
    finally:
        give(rules)
    make_nowhere(team)  # and once more
    team.until(lambda: "Never" in team.warning("unwarned"), "the warning that is told again", "unwarned")
