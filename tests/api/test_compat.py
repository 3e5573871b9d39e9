"""Manifests that users have already, applied unmodified: each trains with the right sizes and pods, resizes and completes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest
from tests.api.compat_jobs import EXPECTED, MANIFESTS, SPREAD, job_of, name_of
from tests.api.compat_lives import NAMESPACES, STATES, Lives, Patience, last_condition, live
from tests.api.hyp_client import Hyp
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until
from elastipod_operator.api import HyperPodPyTorchJob
from elastipod_operator.core.names import FIELD_MANAGER
from elastipod_operator.kube.observed_job import observe_job

SEEN_BY_HYP = {"Created", "Suspended", "PodsRunning", "Running", "Faulted", "Completed", "Failed"}
QUEUE_GROUP = "kueue.x-k8s.io/"
LISTED = [name_of(m) for m in EXPECTED if m not in SPREAD]  # by hyp, which looks at one of the two namespaces
ELASTIC = [m for m, e in EXPECTED.items() if len(e.sizes) > 1]


@pytest.fixture(scope="module")
def hyp(kueue_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hyp]:
    client = Hyp(kueue_server, tmp_path_factory.mktemp("hyp"), (NAMESPACES[0], NAMESPACES[2]))
    try:
        yield client
    finally:
        client.close()


def names_of_jobs(cluster: Cluster) -> set[str]:
    return {body["metadata"]["name"] for body in list_objects(cluster, "hyperpodpytorchjobs", "default")}


@pytest.fixture(scope="module")
def lives(kueue_server: Cluster, hyp: Hyp, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    # A job that is never listed with its state is left to the tests of the order.
    def ask_hyp(patience: Patience) -> None:
        patience.wait_until(lambda: hyp.has_listed(dict.fromkeys(LISTED, "Completed") | STATES))
        for verb in ("list", "list-pods", "describe"):
            chosen = () if verb == "list" else ("--job-name", "hyp-values")
            hyp.run(verb, "hyp-pytorch-job", *chosen)
        hyp.run("list", "hyp-pytorch-job", "--namespace", "compat-states")
        for name in STATES:
            hyp.run("describe", "hyp-pytorch-job", "--job-name", name, "--namespace", "compat-states")
        hyp.run("delete", "hyp-pytorch-job", "--job-name", "recipe-elastic-a1b2c")
        wait_until(
            lambda: "recipe-elastic-a1b2c" not in names_of_jobs(kueue_server),
            deadline_s=PATIENCE_S,
            what="the deleted job to be gone, while the operator runs",
        )

    def see_all_run(patience: Patience) -> None:
        patience.wait_until(lambda: hyp.has_listed(dict.fromkeys(LISTED, "Running")))

    return live(kueue_server, tmp_path_factory.mktemp("lives"), see_all_run, ask_hyp)


def slots(pods: Iterable[str]) -> list[str]:
    """Give the pods' names without their incarnations: one that left at a shrink comes back under another name."""
    return sorted(re.sub(r"(-\d+)-\d+$", r"\1", name) for name in pods)


def test_every_manifest_is_told_of() -> None:
    assert {path.stem for path in MANIFESTS} == EXPECTED.keys()


@pytest.mark.parametrize("manifest", EXPECTED)
def test_sizes(manifest: str) -> None:
    body = job_of(manifest)
    HyperPodPyTorchJob.model_validate(body)
    body["metadata"] |= {"uid": "u", "namespace": "n", "creationTimestamp": "2026-01-01T00:00:00Z"}
    fact, expected = observe_job(body), EXPECTED[manifest]
    assert fact.spec_error == ""
    assert fact.policy is not None
    sizes = fact.policy.sizes
    assert (sizes.allowed, sizes.start) == (expected.sizes, expected.start)
    warnings = (*sizes.warnings, *fact.policy.warnings)
    assert len(warnings) == len(expected.warnings)
    assert [part in text for part, text in zip(expected.warnings, warnings, strict=True)] == [True] * len(warnings)


@pytest.mark.slow
@pytest.mark.parametrize("manifest", EXPECTED)
def test_it_is_created_and_trains(lives: Lives, manifest: str) -> None:
    name, expected = name_of(manifest), EXPECTED[manifest]
    assert f"hyperpodpytorchjob.sagemaker.amazonaws.com/{name} created" in lives.applied
    assert name in lives.running, last_condition(lives.ended.get(name, {}))
    first = lives.generations(name)[1]
    # An elastic job takes those along that are ready by then.
    size = len(first)
    assert size in expected.sizes
    assert size >= expected.start
    assert first.keys() <= {*expected.first, *expected.full}
    assert sorted(body["rank"] for body in first.values()) == list(range(size))
    assert {body["nnodes"] for body in first.values()} == {size}
    conditions = {c["type"]: c for c in lives.running[name]["status"]["conditions"]}
    assert conditions["Created"]["status"] == "True"
    warning = conditions.get("Warning", {}).get("message", "")
    assert bool(warning) == bool(expected.warnings)
    assert [part for part in expected.warnings if part not in warning] == []


@pytest.mark.slow
@pytest.mark.parametrize("manifest", EXPECTED)
def test_its_pods(lives: Lives, manifest: str) -> None:
    """Names, labels and environment that users' commands and tools read; the template's own fields are all there."""
    name, expected = name_of(manifest), EXPECTED[manifest]
    mine = {n: pod for n, pod in lives.pods.items() if pod["metadata"]["labels"]["HPJob"] == name}
    assert {*expected.first, *expected.spares} <= mine.keys()
    templates = {s["name"]: s["template"] for s in job_of(manifest)["spec"]["replicaSpecs"]}
    for pod_name in (*expected.first, *expected.spares):
        pod = mine[pod_name]
        container = pod["spec"]["containers"][0]
        plain = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        assert int(plain["NNODES"]) in expected.sizes  # an elastic one's pods may have been made anew at another size
        assert plain["NPROC_PER_NODE"] == expected.nproc
        assert "MASTER_ADDR" not in plain
        spec = next(s for s in templates if pod_name.startswith(f"{name}-{s}-"))
        wished = templates[spec]
        meta = wished.get("metadata") or {}
        labels = {key: value for key, value in meta.get("labels", {}).items() if not key.startswith(QUEUE_GROUP)}
        assert labels.items() <= pod["metadata"]["labels"].items()
        assert meta.get("annotations", {}).items() <= pod["metadata"]["annotations"].items()
        # They would make the pod a job of Kueue's own; what Kueue itself reads on pods is there.
        assert not pod["metadata"]["labels"].keys() & {f"{QUEUE_GROUP}queue-name", f"{QUEUE_GROUP}priority-class"}
        queue = job_of(manifest)["metadata"].get("labels", {}).get(f"{QUEUE_GROUP}queue-name")
        assert bool(queue) == (f"{QUEUE_GROUP}workload" in pod["metadata"]["annotations"])
        asked = wished["spec"]["containers"][0]
        assert (container["command"], container.get("args")) == (asked["command"], asked.get("args"))
        assert {e["name"] for e in asked.get("env", ())} <= {e["name"] for e in container["env"]}
        assert pod["spec"].get("hostNetwork") == wished["spec"].get("hostNetwork")
        assert pod["spec"].get("affinity") == wished["spec"].get("affinity")


@pytest.mark.slow
@pytest.mark.parametrize("manifest", ELASTIC)
def test_it_grows(lives: Lives, manifest: str) -> None:
    """From the smallest size, to which the user had it shrunk, to the largest; its trainer may be deaf to it."""
    name, expected = name_of(manifest), EXPECTED[manifest]
    assert name in lives.grown, last_condition(lives.ended.get(name, {}))
    generations = lives.generations(name)
    last = generations[max(generations)]
    assert slots(last) == slots(expected.full)
    assert sorted(body["rank"] for body in last.values()) == list(range(expected.sizes[-1]))
    assert {body["nnodes"] for body in last.values()} == {expected.sizes[-1]}
    counts = [len(generations[number]) for number in sorted(generations)]
    grown = counts[max(at for at, count in enumerate(counts) if count == expected.sizes[0]) :]
    assert len(grown) > 1
    assert grown == sorted(set(grown)), "upwards only; in more than one resize where pods become ready apart"
    assert grown[-1] == expected.sizes[-1]
    status = lives.grown[name]["status"]
    assert status["restartCount"] == 0
    targets = dict(status["elasticScalingStatus"]["targetReplicas"])
    assert targets.pop("Running") == sum(targets.values()) == expected.sizes[-1]


@pytest.mark.slow
@pytest.mark.parametrize("manifest", EXPECTED)
def test_it_completes(lives: Lives, manifest: str) -> None:
    name, expected = name_of(manifest), EXPECTED[manifest]
    assert name in lives.ended
    body = lives.ended[name]
    last = last_condition(body)
    assert (last["type"], last["status"]) == ("Completed", "True")
    assert (body["status"]["restartCount"], bool(body["status"]["completionTime"])) == (0, True)
    pods = [pod for job, pod in lives.left if job == name]
    assert len(pods) == (expected.sizes[-1] if expected.keeps_pods else 0)


@pytest.mark.slow
def test_nothing_else_was_warned_of(lives: Lives) -> None:
    mine = {name_of(manifest) for manifest in EXPECTED}
    warned = {
        (e["involvedObject"]["name"], e["reason"])
        for e in lives.events
        if e["type"] == "Warning"
        and e["involvedObject"]["name"] in mine
        # A pod that the operator asked to leave may be seen ended before it is seen deleted; the test removes ceilings.
        and e["reason"] not in ("ContainerEnded", "ScaledToZero")
    }
    print(
        [
            e["message"]
            for e in lives.events
            if e["reason"] == "SpecWarning" and e["involvedObject"]["name"] in ("hyp-all", "documents-policy")
        ]
    )
    assert warned == {(name_of(m), "SpecWarning") for m, e in EXPECTED.items() if e.warnings}


@pytest.mark.slow
def test_no_spec_was_written_into(lives: Lives) -> None:
    """What the user wrote stays as it is: the operator is the manager of no field of a spec."""
    mine = [
        entry
        for body in lives.written
        for entry in body["metadata"]["managedFields"]
        if entry["manager"] == FIELD_MANAGER
    ]
    assert len(mine) >= 2 * len(EXPECTED), "metadata and status of each"
    assert [entry for entry in mine if "f:spec" in entry["fieldsV1"]] == []


@pytest.mark.slow
class TestHyp:
    """The field's own client. It reads every object of a namespace with a strict model, and one that it cannot read fails all."""

    def test_it_lists_the_jobs_all_the_time(self, lives: Lives, hyp: Hyp) -> None:
        assert hyp.problems == []
        assert {state for states in hyp.order.values() for state in states} >= SEEN_BY_HYP
        assert {name: hyp.order[name][-1] for name in STATES} == STATES
        assert {name: hyp.order[name][-1] for name in LISTED} == dict.fromkeys(LISTED, "Completed")

    @pytest.mark.parametrize("name", LISTED)
    def test_once_running_a_job_is_never_shown_as_anything_else(self, lives: Lives, hyp: Hyp, name: str) -> None:
        assert "Running" in hyp.order[name]
        assert hyp.order[name][hyp.order[name].index("Running") :] == ["Running", "Completed"]

    def test_list(self, lives: Lives, hyp: Hyp) -> None:
        for words in ("list hyp-pytorch-job", "list hyp-pytorch-job --namespace compat-states"):
            said = hyp.said[words]
            assert said["code"] == 0, said
            assert "Unknown" not in said["output"]
            assert "N/A" not in said["output"]
        assert all(
            state in hyp.said["list hyp-pytorch-job --namespace compat-states"]["output"] for state in STATES.values()
        )

    def test_list_pods(self, lives: Lives, hyp: Hyp) -> None:
        said = hyp.said["list-pods hyp-pytorch-job --job-name hyp-values"]
        assert said["code"] == 0, said
        listed = [word for word in said["output"].split() if word.startswith("hyp-values-pod-")]
        assert slots(listed) == slots(EXPECTED["hyp-1.1-values"].full)

    def test_describe(self, lives: Lives, hyp: Hyp) -> None:
        said = hyp.said["describe hyp-pytorch-job --job-name hyp-values"]
        assert said["code"] == 0, said
        assert "8 replicas finished" in said["output"]
        for name, state in STATES.items():
            said = hyp.said[f"describe hyp-pytorch-job --job-name {name} --namespace compat-states"]
            assert said["code"] == 0, said
            assert state in said["output"]

    def test_delete_takes_the_config_map_along(self, lives: Lives, hyp: Hyp, kueue_server: Cluster) -> None:
        said = hyp.said["delete hyp-pytorch-job --job-name recipe-elastic-a1b2c"]
        assert said["code"] == 0, said
        kept = kueue_server.kubectl("get", "configmap,hpjob", "-o", "name")
        assert "recipe-elastic-a1b2c" not in kept
