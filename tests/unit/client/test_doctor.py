"""The checks of `elastipod doctor`, and the command."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.client.fake_kubectl import FakeKubectl

from elastipod import cli
from elastipod_client.check import Verdict
from elastipod_client.cluster_checks import (
    check_agents,
    check_crd,
    check_lease,
    check_operators,
    check_version,
    check_writers,
)
from elastipod_client.operators import operators_among
from elastipod_client.queue_checks import check_cluster_queues, check_kueue, check_kueue_config, check_quotas
from elastipod_client.rights_check import CLUSTER_WIDE, NEEDED, NEEDED_FOR_QUEUES, access_reviews, check_rights

ROOT = Path(__file__).resolve().parents[3]
CRD: dict[str, Any] = yaml.load((ROOT / "crds" / "hyperpodpytorchjobs.yaml").read_text(), yaml.CSafeLoader)
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def crd(change: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(CRD))
    spec = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    if change == "foreign":
        del spec["elastipod"]
    elif change == "older":
        del spec["elastipod"]["properties"]["recovery"]
    elif change == "newer":
        spec["elastipod"]["properties"]["later"] = {}
    elif change == "not served":
        for version in found["spec"]["versions"]:
            version["served"] = False
    elif change in ("established", "not established"):
        status = "True" if change == "established" else "False"
        refusal = {"type": "NamesAccepted", "status": status, "message": '"hpjob" is already in use'}
        found["status"] = {
            "conditions": [refusal, {"type": "Established", "status": status, "message": "not all names"}]
        }
    return found


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        (crd(), Verdict.OK, "it has the fields of this version"),
        (None, Verdict.ERROR, "does not exist"),
        (crd("foreign"), Verdict.ERROR, "it belongs to another controller"),
        (crd("older"), Verdict.WARNING, "spec.elastipod lacks recovery"),
        (crd("newer"), Verdict.WARNING, "spec.elastipod has later"),
        (crd("not served"), Verdict.ERROR, "it serves no version"),
        (crd("established"), Verdict.OK, "it has the fields of this version"),
        (crd("not established"), Verdict.ERROR, 'NamesAccepted is False: "hpjob" is already in use'),
    ],
)
def test_the_crd(found: dict[str, Any] | None, verdict: Verdict, text: str) -> None:
    check = check_crd(found)
    assert (check.verdict, text in check.message) == (verdict, True)


@pytest.mark.parametrize(("minor", "verdict"), [("29", Verdict.WARNING), ("30+", Verdict.OK), ("34", Verdict.OK)])
def test_the_version_of_the_cluster(minor: str, verdict: Verdict) -> None:
    version = {"serverVersion": {"major": "1", "minor": minor, "gitVersion": f"v1.{minor}.0"}}
    assert check_version(version).verdict is verdict


def deployment(
    name: str = "elastipod",
    ready: int = 2,
    command: tuple[str, ...] = ("elastipod", "operator"),
    watches: str = "",
    namespace: str = "ops",
) -> Any:
    meta = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/version": "0.1.0"}}
    env = [{"name": "WATCH_NAMESPACES", "value": watches}]
    pod = {"serviceAccountName": "elastipod", "containers": [{"command": list(command), "env": env}]}
    return {"metadata": meta, "spec": {"template": {"spec": pod}}, "status": {"readyReplicas": ready}}


def test_the_operator_is_found_among_others() -> None:
    other = deployment("prometheus", command=("prometheus-operator",))
    assert [one.body for one in operators_among([other, deployment()])] == [deployment()]


@pytest.mark.parametrize(
    ("operators", "verdict", "text"),
    [
        ([deployment()], Verdict.OK, "ops/elastipod, version 0.1.0, ready pods: 2"),
        ([deployment(ready=0)], Verdict.ERROR, "ops/elastipod has no ready pod"),
        ([], Verdict.ERROR, "no Deployment runs"),
        ([deployment(), deployment("second")], Verdict.WARNING, "ops/elastipod and ops/second may run the same jobs"),
        (
            [deployment(watches="a,b"), deployment("second", watches="b")],
            Verdict.WARNING,
            "ops/elastipod and ops/second may run the same jobs",
        ),
    ],
)
def test_the_operator(operators: list[Any], verdict: Verdict, text: str) -> None:
    check = check_operators(operators_among(operators))[-1]
    assert (check.verdict, text in check.message) == (verdict, True)


APART = [deployment(watches="team, second"), deployment("other", ready=0, watches="third", namespace="ops-2")]


def test_operators_of_different_namespaces_are_judged_one_by_one() -> None:
    checks = check_operators(operators_among(APART))
    assert [check.verdict for check in checks] == [Verdict.OK, Verdict.ERROR]
    assert checks[0].message.endswith("namespaces: second, team")
    assert [check.verdict for check in check_operators(operators_among(APART), "team")] == [Verdict.OK]


def test_a_namespace_that_no_operator_watches_is_told() -> None:
    (check,) = check_operators(operators_among(APART), "fourth")
    assert check.verdict is Verdict.ERROR
    assert check.message == "no operator watches namespace fourth: ops-2/other, ops/elastipod watch others"
    assert "`watchNamespaces`" in check.advice


def lease(at: str, holder: str = "pod-1") -> dict[str, Any]:
    return {"spec": {"renewTime": at, "holderIdentity": holder}}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (lease("2026-01-01T11:59:58.000000Z"), Verdict.OK),
        (lease("2026-01-01T11:59:30.000000Z"), Verdict.WARNING),
        (lease("2026-01-01T11:59:58.000000Z", ""), Verdict.ERROR),
        (None, Verdict.ERROR),
    ],
)
def test_the_leader(found: dict[str, Any] | None, verdict: Verdict) -> None:
    assert check_lease(found, NOW).verdict is verdict


def job(name: str, manager: str = "elastipod-operator", reason: str = "ImagePullFailed") -> dict[str, Any]:
    entries = [{"manager": "kubectl"}, {"manager": manager, "subresource": "status"}]
    conditions = [{"type": "PodsReady", "status": "False", "reason": reason}]
    meta = {"name": name, "namespace": "team", "managedFields": entries}
    return {"metadata": meta, "status": {"conditions": conditions}}


def test_another_controller_is_found_by_what_it_wrote() -> None:
    assert check_writers([job("a")]).verdict is Verdict.OK
    check = check_writers([job("a"), job("b", "hyperpod-training-operator")])
    assert check.verdict is Verdict.ERROR
    assert "hyperpod-training-operator wrote a status" in check.message


def test_agents_that_do_not_answer_are_found_with_the_policies_of_their_namespace() -> None:
    assert check_agents([job("a")], []).verdict is Verdict.OK
    policies = [{"metadata": {"name": "deny", "namespace": space}} for space in ("team", "other")]
    check = check_agents([job("a"), job("b", reason="OperatorCutOff")], policies)
    assert (check.verdict, check.message) == (Verdict.WARNING, "OperatorCutOff: team/b")
    assert check.advice.endswith("reach the agent port: team/deny?")


def review(verb: str, allowed: bool, part: str = "") -> dict[str, Any]:
    asked = {"verb": verb, "resource": "pods", "subresource": part}
    return {"spec": {"resourceAttributes": asked}, "status": {"allowed": allowed}}


def test_rights() -> None:
    assert check_rights([review("list", True)], "sa").verdict is Verdict.OK
    check = check_rights([review("list", True), review("patch", False, "status")], "sa")
    assert (check.verdict, check.message) == (Verdict.ERROR, "sa must not: patch pods/status")
    assert check_rights([], "sa").verdict is Verdict.UNKNOWN


def test_rights_are_asked_for_in_each_namespace_and_those_without_one_once() -> None:
    asked = [
        (one["resource"], one["namespace"])
        for review in access_reviews("sa", ["a", "b"], has_kueue=True)
        for one in [review["spec"]["resourceAttributes"]]  # type: ignore[index]
    ]
    assert {namespace for kind, namespace in asked if kind == "pods"} == {"a", "b"}
    assert {namespace for kind, namespace in asked if kind in CLUSTER_WIDE} == {""}
    assert {one["spec"]["resourceAttributes"]["namespace"] for one in access_reviews("sa", [], has_kueue=False)} == {""}  # type: ignore[index]
    denied = {"verb": "list", "resource": "pods", "namespace": "b"}
    check = check_rights([{"spec": {"resourceAttributes": denied}, "status": {"allowed": False}}], "sa")
    assert check.message == "sa must not: list pods in b"


def granted_by_the_chart() -> set[tuple[str, str]]:
    """Give the resources, with their groups, that the chart's roles of the operator name."""
    texts = [(ROOT / "charts/elastipod/templates" / name).read_text() for name in ("rbac.yaml", "_helpers.tpl")]
    pairs = re.findall(r"- apiGroups: \[(.*?)\]\n\s+resources: \[(.*?)\]", "\n".join(texts))
    return {(group.strip('"'), one.strip()) for group, resources in pairs for one in resources.split(",")}


def test_the_rights_are_those_that_the_chart_grants() -> None:
    """Beside them it may read leases and the CRD, which keep it from running; and it writes into its own pod and its webhook."""
    asked = {(group, f"{kind}/{part}" if part else kind) for group, kind, part, _ in (*NEEDED, *NEEDED_FOR_QUEUES)}
    assert asked == granted_by_the_chart() - {
        ("coordination.k8s.io", "leases"),
        ("apiextensions.k8s.io", "customresourcedefinitions"),
        ("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
    }
    assert len(asked) > 10


def kueue_config(*lines: str) -> dict[str, Any]:
    return {"data": {"controller_manager_config.yaml": "\n".join(lines)}}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        pytest.param(('- "batch/job"', '# - "pod"'), "nothing in them", id="pods are a comment"),
        pytest.param(('- "pod"',), "it may gate their pods", id="pods"),
        pytest.param(("- pod", "- HyperPodPyTorchJob.v1.sagemaker.amazonaws.com"), "nothing in them", id="both"),
        pytest.param(("blockAdmission: true",), "waitForPodsReady.blockAdmission is true", id="blocked"),
    ],
)
def test_settings_of_kueue(lines: tuple[str, ...], text: str) -> None:
    (check,) = check_kueue_config(kueue_config(*lines))
    assert text in check.message


def test_settings_of_kueue_that_cannot_be_read() -> None:
    assert [check.verdict for check in check_kueue_config(None)] == [Verdict.UNKNOWN]


@pytest.mark.parametrize(
    ("served", "verdict"), [(("v1beta1",), Verdict.ERROR), (("v1beta1", "v1beta2"), Verdict.OK), (None, Verdict.OK)]
)
def test_the_version_of_kueue(served: tuple[str, ...] | None, verdict: Verdict) -> None:
    versions = [{"name": name, "served": True} for name in served or ()]
    assert check_kueue({"spec": {"versions": versions}} if served else None).verdict is verdict


def test_cluster_queues() -> None:
    good = {"metadata": {"name": "a"}, "spec": {"preemption": {"withinClusterQueue": "LowerPriority"}}}
    bad: dict[str, Any] = {
        "metadata": {"name": "b"},
        "spec": {"queueingStrategy": "StrictFIFO"},
        "status": {"conditions": [{"type": "Active", "status": "False", "message": "no flavor"}]},
    }
    assert [check.verdict for check in check_cluster_queues([good])] == [Verdict.OK]
    found = check_cluster_queues([good, bad])
    assert [check.what for check in found] == ["ClusterQueue b"] * 3
    assert [check.verdict for check in found] == [Verdict.ERROR, Verdict.WARNING, Verdict.WARNING]


@pytest.mark.parametrize(
    ("key", "is_enforced"),
    [
        ("nvidia.com/gpu", False),
        ("limits.nvidia.com/gpu", False),
        ("requests.nvidia.com/gpu", True),
        ("requests.cpu", True),
        ("cpu", True),
        ("count/hyperpodpytorchjobs.sagemaker.amazonaws.com", True),
        ("fast.storageclass.storage.k8s.io/requests.storage", True),
    ],
)
def test_keys_of_quotas_that_limit_nothing(key: str, is_enforced: bool) -> None:
    check = check_quotas([{"metadata": {"name": "q", "namespace": "team"}, "spec": {"hard": {key: "4"}}}])
    assert (check.verdict is Verdict.OK) is is_enforced
    assert is_enforced or check.message == f"keys that limit nothing: {key} in team/q"


CRDS = "get customresourcedefinitions.apiextensions.k8s.io"
JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"


def cluster() -> dict[str, object]:
    """Give the answers of a cluster in which all is well, without Kueue."""
    renewed = {"spec": {"renewTime": datetime.now(UTC).isoformat(), "holderIdentity": "pod-1"}}
    return {
        "version": {"serverVersion": {"major": "1", "minor": "34", "gitVersion": "v1.34.1"}},
        f"{CRDS} {JOBS}": crd(),
        f"{CRDS} workloads": "Error from server (NotFound): not found",
        "get deployments": {"items": [deployment()]},
        "get leases elastipod-operator": renewed,
        "create -f -": "\n".join(json.dumps(review(verb, True), indent=2) for verb in ("list", "watch")),
        f"get {JOBS}": {"items": [job("a")]},
        "get networkpolicies": {"items": []},
        "get resourcequotas": {"items": []},
    }


def test_a_cluster_in_which_all_is_well(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(cluster())
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "may do all that it needs (2 rights)" in out
    lines = out.splitlines()
    assert len(lines) == 9
    assert {line.split()[0] for line in lines} == {"ok"}


def test_what_is_wrong_comes_with_what_to_do(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    quota = {"metadata": {"name": "q", "namespace": "team"}, "spec": {"hard": {"nvidia.com/gpu": "4"}}}
    forbidden = "Error from server (Forbidden): subjectaccessreviews is forbidden"
    kubectl.answer({**cluster(), "get resourcequotas": {"items": [quota]}, "create -f -": forbidden})
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "    Write `requests.` in front of the resource, as in requests.nvidia.com/gpu."
    assert [line.split()[1] for line in lines if line.startswith("unknown")] == ["rights"]


def test_who_may_not_read_the_crd_still_hears_of_jobs(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    """As a developer with rights in one namespace."""
    silent = {"type": "PodsReady", "status": "False", "reason": "AgentSilent", "message": "x"}
    found = job("llm")
    found["status"] = {**found.get("status", {}), "conditions": [silent]}
    forbidden = "Error from server (Forbidden): customresourcedefinitions is forbidden"
    kubectl.answer({**cluster(), CRDS: forbidden, f"{CRDS} {JOBS}": forbidden, f"get {JOBS}": {"items": [found]}})
    assert cli.main(["doctor", "-n", "team"]) == 1
    out = capsys.readouterr().out
    assert "AgentSilent" in out
    assert "unknown" in out


def test_as_json(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer(cluster())
    assert cli.main(["doctor", "-o", "json", "-n", "team"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["verdict"] for check in checks] == ["ok"] * 9
    assert not any("--all-namespaces" in call for call in kubectl.calls() if JOBS in call)


def asked_namespaces(kubectl: FakeKubectl) -> set[str]:
    lists = [json.loads(one) for one in kubectl.inputs() if one]
    return {
        review["spec"]["resourceAttributes"]["namespace"]
        for one in lists
        for review in one["items"]
        if review["spec"]["resourceAttributes"]["resource"] == "pods"
    }


def test_the_rights_are_asked_for_in_every_watched_namespace(kubectl: FakeKubectl) -> None:
    kubectl.answer({**cluster(), "get deployments": {"items": APART[:1]}})
    assert cli.main(["doctor"]) == 0
    assert asked_namespaces(kubectl) == {"team", "second"}


def test_doctor_says_that_no_operator_watches_the_namespace(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.answer({**cluster(), "get deployments": {"items": APART}})
    assert cli.main(["doctor", "-n", "fourth"]) == 1
    assert "no operator watches namespace fourth" in capsys.readouterr().out


def test_two_releases_for_different_namespaces_are_well(
    kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [deployment(watches="team"), deployment("other", watches="third", namespace="ops-2")]
    kubectl.answer({**cluster(), "get deployments": {"items": two}})
    assert cli.main(["doctor"]) == 0
    accounts = [line for line in capsys.readouterr().out.splitlines() if "may do all that it needs" in line]
    assert [account.split("serviceaccount:")[1].split(" ")[0] for account in accounts] == [
        "ops:elastipod",
        "ops-2:elastipod",
    ]


def test_a_message_of_several_lines_stays_in_its_line(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    queue = {
        "metadata": {"name": "b"},
        "status": {"conditions": [{"type": "Active", "status": "False", "message": "a\nb"}]},
    }
    kueue = {"spec": {"versions": [{"name": "v1beta2", "served": True}]}}
    kubectl.answer(
        {
            **cluster(),
            f"{CRDS} workloads": kueue,
            "get clusterqueues": {"items": [queue]},
            "get configmaps": kueue_config(),
        }
    )
    assert cli.main(["doctor"]) == 1
    assert "it admits nothing: a b\n" in capsys.readouterr().out


def test_the_option_for_the_namespace_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "what the jobs of this namespace need (default: those of all namespaces)" in told


def test_a_cluster_that_does_not_answer(kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]) -> None:
    kubectl.answer({"version": "error: dial tcp: connection refused"})
    assert cli.main(["doctor"]) == 3
    assert capsys.readouterr().err == "elastipod doctor: dial tcp: connection refused\n"
