"""What the chart asks of cert-manager and of the Prometheus operator has the fields that their own CRDs have."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from tests.chart.foreign_kinds import CERT_MANAGER, PROMETHEUS_OPERATOR, definitions
from tests.chart.rendered import render
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.errors import CommandError

GROUPS = ("cert-manager.io/", "monitoring.coreos.com/")
ISSUER = {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "mine"}}
MONITORS = {
    name: {"enabled": True, "labels": {"release": "prometheus"}} for name in ("serviceMonitor", "agentMonitor", "rules")
}
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "an issuer of the chart": ({"webhook": {"enabled": True, "certManager": {"enabled": True}}}, {"Certificate", "Issuer"}),
    "an issuer of the cluster": ({"webhook": {"enabled": True, "certManager": ISSUER}}, {"Certificate"}),
    "monitors and rules": ({"monitoring": MONITORS}, {"ServiceMonitor", "PodMonitor", "PrometheusRule"}),
    "monitors of two namespaces": (
        {"monitoring": {"agentMonitor": {"enabled": True}}, "watchNamespaces": ["team-a", "team-b"]},
        {"PodMonitor"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def serving(cluster: Cluster) -> Cluster:
    """The control plane, which serves the kinds of both projects from now on."""
    files = [f"--filename={path}" for kinds in (CERT_MANAGER, PROMETHEUS_OPERATOR) for path in definitions(kinds)]
    cluster.kubectl("apply", "--server-side", *files)
    cluster.kubectl("wait", "--for=condition=Established", f"--timeout={PATIENCE_S:.0f}s", *files)
    return cluster


def foreign(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the objects of these kinds that the chart renders, for any namespace."""
    found = [body for body in render(values).values() if body["apiVersion"].startswith(GROUPS)]
    for body in found:
        del body["metadata"]["namespace"]
    return found


def apply(cluster: Cluster, body: dict[str, Any]) -> str:
    return cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", input=json.dumps(body))


@pytest.mark.parametrize(("values", "kinds"), CASES.values(), ids=CASES)
def test_the_objects_are_accepted(serving: Cluster, values: dict[str, Any], kinds: set[str]) -> None:
    bodies = foreign(values)
    assert {body["kind"] for body in bodies} == kinds
    for body in bodies:
        assert "created (server dry run)" in apply(serving, body)


@pytest.mark.parametrize(
    ("case", "kind", "path", "wrong", "said"),
    [
        ("an issuer of the chart", "Certificate", ("dnsName",), ["a"], 'unknown field "spec.dnsName"'),
        ("an issuer of the chart", "Certificate", ("privateKey", "algorithm"), "DSA", "spec.privateKey.algorithm"),
        ("an issuer of the chart", "Issuer", ("selfSign",), {}, 'unknown field "spec.selfSign"'),
        ("monitors and rules", "ServiceMonitor", ("endpoints",), [{"interval": "soon"}], "spec.endpoints[0].interval"),
        ("monitors and rules", "PrometheusRule", ("groups",), [{"name": "a", "rules": [{}]}], "rules[0].expr"),
    ],
)
def test_a_wrong_field_is_found(
    serving: Cluster, case: str, kind: str, path: tuple[str, ...], wrong: object, said: str
) -> None:
    (body,) = (copy.deepcopy(body) for body in foreign(CASES[case][0]) if body["kind"] == kind)
    *above, last = path
    part = body["spec"]
    for name in above:
        part = part[name]
    part[last] = wrong
    with pytest.raises(CommandError) as caught:
        apply(serving, body)
    assert said in caught.value.output
