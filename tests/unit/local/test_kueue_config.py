"""What Kueue is started with, and what becomes of its release's objects when the manager is no pod."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tests.nonempty import some

from elastipod_local.kueue_config import (
    USER,
    WEBHOOK_SERVICE,
    KueueOptions,
    chart_values,
    configuration,
    external_roles,
    localized,
)

RELEASE = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "clientConnection": {"qps": 50, "burst": 100},
    "integrations": {"frameworks": ["batch/job", "ray.io/rayjob"]},
}
SERVICE = {"name": "kueue-webhook-service", "namespace": "kueue-system"}


def configured(options: KueueOptions) -> dict[str, Any]:
    return configuration(
        RELEASE, options, host="127.18.1.4", webhook_port=9443, health_port=8081, certificates="/c/certificates"
    )


def test_kueue_listens_on_the_clusters_own_address_only() -> None:
    config = configured(KueueOptions())
    assert config["webhook"] == {"host": "127.18.1.4", "port": 9443, "certDir": "/c/certificates"}
    assert config["health"] == {"healthProbeBindAddress": "127.18.1.4:8081"}
    assert config["metrics"] == {"bindAddress": "0"}


def test_what_the_release_sets_stays_where_we_say_nothing() -> None:
    assert configured(KueueOptions())["clientConnection"] == {"qps": 50, "burst": 100}


def test_frameworks_are_those_of_the_options() -> None:
    options = KueueOptions(frameworks=("batch/job", "pod"), external_frameworks=("Job.v1.example.com",))
    expected = {"frameworks": ["batch/job", "pod"], "externalFrameworks": ["Job.v1.example.com"]}
    assert configured(options)["integrations"] == expected


def test_settings_win_and_gates_are_joined() -> None:
    wait = {"timeout": "5s"}
    options = KueueOptions(settings={"waitForPodsReady": wait, "metrics": {}, "featureGates": {"TopologyAware": True}})
    config = configured(options)
    assert (config["waitForPodsReady"], config["metrics"]) == (wait, {})
    assert config["featureGates"] == {"VisibilityOnDemand": False, "TopologyAware": True}


def test_the_chart_gets_the_configuration_as_text() -> None:
    config = configured(KueueOptions())
    assert json.loads(chart_values(config)["managerConfig"]["controllerManagerConfigYaml"]) == config


def test_options_survive_being_written_down() -> None:
    options = KueueOptions(("pod",), (), {"fairSharing": {}})
    record = {"frameworks": ["pod"], "external_frameworks": [], "settings": {"fairSharing": {}}}
    assert KueueOptions.from_record(record) == options


@pytest.mark.parametrize("kind", ["Deployment", "Service", "APIService"])
def test_what_serves_the_managers_pod_is_left_out(kind: str) -> None:
    objects = [{"kind": kind, "metadata": {"name": "x"}}, {"kind": "ClusterRole", "metadata": {"name": "y"}}]
    assert localized(objects, address="h:1", secret={}) == objects[1:]


def webhook(path: str, **more: Any) -> dict[str, Any]:
    return {"clientConfig": {"service": {**SERVICE, "path": path}}, **more}


def called_at(url: str) -> dict[str, str]:
    return {"url": url, "caBundle": base64.b64encode(b"authority").decode()}


def test_webhooks_are_called_at_the_process() -> None:
    objects = [
        {
            "kind": f"{kind}WebhookConfiguration",
            "metadata": {"name": kind},
            "webhooks": [webhook("/a", name="a", failurePolicy="Fail"), webhook("/b", name="b")],
        }
        for kind in ("Mutating", "Validating")
    ]
    for item in some(localized(objects, address="127.18.1.4:9443", secret={"ca.crt": b"authority"})):
        assert item["webhooks"] == [
            {"name": "a", "failurePolicy": "Fail", "clientConfig": called_at("https://127.18.1.4:9443/a")},
            {"name": "b", "clientConfig": called_at("https://127.18.1.4:9443/b")},
        ]


def test_conversion_goes_to_the_process_and_nothing_else_of_a_kind_changes() -> None:
    conversion = {"strategy": "Webhook", "webhook": webhook("/convert", conversionReviewVersions=["v1"])}
    crd = {"kind": "CustomResourceDefinition", "metadata": {"name": "x"}, "spec": {"scope": "Namespaced"}}
    converted = {**crd, "spec": {**crd["spec"], "conversion": conversion}}  # type: ignore[dict-item]
    plain, changed = localized([crd, converted], address="h:1", secret={"ca.crt": b"authority"})
    assert plain == crd
    called = {"conversionReviewVersions": ["v1"], "clientConfig": called_at("https://h:1/convert")}
    assert changed["spec"] == {"scope": "Namespaced", "conversion": {"strategy": "Webhook", "webhook": called}}


def test_only_the_secret_of_the_webhooks_is_filled() -> None:
    secrets = [{"kind": "Secret", "metadata": {"name": name}} for name in ("kueue-webhook-server-cert", "other")]
    filled, other = localized(secrets, address="h:1", secret={"tls.crt": b"pem"})
    assert filled["data"] == {"tls.crt": base64.b64encode(b"pem").decode()}
    assert other == secrets[1]


def test_external_kinds_may_be_read_by_kueue_alone() -> None:
    role, binding = external_roles(KueueOptions())
    assert role["rules"] == [
        {
            "apiGroups": ["sagemaker.amazonaws.com"],
            "resources": ["hyperpodpytorchjobs"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (subject,) = binding["subjects"]
    assert f"system:serviceaccount:{subject['namespace']}:{subject['name']}" == USER
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert external_roles(KueueOptions(external_frameworks=())) == []


def test_the_certificates_name_is_the_service_of_a_stock_install() -> None:
    assert f"{SERVICE['name']}.{SERVICE['namespace']}.svc" == WEBHOOK_SERVICE
