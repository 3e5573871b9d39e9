"""`elastipod doctor`: checks the cluster, the CRD, the operator and its rights, Kueue, quotas, and agents."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from elastipod_operator.kube.reading import Body, mapping, mappings, text

from .check import Check, Verdict, unknown
from .cluster_checks import (
    LEASE_NAME,
    access_reviews,
    check_agents,
    check_crd,
    check_lease,
    check_operators,
    check_rights,
    check_version,
    check_writers,
    operators_among,
)
from .kubectl import Kubectl, KubectlError, NotFoundError
from .observing import JOBS, KUEUE
from .options import ATTENTION, OK, add_output, kubectl_of, parser_of, run, structured, table
from .queue_checks import check_cluster_queues, check_kueue, check_kueue_config, check_quotas

CRDS = "customresourcedefinitions.apiextensions.k8s.io"
KUEUE_CONFIG = ("kueue-system", "kueue-manager-config")
FORMATS = ("text", "json", "yaml")
Found = TypeVar("Found")
NONE: list[dict[str, Any]] = []


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    description = (
        "Check the cluster, the CRD, the operator and its rights, Kueue, quotas, and whether agents are reached."
    )
    found = parser_of("doctor", description)
    add_output(found, FORMATS)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    args = parser().parse_args(argv)

    def doctor() -> int:
        checks = examine(kubectl_of(args))
        print(shown(checks, args.output))
        is_well = all(check.verdict in (Verdict.OK, Verdict.UNKNOWN) for check in checks)
        return OK if is_well else ATTENTION

    return run("doctor", doctor)


def shown(checks: Sequence[Check], form: str) -> str:
    """Give the results in one of the formats of -o."""
    if form in ("json", "yaml"):
        parts = [
            {"what": one.what, "verdict": one.verdict.value, "message": one.message, "toDo": one.advice}
            for one in checks
        ]
        return structured({"checks": parts}, form)
    lines = table([(one.verdict.value, one.what, one.message) for one in checks]).splitlines()
    return "\n".join(
        f"{line}\n    {one.advice}" if one.advice else line for line, one in zip(lines, checks, strict=True)
    )


@dataclass
class Reader:
    """Reads objects for checks; what cannot be read becomes a check with the verdict unknown."""

    kubectl: Kubectl
    checks: list[Check] = field(default_factory=list)

    def read(self, what: str, call: Callable[[], Found], otherwise: Found) -> tuple[Found, bool]:
        """Give what a call gives, and whether it succeeded. A missing object or kind counts as read."""
        try:
            return call(), True
        except NotFoundError:
            return otherwise, True
        except KubectlError as error:
            self.checks.append(unknown(what, str(error)))
            return otherwise, False

    def items(self, what: str, kind: str, *options: str) -> tuple[list[dict[str, Any]], bool]:
        """List objects of all namespaces, or of the chosen one."""
        everywhere = () if self.kubectl.namespace else ("--all-namespaces",)
        return self.read(what, lambda: self.kubectl.items(kind, *everywhere, *options), [])


def examine(kubectl: Kubectl) -> list[Check]:
    """Check everything. With a namespace, only its jobs and quotas are read. Raises KubectlError if nothing answers."""
    reader = Reader(kubectl)
    reader.checks.append(check_version(json.loads(kubectl.run("version", "-o", "json"))))
    crd, is_read = reader.read("CRD", lambda: kubectl.get(CRDS, JOBS), None)
    if is_read:
        reader.checks.append(check_crd(crd))
    workloads, knows_kueue = reader.read("Kueue", lambda: kubectl.get(CRDS, f"workloads.{KUEUE}"), None)
    _operator(reader, has_kueue=workloads is not None)
    if crd is not None:
        _jobs(reader)
    if knows_kueue:
        reader.checks.append(check_kueue(workloads))
    if workloads is not None:
        _kueue(reader)
    quotas, is_read = reader.items("ResourceQuotas", "resourcequotas")
    if is_read:
        reader.checks.append(check_quotas(quotas))
    return reader.checks


def _operator(reader: Reader, *, has_kueue: bool) -> None:
    anywhere = Kubectl(context=reader.kubectl.context, kubeconfig=reader.kubectl.kubeconfig)
    selector = "--selector=app.kubernetes.io/component=operator"
    deployments, is_read = reader.read(
        "operator", lambda: anywhere.items("deployments", "--all-namespaces", selector), NONE
    )
    operators = operators_among(deployments)
    if not is_read:
        return
    reader.checks.append(check_operators(operators))
    if operators:
        operator, namespace = operators[0], text(mapping(operators[0].get("metadata")).get("namespace"))
        lease, is_read = reader.read("leader", lambda: _in(anywhere, namespace, "leases", LEASE_NAME), None)
        if is_read:
            reader.checks.append(check_lease(lease, datetime.now(UTC)))
        account = f"system:serviceaccount:{namespace}:{_account(operator)}"
        questions = access_reviews(account, reader.kubectl.namespace or _watched(operator), has_kueue=has_kueue)
        reviews, is_read = reader.read("rights", lambda: anywhere.create(questions), NONE)
        if is_read:
            reader.checks.append(check_rights(reviews, account))


def _in(kubectl: Kubectl, namespace: str, kind: str, name: str) -> dict[str, Any]:
    return Kubectl(namespace=namespace, context=kubectl.context, kubeconfig=kubectl.kubeconfig).get(kind, name)


def _account(deployment: Body) -> str:
    template = mapping(mapping(mapping(deployment.get("spec")).get("template")).get("spec"))
    return text(template.get("serviceAccountName")) or "default"


def _watched(deployment: Body) -> str:
    """Give the first of the namespaces that an operator watches; empty for all."""
    template = mapping(mapping(mapping(deployment.get("spec")).get("template")).get("spec"))
    entries = [entry for one in mappings(template.get("containers")) for entry in mappings(one.get("env"))]
    listed = next((text(entry.get("value")) for entry in entries if entry.get("name") == "WATCH_NAMESPACES"), "")
    return listed.split(",")[0].strip()


def _jobs(reader: Reader) -> None:
    jobs, is_read = reader.items("jobs", JOBS, "--show-managed-fields")
    if is_read:
        policies, _ = reader.items("NetworkPolicies", "networkpolicies.networking.k8s.io")
        reader.checks += [check_writers(jobs), check_agents(jobs, policies)]


def _kueue(reader: Reader) -> None:
    queues, is_read = reader.read("ClusterQueues", lambda: reader.kubectl.items(f"clusterqueues.{KUEUE}"), NONE)
    if is_read:
        reader.checks += check_cluster_queues(queues)
    config, is_read = reader.read(
        "Kueue settings", lambda: _in(reader.kubectl, KUEUE_CONFIG[0], "configmaps", KUEUE_CONFIG[1]), None
    )
    if is_read:
        reader.checks += check_kueue_config(config)
