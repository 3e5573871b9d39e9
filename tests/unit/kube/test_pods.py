"""The pod of a replica: the user's template, and what the operator adds (docs/design/contracts.md, 1 and 2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.nonempty import every
from tests.unit.kube.bodies import job_body, pod_body

from elastipod_operator.core.names import API_VERSION, KIND, PodId
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.observed_pod import observe_pod
from elastipod_operator.kube.pods import pod_manifest


def manifest(template: dict[str, Any] | None = None, key_secret: str = "", **spec: Any) -> dict[str, Any]:
    """Give the manifest of replica 1, third incarnation."""
    wish = template if template is not None else {"spec": {"containers": [{"name": "train"}]}}
    body = job_body({"replicaSpecs": [{"name": "workers", "replicas": 2, "maxReplicas": 4, "template": wish}], **spec})
    fact = observe_job(body)
    assert fact.policy is not None, fact.spec_error
    before = copy.deepcopy(body["spec"])
    made = pod_manifest(fact, body["spec"], fact.policy, PodId("workers", 1, 2), 3, key_secret)
    assert body["spec"] == before, "the job's own template is left alone"
    return made


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}


def test_identity() -> None:
    meta = manifest({"metadata": {"name": "mine", "namespace": "mine", "labels": {"app": "x", "HPJob": "no"}}})[
        "metadata"
    ]
    assert (meta["name"], meta["namespace"]) == ("job-workers-1-2", "team")
    assert meta["labels"] == {
        "app": "x", "HPJob": "job", "elastipod.io/job-uid": "job-uid", "elastipod.io/spec": "workers",
        "elastipod.io/ordinal": "1", "elastipod.io/incarnation": "2", "elastipod.io/generation": "0",
    }  # fmt: skip
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "job", "uid": "job-uid"}
    assert meta["ownerReferences"] == [{**owner, "controller": True, "blockOwnerDeletion": True}]
    assert set(meta) == {"name", "namespace", "labels", "annotations", "ownerReferences"}


def test_only_the_parts_of_a_pod_that_the_api_server_takes() -> None:
    made = manifest()
    assert {name: made[name] for name in made if name not in ("metadata", "spec")} == {
        "apiVersion": "v1", "kind": "Pod",
    }  # fmt: skip


def test_environment_comes_before_the_users_own() -> None:
    template = {
        "spec": {"containers": [{"name": "train", "env": [{"name": "ARGS", "value": "$(NNODES)"}]}, {"name": "side"}]}
    }
    train, side = manifest(template, nprocPerNode="4")["spec"]["containers"]
    assert list(env_of(train).items()) == [
        ("NNODES", "3"), ("NPROC_PER_NODE", "4"), ("ELASTIPOD_JOB", "team/job"), ("ELASTIPOD_RUN_ID", "job-uid"),
        ("ELASTIPOD_POD", "job-workers-1-2"),
        ("ELASTIPOD_AGENT_PORT", "8080"), ("ARGS", "$(NNODES)"),
    ]  # fmt: skip
    assert "env" not in side


def test_variables_that_the_user_set_are_left_alone() -> None:
    ref = {"name": "ELASTIPOD_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    template = {"spec": {"containers": [{"name": "train", "env": [{"name": "NNODES", "value": "9"}, ref]}]}}
    container = manifest(template)["spec"]["containers"][0]
    assert env_of(container)["NNODES"] == "9"
    assert [e for e in container["env"] if e["name"] == "ELASTIPOD_POD"] == [ref]


@pytest.mark.parametrize("how", [{"value": "9000"}, {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}])
def test_the_port_of_the_agent_is_the_operators_variable(how: dict[str, Any]) -> None:
    """Nobody would call an agent that listens at another port."""
    template = {"spec": {"containers": [{"name": "train", "env": [{"name": "ELASTIPOD_AGENT_PORT", **how}]}]}}
    container = manifest(template, elastipod={"agentPort": 7000})["spec"]["containers"][0]
    ports = [entry for entry in container["env"] if entry["name"] == "ELASTIPOD_AGENT_PORT"]
    assert ports == [{"name": "ELASTIPOD_AGENT_PORT", "value": "7000"}]


def test_the_agent_may_be_in_another_container_than_the_first() -> None:
    template = {"spec": {"containers": [{"name": "side"}, {"name": "train"}]}}
    side, train = manifest(template, elastipod={"container": "train"})["spec"]["containers"]
    assert "NNODES" in env_of(train)
    assert not env_of(side)


def test_key_and_token_go_into_the_agents_container_only_and_replace_the_users() -> None:
    own = [{"name": name, "value": "mine"} for name in ("ELASTIPOD_TOKEN", "ELASTIPOD_KEY", "ELASTIPOD_POD")]
    template = {"spec": {"containers": [{"name": "train", "env": own}, {"name": "side"}]}}
    train, side = manifest(template, "job-token")["spec"]["containers"]
    names = [entry["name"] for entry in train["env"]]
    assert len(names) == len(set(names))
    for name, entry in (("ELASTIPOD_KEY", "key"), ("ELASTIPOD_TOKEN", "token")):
        reference = {"secretKeyRef": {"name": "job-token", "key": entry}}
        assert {"name": name, "valueFrom": reference} in train["env"]
    assert env_of(train)["ELASTIPOD_POD"] == "job-workers-1-2", "every MAC is over it"
    assert "env" not in side
    without = manifest(template)["spec"]["containers"][0]["env"]
    assert every(entry in without for entry in own), "without authentication it is the user's"


@pytest.mark.parametrize("wish", ["Always", "OnFailure", "Never", None])
def test_pods_are_never_restarted_in_place(wish: str | None) -> None:
    template = {"spec": {"restartPolicy": wish, "containers": [{"name": "train"}]}}
    assert manifest(template)["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("wish", "grace_s"),
    [
        pytest.param({}, 120, id="the graceful time-out and half a minute"),
        pytest.param({"terminationGracePeriodSeconds": 45}, 45, id="unless the user says it"),
        pytest.param({"terminationGracePeriodSeconds": 0}, 0, id="zero is said too"),
        pytest.param({"terminationGracePeriodSeconds": None}, 120, id="null is not"),
    ],
)
def test_the_time_to_end(wish: dict[str, Any], grace_s: int) -> None:
    made = manifest(
        {"spec": {"containers": [{"name": "train"}], **wish}}, elasticPolicy={"gracefulShutdownTimeoutInSeconds": 90}
    )
    assert made["spec"]["terminationGracePeriodSeconds"] == grace_s


def test_nodes_are_not_tidied_up_from_under_it_unless_the_user_wants_so() -> None:
    assert manifest()["metadata"]["annotations"] == {
        "karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    }  # fmt: skip
    mine = {"metadata": {"annotations": {"karpenter.sh/do-not-disrupt": "false", "mine": "x"}}}
    assert manifest(mine)["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "false"


def test_on_the_hosts_network_two_agents_are_kept_off_one_node() -> None:
    template = {"spec": {"hostNetwork": True, "containers": [{"name": "train", "ports": [{"containerPort": 22}]}]}}
    ports = manifest(template)["spec"]["containers"][0]["ports"]
    assert ports == [{"containerPort": 22}, {"name": "agent", "containerPort": 8080, "protocol": "TCP"}]
    named = {
        "spec": {
            "hostNetwork": True,
            "containers": [{"name": "train", "ports": [{"name": "agent", "containerPort": 9}]}],
        }
    }
    assert manifest(named)["spec"]["containers"][0]["ports"] == [{"name": "agent", "containerPort": 9}]
    assert "ports" not in manifest()["spec"]["containers"][0]


def test_on_the_hosts_network_no_two_ports_have_one_name() -> None:
    """The API server would refuse the pod."""
    ports = [[], [{"name": "agent", "containerPort": 9000}]]
    templates = [{"spec": {"hostNetwork": True, "containers": [{"name": "train", "ports": one}]}} for one in ports]
    named = [{"name": f"s{n}", "replicas": 1, "template": template} for n, template in enumerate(templates)]
    body = job_body({"replicaSpecs": named})
    fact = observe_job(body)
    assert fact.policy is not None
    made = pod_manifest(fact, body["spec"], fact.policy, PodId("s1", 0, 0), 2)
    assert made["spec"]["containers"][0]["ports"] == [*ports[1], {"containerPort": 8080, "protocol": "TCP"}]


def test_the_rest_of_the_template_is_taken_as_it_is() -> None:
    template = {
        "spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "train", "resources": {"limits": {"cpu": 1}}}]}
    }
    made = manifest(template)["spec"]
    assert made["nodeSelector"] == {"a": "b"}
    assert made["containers"][0]["resources"] == {"limits": {"cpu": 1}}


def kept_off(affinity: dict[str, Any] | None, *nodes: str) -> dict[str, Any]:
    """Give the pod of a template with that affinity, to be kept off some nodes."""
    spec = {"containers": [{"name": "train"}], **({"affinity": affinity} if affinity else {})}
    body = job_body({"replicaSpecs": [{"name": "workers", "replicas": 2, "template": {"spec": spec}}]})
    fact = observe_job(body)
    assert fact.policy is not None
    before = copy.deepcopy(body["spec"])
    made = pod_manifest(fact, body["spec"], fact.policy, PodId("workers", 1, 2), 3, generation=7, avoids=nodes)
    assert body["spec"] == before
    return made


def away(*nodes: str) -> list[dict[str, Any]]:
    return [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def test_nodes_are_avoided() -> None:
    made = kept_off(None, "a", "b")
    terms = made["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms == [{"matchFields": away("a", "b")}]
    assert made["metadata"]["annotations"]["elastipod.io/avoids"] == "a,b"
    assert made["metadata"]["labels"]["elastipod.io/generation"] == "7"


def test_the_users_own_affinity_stays_and_every_alternative_avoids_them() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["x"]}]}
    mine = {
        "podAntiAffinity": {"x": "y"},
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [zone, {"matchFields": away("c")}]}, "preferred": []},
    }
    affinity = kept_off(mine, "a")["spec"]["affinity"]
    assert affinity["podAntiAffinity"] == {"x": "y"}
    assert affinity["nodeAffinity"]["preferred"] == []
    terms = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms == [{**zone, "matchFields": away("a")}, {"matchFields": away("c", "a")}]


@pytest.mark.parametrize(("incarnation", "failures"), [(0, 0), (2, 0), (2, 2), (5, 3)])
def test_a_pod_says_how_many_have_failed_before_it(incarnation: int, failures: int) -> None:
    body = job_body()
    fact = observe_job(body)
    assert fact.policy is not None
    identity = PodId("workers", 1, incarnation)
    made = pod_manifest(fact, body["spec"], fact.policy, identity, 3, failures_before=failures)
    seen = observe_pod(made, "train")
    assert seen is not None
    assert seen.failures_before == (None if incarnation == failures else failures), "else as many as the incarnation"


@pytest.mark.parametrize("told", ["", "many", "-1", "9" * 40])
def test_what_somebody_wrote_about_failures_raises_nothing(told: str) -> None:
    seen = observe_pod(pod_body(annotations={"elastipod.io/failures-before": told}), "train")
    assert seen is not None
    assert not seen.failures_before


def test_without_nodes_to_avoid_nothing_is_added() -> None:
    made = kept_off(None)
    assert "affinity" not in made["spec"]
    assert "elastipod.io/avoids" not in made["metadata"]["annotations"]
