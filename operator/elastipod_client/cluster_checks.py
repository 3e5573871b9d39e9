"""Checks of the cluster, the CRD, and who works on its jobs. Pure: objects in, results out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from elastipod_operator.core.names import CRD_NAME, FIELD_MANAGER
from elastipod_operator.core.reasons import Reason, as_reason
from elastipod_operator.kube.reading import Body, labels_of, mapping, mappings, name_of, text
from elastipod_operator.kube.scope import is_foreign
from elastipod_operator.kube.times import time_or

from .check import Check, error, ok, warning
from .operators import RunningOperator, overlapping, watching
from .situation import UNKNOWN

OLDEST_MINOR = 30
# The fields of spec.elastipod that this version knows. A test compares them with the CRD.
OWN_FIELDS = frozenset(
    {
        "agentPort", "authentication", "backoff", "container", "gracefulShutdownTimeoutInSeconds", "minStableSeconds",
        "parallelism", "growth", "payback", "recovery",
    }
)  # fmt: skip
LEASE_NAME = "elastipod-operator"
# A leader renews every 2 s, and its lease expires after 15 s.
LEASE_LIMIT = timedelta(seconds=15)
INSTALL = "Install the operator with its Helm chart (docs/operations.md)."
AGENT_PROBLEMS = (Reason.AGENT_NOT_ANSWERING, Reason.AGENT_SILENT, Reason.OPERATOR_CUT_OFF, Reason.TOKEN_REFUSED)
# The status of a job has one writer. Who writes other parts of it is a user or an autoscaler.
STATUS = "status"


def check_version(version: Body) -> Check:
    """Check the version of the API server. version: what `kubectl version -o json` prints."""
    server = mapping(version.get("serverVersion"))
    minor = "".join(letter for letter in text(server.get("minor")) if letter.isdecimal())
    shown = text(server.get("gitVersion")) or "an unknown version"
    if text(server.get("major")) == "1" and minor and int(minor) < OLDEST_MINOR:
        return warning("cluster", f"the API server has {shown}", f"Upgrade it to 1.{OLDEST_MINOR} or newer.")
    return ok("cluster", f"the API server answers; it has {shown}")


def check_crd(crd: Body | None) -> Check:
    """Check that the CRD is there, is Elastipod's, and has the fields of this version."""
    if crd is None:
        advice = f"{INSTALL} If it runs without the CRD, apply that: kubectl apply --server-side -f crds/."
        return error("CRD", f"{CRD_NAME} does not exist", advice)
    versions = [one for one in mappings(mapping(crd.get("spec")).get("versions")) if one.get("served")]
    if not versions:
        return error("CRD", "it serves no version, so the API server knows no jobs", UPGRADE)
    if is_foreign(crd):
        advice = (
            "Do not delete it: that deletes all jobs. End the other controller, then install with crds.takeOver=true."
        )
        return error("CRD", "it belongs to another controller: its spec has no field elastipod", advice)
    if (refusal := _why_not_established(crd)) is not None:
        advice = "The operator waits for it. Correct what the message names: kubectl describe crd " + CRD_NAME
        return error("CRD", f"the API server does not serve it: {refusal}", advice)
    spec = _properties(_properties(mapping(mapping(versions[0].get("schema")).get("openAPIV3Schema")), "spec"))
    known = set(_properties(mapping(spec["elastipod"])))
    if missing := OWN_FIELDS - known:
        return warning("CRD", f"it is older than this command: spec.elastipod lacks {_list(missing)}", UPGRADE)
    if more := known - OWN_FIELDS:
        advice = "Upgrade this command: in a newer checkout of elastipod, run: pip install ."
        return warning("CRD", f"it is newer than this command: spec.elastipod has {_list(more)}", advice)
    return ok("CRD", "it has the fields of this version")


UPGRADE = "Upgrade the CRD with the chart; Helm does not do that by itself: kubectl apply --server-side -f crds/."


def _why_not_established(crd: Body) -> str | None:
    """Say why the API server does not serve a CRD, None where it does."""
    conditions = mappings(mapping(crd.get("status")).get("conditions"))
    refused = [one for one in conditions if one.get("status") == "False"]
    if not any(one.get("type") == "Established" for one in refused):
        return None
    return " ".join(f"{text(one.get('type'))} is False: {text(one.get('message'))}" for one in refused)


def _properties(schema: Body, field: str = "") -> Body:
    """Give the properties of a schema, or the schema of one of them."""
    found = mapping(schema.get("properties"))
    return mapping(found.get(field)) if field else found


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def check_operators(operators: Sequence[RunningOperator], namespace: str = "") -> list[Check]:
    """Check that an operator runs the jobs of a namespace, or of any, that its pods are ready, and that no other runs the same."""
    watches = watching(operators, namespace)
    if not operators:
        return [error("operator", "no Deployment runs `elastipod operator`", INSTALL)]
    if not watches:
        names = _list(one.name for one in operators)
        advice = "Add it to the value `watchNamespaces` of the chart."
        return [error("operator", f"no operator watches namespace {namespace}: {names} watch others", advice)]
    advice = "Uninstall one of them, or give them different `watchNamespaces`."
    shared = [
        warning("operator", f"{one} and {other} may run the same jobs", advice) for one, other in overlapping(watches)
    ]
    return [_check_ready(one) for one in watches] + shared


def _check_ready(operator: RunningOperator) -> Check:
    ready = mapping(operator.body.get("status")).get("readyReplicas") or 0
    version = labels_of(operator.body).get("app.kubernetes.io/version", "unknown")
    if not ready:
        advice = f"See its pods and their log: kubectl -n {operator.namespace} get pods."
        return error("operator", f"{operator.name} has no ready pod", advice)
    namespaces = f", namespaces: {_list(operator.scope.namespaces)}" if operator.scope.namespaces else ""
    return ok("operator", f"{operator.name}, version {version}, ready pods: {ready}{namespaces}")


def check_lease(lease: Body | None, now: datetime) -> Check:
    """Check that an operator leads: it has renewed its lease a moment ago."""
    spec = mapping((lease or {}).get("spec"))
    renewed = time_or(spec.get("renewTime"), UNKNOWN)
    holder = text(spec.get("holderIdentity"))
    if lease is None or not holder or renewed is UNKNOWN:
        return error("leader", "no operator has the lease", "See the operator's log.")
    if now - renewed > LEASE_LIMIT:
        age = int((now - renewed).total_seconds())
        advice = "See the operator's log; if this machine's clock is ahead, ignore this."
        return warning("leader", f"{holder} renewed its lease {age} s ago", advice)
    return ok("leader", f"{holder} leads")


def check_writers(jobs: Sequence[Body]) -> Check:
    """Check that nobody else writes the status of jobs: another controller on the same CRD."""
    others = {
        text(entry.get("manager"))
        for job in jobs
        for entry in mappings(mapping(job.get("metadata")).get("managedFields"))
        if entry.get("subresource") == STATUS and entry.get("manager") != FIELD_MANAGER
    }
    if others:
        message = f"another controller works on these jobs: {_list(others)} wrote a status"
        return error("other controllers", message, "Stop it, or Elastipod's operator: only one can run a job.")
    return ok("other controllers", f"only {FIELD_MANAGER} writes the status of jobs ({len(jobs)} read)")


def check_agents(jobs: Sequence[Body], policies: Sequence[Body]) -> Check:
    """Check that the operator reaches the agents, as far as the jobs' conditions show it. policies: NetworkPolicies."""
    silent: dict[str, list[str]] = {}
    for job in jobs:
        for condition in mappings(mapping(job.get("status")).get("conditions")):
            reason = as_reason(text(condition.get("reason")))
            if condition.get("type") == "PodsReady" and reason in AGENT_PROBLEMS:
                silent.setdefault(str(reason), []).append(_name(job))
    if not silent:
        return ok("agents", "no job reports an agent that does not answer")
    namespaces = {job.split("/")[0] for names in silent.values() for job in names}
    named = sorted(_name(one) for one in policies if text(mapping(one.get("metadata")).get("namespace")) in namespaces)
    advice = "See `elastipod why JOB`."
    if named:
        advice += f" Do these NetworkPolicies let the operator reach the agent port: {', '.join(named)}?"
    found = "; ".join(f"{reason}: {_list(names)}" for reason, names in sorted(silent.items()))
    return warning("agents", found, advice)


def _name(body: Body) -> str:
    return f"{text(mapping(body.get('metadata')).get('namespace'))}/{name_of(body)}"
