"""What the chart renders for those who operate the cluster: monitoring, network policies, disruption budget, security."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.rendered import CHART, Objects, container, deployment, helm, render

from elastipod_operator.api import chart_readme

OPERATOR = {"app.kubernetes.io/name": "elastipod", "app.kubernetes.io/instance": "elastipod"}
HELM_TEST = {"app.kubernetes.io/name": "elastipod-test", "app.kubernetes.io/instance": "elastipod"}
JOB_PODS = {"matchExpressions": [{"key": "elastipod.io/job-uid", "operator": "Exists"}]}


def only(objects: Objects, kind: str) -> dict[str, Any]:
    (found,) = (body for (of_kind, _, _), body in objects.items() if of_kind == kind)
    return found


def test_nothing_that_needs_other_operators_is_on_by_default() -> None:
    kinds = {kind for kind, _, _ in render()}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "NetworkPolicy", "ConfigMap"}
    assert {"Service", "PodDisruptionBudget"} <= kinds


def test_the_service_leads_to_the_operators_port() -> None:
    objects = render({"port": 9000})
    service = only(objects, "Service")["spec"]
    pod = deployment(objects)["spec"]["template"]["metadata"]["labels"]
    assert service["selector"] == OPERATOR
    assert OPERATOR.items() <= pod.items()
    assert service["ports"] == [{"name": "http", "port": 9000, "targetPort": "http"}]
    assert container(objects)["ports"] == [{"name": "http", "containerPort": 9000}]


def test_monitors_find_the_operator_and_the_agents() -> None:
    settings = {"serviceMonitor": {"enabled": True}, "agentMonitor": {"enabled": True, "portName": "numbers"}}
    objects = render({"watchNamespaces": ["team-a"], "monitoring": settings})
    service_monitor = only(objects, "ServiceMonitor")["spec"]
    assert service_monitor["selector"]["matchLabels"].items() <= only(objects, "Service")["metadata"]["labels"].items()
    (endpoint,) = service_monitor["endpoints"]
    assert (endpoint["port"], endpoint["path"], endpoint["honorLabels"]) == ("http", "/metrics", True)
    pod_monitor = only(objects, "PodMonitor")["spec"]
    assert pod_monitor["selector"] == JOB_PODS
    assert pod_monitor["namespaceSelector"] == {"matchNames": ["team-a"]}
    assert [endpoint["port"] for endpoint in pod_monitor["podMetricsEndpoints"]] == ["numbers"]
    everywhere = render({"monitoring": {"agentMonitor": {"enabled": True}}})
    assert only(everywhere, "PodMonitor")["spec"]["namespaceSelector"] == {"any": True}


def test_rules_and_dashboard_are_the_files_of_the_chart() -> None:
    objects = render({"monitoring": {"rules": {"enabled": True}, "dashboard": {"enabled": True}}})
    text = (CHART / "alerts/elastipod.yaml").read_text(encoding="utf-8")
    rules = yaml.safe_load(text.replace("elastipod_leading", 'elastipod_leading{namespace="aws-hyperpod"}'))
    assert only(objects, "PrometheusRule")["spec"] == rules
    both = render({"monitoring": {"rules": {"enabled": True, "hyperpodNames": True}}})
    names = yaml.safe_load((CHART / "alerts/hyperpod-names.yaml").read_text(encoding="utf-8"))
    assert only(both, "PrometheusRule")["spec"] == {"groups": rules["groups"] + names["groups"]}
    config_map = only(objects, "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["elastipod.json"]) == json.loads(
        (CHART / "dashboards/elastipod.json").read_text(encoding="utf-8")
    )


def test_the_rules_of_one_release_notice_that_it_has_no_leader_while_another_release_has_one() -> None:
    objects = render({"monitoring": {"rules": {"enabled": True}}})
    groups = only(objects, "PrometheusRule")["spec"]["groups"]
    (rule,) = (rule for group in groups for rule in group["rules"] if rule.get("alert") == "ElastipodNoLeader")
    leading = 'elastipod_leading{namespace="aws-hyperpod"}'
    assert rule["expr"] == f"sum by (namespace) ({leading}) < 1 or absent({leading})"


def test_the_disruption_budget_never_blocks_a_single_replica() -> None:
    assert only(render(), "PodDisruptionBudget")["spec"] == {
        "maxUnavailable": 1,
        "selector": {"matchLabels": OPERATOR},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    for values in ({"replicas": 1}, {"podDisruptionBudget": {"enabled": False}}):
        assert not [kind for kind, _, _ in render(values) if kind == "PodDisruptionBudget"]


def test_a_network_policy_for_the_operator() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    policy = only(render({"networkPolicy": {"operator": {"enabled": True, "metricsFrom": peers}}}), "NetworkPolicy")
    assert policy["spec"] == {
        "podSelector": {"matchLabels": OPERATOR},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "http"}], "from": [*peers, {"podSelector": {"matchLabels": HELM_TEST}}]}],
    }
    (rule,) = only(render({"networkPolicy": {"operator": {"enabled": True}}}), "NetworkPolicy")["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {}}]


def test_helm_test_may_connect_where_only_named_peers_may() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    policies = {"operator": {"enabled": True, "metricsFrom": peers}}
    objects = render({"networkPolicy": policies})
    (rule,) = only(objects, "NetworkPolicy")["spec"]["ingress"]
    *others, ours = rule["from"]
    assert others == peers
    assert ours["podSelector"]["matchLabels"].items() <= only(objects, "Pod")["metadata"]["labels"].items()
    without = render({"networkPolicy": policies, "monitoring": {"service": {"enabled": False}}})
    assert only(without, "NetworkPolicy")["spec"]["ingress"][0]["from"] == peers


def test_network_policies_for_pods_of_jobs() -> None:
    more = {"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]}
    agents = {"enabled": True, "namespaces": ["team-a", "team-b"], "additionalIngress": [more]}
    objects = render({"networkPolicy": {"agents": agents}})
    found = {name[1]: body["spec"] for name, body in objects.items() if name[0] == "NetworkPolicy"}
    assert found.keys() == {"team-a", "team-b"}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "aws-hyperpod"}},
        "podSelector": {"matchLabels": OPERATOR},
    }
    expected = [{"from": [operator]}, {"from": [{"podSelector": JOB_PODS}]}, more]
    for policy in found.values():
        assert policy == {"podSelector": JOB_PODS, "policyTypes": ["Ingress"], "ingress": expected}
    watched = render({"watchNamespaces": ["team-c"], "networkPolicy": {"agents": {"enabled": True}}})
    assert only(watched, "NetworkPolicy")["metadata"]["namespace"] == "team-c"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"networkPolicy": {"agents": {"enabled": True}}},
            "networkPolicy.agents.enabled needs networkPolicy.agents.namespaces or watchNamespaces",
        ),
        (
            {"monitoring": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}},
            "monitoring.serviceMonitor.enabled needs monitoring.service.enabled",
        ),
        (
            {"port": 9443, "webhook": {"enabled": True}},
            "port and webhook.port are both 9443",
        ),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], sentence: str) -> None:
    done = helm("template", "elastipod", values=values)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_a_digest_pins_the_image_of_every_pod() -> None:
    digest = "sha256:" + "0" * 64
    objects = render({"image": {"tag": "1.2.3", "digest": digest}})
    assert container(objects)["image"] == f"docker.io/elastipod/operator@{digest}"
    assert only(objects, "Pod")["spec"]["containers"][0]["image"] == f"docker.io/elastipod/operator@{digest}"


def test_the_cluster_may_choose_the_user() -> None:
    """As on OpenShift, where each namespace has its own range of IDs."""
    objects = render({"podSecurityContext": {"runAsUser": None, "runAsGroup": None}})
    for spec in (deployment(objects)["spec"]["template"]["spec"], only(objects, "Pod")["spec"]):
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_rights_for_kueue_can_be_left_out() -> None:
    def of_kueue(**kueue: bool) -> set[tuple[str, str]]:
        rules = render({"kueue": kueue})["ClusterRole", "", "aws-hyperpod-elastipod"]["rules"]
        return {
            (resource, verb)
            for rule in rules
            if rule["apiGroups"] == ["kueue.x-k8s.io"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    queues = {("clusterqueues", "list"), ("localqueues", "list")}
    assert queues <= of_kueue()
    assert of_kueue(readQueues=False) == of_kueue() - queues
    assert of_kueue(enabled=False) == set()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_an_umbrella_chart_takes_it_or_leaves_it(tmp_path: Path, is_enabled: bool) -> None:
    """As values.yaml says: helm itself reads `enabled`, in the chart that depends on this one."""
    shutil.copytree(CHART, tmp_path / "charts/elastipod")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    ours = {"name": "elastipod", "version": version, "condition": "elastipod.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [ours]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart), encoding="utf-8")
    values = {"elastipod": {"enabled": is_enabled, "replicas": 1}}
    done = helm("template", "platform", values=values, chart=tmp_path)
    assert done.returncode == 0, done.stderr
    kinds = {body["kind"] for body in yaml.safe_load_all(done.stdout) if body}
    assert ("Deployment" in kinds) is is_enabled
    assert is_enabled or kinds == set()


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    assert readme == chart_readme.render(text)
    with pytest.raises(ValueError, match=r"values.yaml: another.field has no comment"):
        chart_readme.render(text + "\nanother:\n  # A comment.\n  known: 1\n  field: 1\n")


def test_the_readme_shows_nested_values_and_their_defaults() -> None:
    text = "# All of it.\ngroup:\n  # One | two.\n  # three.\n  leaf: [1]\n\n# Alone.\nplain: {a: 1}\n"
    rows = chart_readme.render(text).removeprefix(chart_readme.HEAD).splitlines()
    assert rows == [
        "| `group` | | All of it. |",
        "| `group.leaf` | `[1]` | One \\| two. three. |",
        '| `plain` | `{"a": 1}` | Alone. |',
    ]
