"""What the chart renders, for several sets of values."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.api.rights import told
from tests.chart.rendered import CHART, Objects, container, deployment, helm, render
from tests.nonempty import some

from elastipod_operator.api import crd
from elastipod_operator.kube.node_signals import parse_signals

VALUE_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "two namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "own account, no roles": {"serviceAccount": {"create": False, "name": "mine"}, "rbac": {"create": False}},
    "no tokens": {"authentication": {"enabled": False}},
    "webhook with its own certificates": {
        "webhook": {"enabled": True},
        "networkPolicy": {"operator": {"enabled": True}},
    },
    "webhook of cert-manager, without keys": {
        "webhook": {"enabled": True, "certManager": {"enabled": True}},
        "authentication": {"enabled": False},
        "admissionPolicy": {"enabled": True, "actions": ["Warn", "Audit"]},
    },
    "everything set": {
        "image": {"repository": "registry.example.com/operator", "tag": "1.2.3", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "crds": {"install": False},
        "replicas": 2,
        "logLevel": "debug",
        "nodeSignals": ["drain condition GpuUnhealthy=True", "ignore taint karpenter.sh/disruption"],
        "port": 9000,
        "authentication": {"existingSecret": "mine"},
        "resources": {"limits": {"memory": "1Gi"}},
        "serviceAccount": {"annotations": {"example.com/role": "r"}},
        "rbac": {"userRoles": False},
        "kueue": {"externalFramework": True, "namespace": "queues", "serviceAccount": "manager"},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "fullnameOverride": "trainer",
        "enabled": True,
        "webhook": {
            **{"enabled": True, "port": 8443, "timeoutSeconds": 1},
            "certManager": {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "mine"}},
        },
        "admissionPolicy": {"enabled": True},
        "monitoring": {
            "service": {"annotations": {"prometheus.io/scrape": "true"}},
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "30s"},
            "agentMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "portName": "numbers"},
            "rules": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Training"}},
        },
        "networkPolicy": {
            "operator": {"enabled": True, "metricsFrom": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
            "agents": {
                "enabled": True,
                "namespaces": ["team-a", "team-b"],
                "additionalIngress": [{"ports": [{"port": 9}]}],
            },
        },
    },
}


def environment(objects: Objects) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(objects)["env"] if "value" in one}


def granted(objects: Objects, kind: str, namespace: str, name: str) -> set[tuple[str, str, str]]:
    """Give what a role allows as (group, resource, verb)."""
    rules = objects[kind, namespace, name]["rules"]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())
def test_lint(values: dict[str, Any]) -> None:
    done = helm("lint", "--strict", values=values)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())
def test_the_pod_is_restricted(values: dict[str, Any]) -> None:
    objects = render(values)
    pod, only = deployment(objects)["spec"]["template"], container(objects)
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "hp-training-control-plane" not in pod["metadata"]["labels"], "only the leader bears it, by its own hand"
    assert only["command"] == ["elastipod", "operator"]
    assert {"POD_NAME", "POD_NAMESPACE"} <= {one["name"] for one in only["env"]}


def test_defaults() -> None:
    objects = render()
    assert container(objects)["image"] == "docker.io/elastipod/operator:0.1.0"
    assert environment(objects)["WATCH_NAMESPACES"] == ""
    assert container(objects)["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container(objects)["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container(objects)["ports"] == [{"name": "http", "containerPort": 8081}]


def test_everything_set_is_used() -> None:
    objects = render(VALUE_SETS["everything set"])
    assert container(objects)["image"] == "registry.example.com/operator:1.2.3"
    assert environment(objects)["HTTPS_PROXY"] == "http://proxy:3128"
    assert environment(objects)["METRICS_PORT"] == "9000"
    assert deployment(objects)["metadata"]["name"] == "trainer"
    assert deployment(objects)["spec"]["replicas"] == 2
    assert not [kind for kind, _, _ in objects if kind == "CustomResourceDefinition"]


def test_the_crd_is_kept_unless_told_otherwise() -> None:
    key = ("CustomResourceDefinition", "", crd.CRD_NAME)
    assert render()[key]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in render({"crds": {"keep": False}})[key]["metadata"]
    assert render()[key]["spec"] == crd.build()["spec"]


def test_rights_are_those_that_the_operator_needs() -> None:
    everywhere = granted(render(), "ClusterRole", "", "aws-hyperpod-elastipod")
    assert {verb for _, resource, verb in everywhere if resource == "pods"} == {
        "list",
        "watch",
        "create",
        "delete",
    }
    assert {resource for _, resource, _ in everywhere} == {
        "clusterqueues",
        "customresourcedefinitions",
        "events",
        "hyperpodpytorchjobs",
        "hyperpodpytorchjobs/finalizers",
        "hyperpodpytorchjobs/status",
        "leases",
        "localqueues",
        "nodes",
        "pods",
        "priorityclasses",
        "resourceflavors",
        "secrets",
        "workloadpriorityclasses",
        "workloads",
        "workloads/status",
    }
    kueue = {(resource, verb) for group, resource, verb in everywhere if group == "kueue.x-k8s.io"}
    assert {resource for resource, verb in kueue if verb not in ("get", "list", "watch")} == {
        "workloads",
        "workloads/status",
    }
    assert {verb for resource, verb in kueue if resource == "clusterqueues"} == {"list"}
    assert ("workloads", "update") not in kueue
    assert {verb for _, resource, verb in everywhere if resource == "leases"} == {"list"}
    assert {verb for _, resource, verb in everywhere if resource == "customresourcedefinitions"} == {"get"}
    assert {verb for _, resource, verb in everywhere if resource == "secrets"} == {"create"}
    assert not [grant for grant in everywhere if "*" in grant]
    assert ("sagemaker.amazonaws.com", "hyperpodpytorchjobs", "create") not in everywhere
    leader = granted(render(), "Role", "aws-hyperpod", "elastipod-leader")
    assert {resource for _, resource, _ in leader} == {"leases", "pods"}
    assert {verb for _, resource, verb in leader if resource == "pods"} == {"patch"}


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["team-a"], "spareCapacity": {"readAllPods": True}}])
def test_the_page_about_rights_has_them_all(values: dict[str, Any]) -> None:
    objects = render({**values, "webhook": {"enabled": True}})
    account = "elastipod"
    bound = [
        (body["roleRef"]["kind"], namespace if body["roleRef"]["kind"] == "Role" else "", body["roleRef"]["name"])
        for (kind, namespace, _), body in objects.items()
        if kind.endswith("RoleBinding") and {s["name"] for s in body["subjects"]} == {account}
    ]
    assert len(bound) == (3 if values else 2)
    assert set().union(*(granted(objects, *role) for role in bound)) == set(told())


def test_with_a_list_of_namespaces_rights_end_there() -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"]})
    everywhere = granted(objects, "ClusterRole", "", "aws-hyperpod-elastipod")
    assert {verb for _, _, verb in everywhere} == {"get", "list", "watch"}
    of_the_cluster = {"customresourcedefinitions", "leases", "nodes", "priorityclasses"}
    of_kueue = {"clusterqueues", "resourceflavors", "workloadpriorityclasses"}
    assert {resource for _, resource, _ in everywhere} == of_the_cluster | of_kueue
    for namespace in ("team-a", "team-b"):
        assert ("", "pods", "create") in granted(objects, "Role", namespace, "aws-hyperpod-elastipod")
        assert ("kueue.x-k8s.io", "workloads", "create") in granted(
            objects, "Role", namespace, "aws-hyperpod-elastipod"
        )
        (subject,) = objects["RoleBinding", namespace, "aws-hyperpod-elastipod"]["subjects"]
        assert (subject["name"], subject["namespace"]) == ("elastipod", "aws-hyperpod")
    assert environment(objects)["WATCH_NAMESPACES"] == "team-a,team-b"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="the fewest objects"),
        pytest.param({**VALUE_SETS["everything set"], "rbac": {"userRoles": True}}, id="all objects"),
        pytest.param({"webhook": {"enabled": True}}, id="certificates of its own"),
    ],
)
def test_two_releases_of_one_name_share_no_object_where_they_run_jobs(more: dict[str, Any]) -> None:
    """They run jobs of one namespace, each those that name its controller."""
    values = {**more, "watchNamespaces": ["team-a"], "crds": {"install": False}}
    first, second = (
        {key for key in render(values, namespace=namespace) if key[1] != namespace} for namespace in ("one", "two")
    )
    assert ("Role", "team-a") in {key[:2] for key in first}
    assert first & second == set()


def test_an_account_of_the_users_own() -> None:
    objects = render(VALUE_SETS["own account, no roles"])
    assert deployment(objects)["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert {kind for kind, _, _ in objects} == {
        "CustomResourceDefinition",
        "ClusterRole",
        "Deployment",
        "Secret",
        "Service",
        "PodDisruptionBudget",
        "Pod",
    }


def test_kueue_may_read_jobs_only_when_asked_for() -> None:
    name = "aws-hyperpod-elastipod-kueue"
    assert ("ClusterRole", "", name) not in render()
    objects = render({"kueue": {"externalFramework": True}})
    assert granted(objects, "ClusterRole", "", name) == {
        ("sagemaker.amazonaws.com", "hyperpodpytorchjobs", verb) for verb in ("get", "list", "watch")
    }
    (subject,) = objects["ClusterRoleBinding", "", name]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("kueue-controller-manager", "kueue-system")


def key_file(objects: Objects) -> tuple[str, str]:
    """Give the Secret that is mounted for the operator, and where it looks for the key; empty for none."""
    volumes = deployment(objects)["spec"]["template"]["spec"]["volumes"]
    secret = next((volume["secret"]["secretName"] for volume in volumes if "secret" in volume), "")
    return secret, environment(objects).get("ELASTIPOD_INSTALL_KEY_FILE", "")


def test_the_install_key_is_made_once_and_outlives_the_release() -> None:
    objects = render()
    secret = objects["Secret", "aws-hyperpod", "elastipod-install-key"]
    assert len(base64.b64decode(secret["data"]["install-key"])) == 64
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert key_file(objects) == ("elastipod-install-key", "/etc/elastipod/install-key")
    mounts = {mount["name"]: mount for mount in container(objects)["volumeMounts"]}
    assert mounts["install-key"] == {"name": "install-key", "mountPath": "/etc/elastipod", "readOnly": True}


def test_a_key_of_the_users_own() -> None:
    objects = render({"authentication": {"existingSecret": "mine"}})
    assert key_file(objects) == ("mine", "/etc/elastipod/install-key")
    assert not [kind for kind, _, _ in objects if kind == "Secret"]


def test_without_tokens_there_is_no_key_and_no_right_to_secrets() -> None:
    objects = render({"authentication": {"enabled": False}})
    assert key_file(objects) == ("", "")
    assert not [kind for kind, _, _ in objects if kind == "Secret"]
    assert not [g for g in granted(objects, "ClusterRole", "", "aws-hyperpod-elastipod") if g[1] == "secrets"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"authentication": {"existingSecret": 1}}, "/authentication/existingSecret"),
        ({"port": 80}, "/port"),
        ({"webhook": {"timeoutSeconds": 60}}, "/webhook/timeoutSeconds"),
        ({"webhook": {"certManager": True}}, "/webhook/certManager"),
        ({"admissionPolicy": {"actions": ["Refuse"]}}, "/admissionPolicy/actions"),
        ({"admissionPolicy": {"actions": ["Deny", "Warn"]}}, "/admissionPolicy/actions"),
        ({"admissionPolicy": {"otherOperators": ["it's me"]}}, "/admissionPolicy/otherOperators"),
        ({"webhook": {"enabled": True}, "authentication": {"enabled": False}}, "webhook.certManager.enabled"),
        ({"kueue": {"serviceAccount": ""}}, "/kueue/serviceAccount"),
        ({"logLevel": "loud"}, "/logLevel"),
        (
            {"nodeSignals": ["drain taint a:NoSchedule"]},
            'nodeSignals: "drain taint a:NoSchedule" says nothing about a node; write',
        ),
        ({"nodeSignals": "drain taint a"}, "/nodeSignals"),
        ({"watchNamespaces": "team-a"}, "/watchNamespaces"),
        ({"replicaCount": 2}, "replicaCount"),
        ({"image": {"repo": "x"}}, "/image"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"monitoring": {"rules": {"enable": True}}}, "/monitoring/rules"),
        ({"monitoring": {"serviceMonitor": {"interval": "often"}}}, "/monitoring/serviceMonitor/interval"),
        ({"networkPolicy": {"agents": {"namespaces": ["Team A"]}}}, "/networkPolicy/agents/namespaces"),
        ({"podLabels": {"app.kubernetes.io/name": "other"}}, "/podLabels"),
        ({"podLabels": {"app.kubernetes.io/instance": "other"}}, "/podLabels"),
        ({"podLabels": {"hp-training-control-plane": "true"}}, "/podLabels"),
        ({"podLabels": {"elastipod.io/job-uid": "u"}}, "/podLabels"),
        ({"nameOverride": "My_Name"}, "/nameOverride"),
        ({"fullnameOverride": "my.name"}, "/fullnameOverride"),
        ({"fullnameOverride": "1-name"}, "/fullnameOverride"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], field: str) -> None:
    done = helm("template", "elastipod", values=values)
    assert done.returncode != 0
    assert field in done.stderr


NUMBER = "20240101"  # of the forms that YAML takes for something else than text, the likeliest


def leaves(part: Any) -> Iterator[Any]:
    if isinstance(part, dict):
        for key, value in part.items():
            yield key
            yield from leaves(value)
    elif isinstance(part, list):
        for value in part:
            yield from leaves(value)
    else:
        yield part


def test_a_name_that_looks_like_a_number_stays_text() -> None:
    everything = VALUE_SETS["everything set"]
    values = {
        **everything,
        "nameOverride": NUMBER,
        "fullnameOverride": "",
        "watchNamespaces": [NUMBER],
        "serviceAccount": {"name": NUMBER},
        "priorityClassName": NUMBER,
        "authentication": {"existingSecret": NUMBER},
        "controller": {"name": NUMBER},
        "kueue": {"externalFramework": True, "namespace": NUMBER, "serviceAccount": NUMBER},
        "webhook": {"enabled": True, "certManager": {"enabled": True}},
        "networkPolicy": {**everything["networkPolicy"], "agents": {"enabled": True}},
        "monitoring": {**everything["monitoring"], "agentMonitor": {"enabled": True, "portName": NUMBER}},
    }
    found = list(leaves(list(render(values, release=NUMBER, namespace=NUMBER).values())))
    assert NUMBER in found
    assert int(NUMBER) not in found


@pytest.mark.parametrize(
    "values", [{"nameOverride": "n" * 63}, {"fullnameOverride": "f" * 63}, {"fullnameOverride": "trainer-1"}]
)
def test_no_name_or_label_becomes_too_long(values: dict[str, Any]) -> None:
    objects = render({**values, "webhook": {"enabled": True}})
    limited = [name for kind, _, name in objects if kind in ("Service", "Pod", "Deployment")]
    labels = [value for body in objects.values() for value in body["metadata"].get("labels", {}).values()]
    assert [text for text in some(limited) + some(labels) if len(text) > 63] == []


@pytest.mark.parametrize("page", ["charts/elastipod/values.yaml", "docs/operations.md"])
def test_roles_that_are_named_exist(page: str) -> None:
    text = (CHART.parents[1] / page).read_text(encoding="utf-8")
    named = some(re.findall(r"[\w-]+-(?:viewer|editor)\b", text))
    assert {*named} <= {name for kind, _, name in render() if kind == "ClusterRole"}


def test_the_release_without_kueue_reads_no_priorities() -> None:
    without = granted(render({"kueue": {"enabled": False}}), "ClusterRole", "", "aws-hyperpod-elastipod")
    assert "priorityclasses" not in {resource for _, resource, _ in without}


def test_notes_say_what_matters() -> None:
    def notes(*arguments: Sequence[str], **values: Any) -> str:
        done = helm("install", "elastipod", "--dry-run=client", values=values)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    assert "all namespaces" in notes()
    assert "the namespaces team-a" in notes(watchNamespaces=["team-a"])
    assert "keep it current yourself" in notes(crds={"install": False})
    assert "Kueue 0.15 or newer" in notes()
    assert "externalFrameworks" not in notes()
    assert "externalFrameworks" in notes(kueue={"externalFramework": True})
    assert "keeps the CustomResourceDefinition and with it all jobs" in notes()
    warning = notes(crds={"keep": False})
    assert "deletes the CustomResourceDefinition and with it all jobs of the cluster" in warning
    assert "kubectl delete hpjob --all -A" in warning
    assert "kubectl delete hpjob" not in notes(crds={"keep": False, "install": False})


def test_the_operator_reads_what_the_chart_says_of_nodes() -> None:
    said = ["drain condition GpuUnhealthy=True", "stop-placing label a/b=c", "ignore annotation a/b"]
    found = parse_signals(environment(render({"nodeSignals": said}))["ELASTIPOD_NODE_SIGNALS"])
    assert {f"{effect} {signal}" for signal, effect in found.items()} == {*said}
    assert "ELASTIPOD_NODE_SIGNALS" not in environment(render())
