"""The check of what an operator's account may do. Pure: objects in, result out."""

from __future__ import annotations

from collections.abc import Sequence

from elastipod_operator.kube.reading import Body, mapping, text

from .check import Check, error, ok, unknown


def check_rights(reviews: Sequence[Body], account: str) -> Check:
    """Check what the operator's account may do. reviews: SubjectAccessReviews that the API server answered."""
    if not reviews:
        return unknown("rights", "the rights of the operator's account could not be asked for")
    denied = [
        f"{text(asked.get('verb'))} {text(asked.get('resource'))}"
        f"{'/' + text(asked.get('subresource')) if asked.get('subresource') else ''}"
        f"{' in ' + text(asked.get('namespace')) if asked.get('namespace') else ''}"
        for review in reviews
        if not mapping(review.get("status")).get("allowed")
        for asked in [mapping(mapping(review.get("spec")).get("resourceAttributes"))]
    ]
    if denied:
        advice = "Install the chart's roles (`rbac.create`), or grant these, as far as the chart's values use them."
        return error("rights", f"{account} must not: {', '.join(denied)}", advice)
    return ok("rights", f"{account} may do all that it needs ({len(reviews)} rights)")


# Group, resource, subresource, verbs: what the chart's roles grant. A test compares them with the chart.
NEEDED = (
    ("", "nodes", "", ("get", "list", "watch")),
    ("sagemaker.amazonaws.com", "hyperpodpytorchjobs", "", ("get", "list", "watch", "patch", "delete")),
    ("sagemaker.amazonaws.com", "hyperpodpytorchjobs", "status", ("patch",)),
    ("sagemaker.amazonaws.com", "hyperpodpytorchjobs", "finalizers", ("update",)),
    ("", "pods", "", ("list", "watch", "create", "delete")),
    ("", "secrets", "", ("create",)),
    ("", "events", "", ("create",)),
)
NEEDED_FOR_QUEUES = (
    ("kueue.x-k8s.io", "resourceflavors", "", ("get",)),
    ("kueue.x-k8s.io", "workloadpriorityclasses", "", ("get",)),
    ("scheduling.k8s.io", "priorityclasses", "", ("get", "list")),
    ("kueue.x-k8s.io", "clusterqueues", "", ("list",)),
    ("kueue.x-k8s.io", "workloads", "", ("get", "list", "watch", "create", "patch", "delete")),
    ("kueue.x-k8s.io", "workloads", "status", ("patch",)),
    ("kueue.x-k8s.io", "localqueues", "", ("get", "list")),
)

# Kinds without a namespace.
CLUSTER_WIDE = ("nodes", "priorityclasses", "resourceflavors", "workloadpriorityclasses", "clusterqueues")


def access_reviews(account: str, namespaces: Sequence[str], *, has_kueue: bool) -> list[dict[str, object]]:
    """Give the questions to the API server about the rights of an account. namespaces: of the jobs; none for all."""
    return [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": account,
                "resourceAttributes": {
                    "group": group, "resource": resource, "subresource": part, "verb": verb, "namespace": namespace
                },
            },
        }
        for group, resource, part, verbs in (*NEEDED, *(NEEDED_FOR_QUEUES if has_kueue else ()))
        for namespace in ((namespaces or ("",)) if resource not in CLUSTER_WIDE else ("",))
        for verb in verbs
    ]  # fmt: skip
