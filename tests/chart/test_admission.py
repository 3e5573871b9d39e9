"""What the chart renders for the admission webhook, and where rights on it end."""

from __future__ import annotations

from typing import Any

from tests.chart.rendered import Objects, container, deployment, render
from tests.chart.test_templates import environment, granted

NAME, WEBHOOK = "aws-hyperpod-elastipod", "elastipod-webhook"
RIGHTS = "validatingwebhookconfigurations"


def configuration(objects: Objects) -> dict[str, Any]:
    return objects["ValidatingWebhookConfiguration", "", NAME]


def rules_on_webhooks(objects: Objects) -> list[dict[str, Any]]:
    return [rule for rule in objects["ClusterRole", "", NAME]["rules"] if RIGHTS in rule["resources"]]


def test_there_is_no_webhook_unless_asked_for() -> None:
    objects = render()
    assert not [key for key in objects if "Webhook" in key[0] or "Policy" in key[0] or key[2] == WEBHOOK]
    assert rules_on_webhooks(objects) == []
    assert "WEBHOOK_PORT" not in environment(objects)


def test_the_webhook_fails_open_and_never_sees_the_operators_own_writes() -> None:
    objects = render({"webhook": {"enabled": True, "timeoutSeconds": 2}})
    (webhook,) = configuration(objects)["webhooks"]
    assert (webhook["failurePolicy"], webhook["sideEffects"], webhook["timeoutSeconds"]) == ("Ignore", "None", 2)
    assert webhook["clientConfig"]["service"] == {"name": WEBHOOK, "namespace": "aws-hyperpod", "path": "/validate"}
    assert "caBundle" not in webhook["clientConfig"], "an upgrade would take the leader's away"
    assert "'system:serviceaccount:aws-hyperpod:elastipod'" in webhook["matchConditions"][0]["expression"]
    assert "namespaceSelector" not in webhook


def test_its_service_leads_to_every_replica() -> None:
    objects = render({"webhook": {"enabled": True, "port": 8443}})
    service = objects["Service", "aws-hyperpod", WEBHOOK]["spec"]
    assert service["selector"].items() <= deployment(objects)["spec"]["template"]["metadata"]["labels"].items()
    assert service["ports"] == [{"name": "webhook", "port": 443, "targetPort": "webhook"}]
    assert {"name": "webhook", "containerPort": 8443} in container(objects)["ports"]
    env = environment(objects)
    assert (env["WEBHOOK_PORT"], env["WEBHOOK_NAME"]) == ("8443", f"{WEBHOOK}.aws-hyperpod.svc")
    assert env["WEBHOOK_CONFIGURATION"] == configuration(objects)["metadata"]["name"]


def test_the_right_on_webhooks_is_for_its_own_configuration_alone() -> None:
    objects = render({"webhook": {"enabled": True}})
    (rule,) = rules_on_webhooks(objects)
    assert (rule["resourceNames"], sorted(rule["verbs"])) == ([NAME], ["get", "patch"])
    new = granted(objects, "ClusterRole", "", NAME) - granted(render(), "ClusterRole", "", NAME)
    assert {resource for _, resource, _ in new} == {RIGHTS}


def test_cert_manager_takes_over_certificates_and_rights() -> None:
    objects = render({"webhook": {"enabled": True, "certManager": {"enabled": True}}})
    assert rules_on_webhooks(objects) == []
    certificate = objects["Certificate", "aws-hyperpod", WEBHOOK]["spec"]
    assert certificate["dnsNames"] == [f"{WEBHOOK}.aws-hyperpod.svc"]
    assert certificate["issuerRef"] == {"kind": "Issuer", "name": WEBHOOK}
    assert ("Issuer", "aws-hyperpod", WEBHOOK) in objects
    annotations = configuration(objects)["metadata"]["annotations"]
    assert annotations == {"cert-manager.io/inject-ca-from": f"aws-hyperpod/{WEBHOOK}"}
    (volume,) = (
        v for v in deployment(objects)["spec"]["template"]["spec"]["volumes"] if v["name"].startswith("webhook")
    )
    assert volume["secret"] == {"secretName": certificate["secretName"], "optional": True}
    (mount,) = (mount for mount in container(objects)["volumeMounts"] if mount["name"] == volume["name"])
    assert environment(objects)["WEBHOOK_CERTIFICATES"] == mount["mountPath"]
    mine = {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "mine"}}
    objects = render({"webhook": {"enabled": True, "certManager": mine}})
    assert objects["Certificate", "aws-hyperpod", WEBHOOK]["spec"]["issuerRef"]["name"] == "mine"
    assert ("Issuer", "aws-hyperpod", WEBHOOK) not in objects


def test_only_the_watched_namespaces_are_concerned() -> None:
    objects = render(
        {"webhook": {"enabled": True}, "admissionPolicy": {"enabled": True}, "watchNamespaces": ["a", "b"]}
    )
    names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    selector = {"matchExpressions": [names]}
    assert configuration(objects)["webhooks"][0]["namespaceSelector"] == selector
    bindings = [body for (kind, _, _), body in objects.items() if kind == "ValidatingAdmissionPolicyBinding"]
    assert [one["spec"]["matchResources"] for one in bindings] == [{"namespaceSelector": selector}] * 2


def conditions(objects: Objects, what: str) -> dict[str, str]:
    """Give the expressions by name with which a policy decides whether it concerns a request."""
    policy = objects["ValidatingAdmissionPolicy", "", f"{NAME}-{what}"]["spec"]
    return {one["name"]: one["expression"] for one in policy["matchConditions"]}


def test_no_policy_concerns_the_operators_that_are_named() -> None:
    other = "system:serviceaccount:trials:trials-elastipod"
    alone = render({"admissionPolicy": {"enabled": True}})
    both = render({"admissionPolicy": {"enabled": True, "otherOperators": [other]}})
    mine = "'system:serviceaccount:aws-hyperpod:elastipod'"
    for what in ("jobs", "pods"):
        exempts = "!(request.userInfo.username in [{}])"
        assert conditions(alone, what)["not-by-an-operator"] == exempts.format(mine)
        assert conditions(both, what)["not-by-an-operator"] == exempts.format(f"{mine}, '{other}'")


def test_the_policy_of_jobs_concerns_those_that_the_release_runs() -> None:
    def named(**controller: Any) -> str:
        objects = render({"admissionPolicy": {"enabled": True}, "controller": controller})
        return conditions(objects, "jobs")["of-this-release"]

    assert named().count("in ['elastipod', ''])") == 2
    assert named(name="trials", onlyNamed=True).count("in ['trials'])") == 2


def test_the_network_policy_lets_the_api_server_in() -> None:
    closed = {"networkPolicy": {"operator": {"enabled": True}}}
    assert {"ports": [{"port": "webhook"}]} not in ingress(render(closed))
    assert {"ports": [{"port": "webhook"}]} in ingress(render({**closed, "webhook": {"enabled": True}}))


def ingress(objects: Objects) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = objects["NetworkPolicy", "aws-hyperpod", "elastipod"]["spec"]["ingress"]
    return rules
