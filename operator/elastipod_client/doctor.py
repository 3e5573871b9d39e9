"""`elastipod doctor`: checks the cluster, the CRD, the operator and its rights, Kueue, quotas, and agents."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from .check import Check, Verdict, unknown
from .cluster_checks import (
    LEASE_NAME,
    check_agents,
    check_crd,
    check_lease,
    check_operators,
    check_version,
    check_writers,
)
from .kubectl import Kubectl, KubectlError, NotFoundError
from .observing import JOBS, KUEUE
from .operators import RunningOperator, operators_among, watching
from .options import ATTENTION, OK, add_output, kubectl_of, parser_of, run, structured, table
from .queue_checks import check_cluster_queues, check_kueue, check_kueue_config, check_quotas
from .rights_check import access_reviews, check_rights
from .terminal import say

CRDS = "customresourcedefinitions.apiextensions.k8s.io"
KUEUE_CONFIG = ("kueue-system", "kueue-manager-config")
FORMATS = ("text", "json", "yaml")
Found = TypeVar("Found")
NONE: list[dict[str, Any]] = []
# Some twenty questions each, which kubectl asks one after the other.
MAX_NAMESPACES = 16


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    description = (
        "Check the cluster, the CRD, the operator and its rights, Kueue, quotas, and whether agents are reached."
    )
    found = parser_of(
        "doctor", description, "check what the jobs of this namespace need (default: those of all namespaces)"
    )
    add_output(found, FORMATS)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    args = parser().parse_args(argv)

    def doctor() -> int:
        checks = examine(kubectl_of(args))
        say(shown(checks, args.output))
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
    if crd is not None or not is_read:  # who may not read CRDs may read jobs
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
    if not is_read:
        return
    operators = operators_among(deployments)
    reader.checks += check_operators(operators, reader.kubectl.namespace)
    watches = watching(operators, reader.kubectl.namespace)
    for namespace in sorted({one.namespace for one in watches}):
        _leader(reader, anywhere, namespace)
    for operator in watches:
        _rights(reader, anywhere, operator, has_kueue=has_kueue)


def _leader(reader: Reader, anywhere: Kubectl, namespace: str) -> None:
    lease, is_read = reader.read("leader", lambda: _in(anywhere, namespace, "leases", LEASE_NAME), None)
    if is_read:
        reader.checks.append(check_lease(lease, datetime.now(UTC)))


def _rights(reader: Reader, anywhere: Kubectl, operator: RunningOperator, *, has_kueue: bool) -> None:
    chosen = reader.kubectl.namespace
    namespaces = [chosen] if chosen else operator.scope.namespaces
    if len(namespaces) > MAX_NAMESPACES:
        message = f"asked for the first {MAX_NAMESPACES} of {len(namespaces)} namespaces only; -n asks for another"
        reader.checks.append(unknown("rights", message))
    questions = access_reviews(operator.account, namespaces[:MAX_NAMESPACES], has_kueue=has_kueue)
    reviews, is_read = reader.read("rights", lambda: anywhere.create(questions), NONE)
    if is_read:
        reader.checks.append(check_rights(reviews, operator.account))


def _in(kubectl: Kubectl, namespace: str, kind: str, name: str) -> dict[str, Any]:
    return Kubectl(namespace=namespace, context=kubectl.context, kubeconfig=kubectl.kubeconfig).get(kind, name)


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
