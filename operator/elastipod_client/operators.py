"""Which operators run in a cluster, and whose jobs each of them runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from elastipod_operator.kube.reading import Body, mapping, mappings, name_of, text
from elastipod_operator.kube.scope import Scope

PROGRAM = ["elastipod", "operator"]


@dataclass(frozen=True, slots=True)
class RunningOperator:
    """One release. name: namespace and name of its Deployment, or of its leader's pod. account: its ServiceAccount's user.

    container: the one that runs it; by its name in the chart if no command tells.
    """

    name: str
    namespace: str
    account: str
    container: str
    scope: Scope
    body: Body


def operators_among(deployments: Sequence[Body]) -> list[RunningOperator]:
    """Give the operators among Deployments."""
    specs = [(one, mapping(mapping(mapping(one.get("spec")).get("template")).get("spec"))) for one in deployments]
    return [_operator(one, spec) for one, spec in specs if any(map(_runs_operator, mappings(spec.get("containers"))))]


def leaders(pods: Sequence[Body]) -> list[RunningOperator]:
    """Give the operators of pods that have the label of a leader."""
    return [_operator(one, mapping(one.get("spec"))) for one in pods]


def _runs_operator(container: Body) -> bool:
    words = [word for word in container.get("command") or () if isinstance(word, str)]
    return " ".join(PROGRAM) in " ".join(words)


def _operator(body: Body, spec: Body) -> RunningOperator:
    container = next(filter(_runs_operator, mappings(spec.get("containers"))), {})
    namespace = text(mapping(body.get("metadata")).get("namespace"))
    account = text(spec.get("serviceAccountName")) or "default"
    return RunningOperator(
        name=f"{namespace}/{name_of(body)}",
        namespace=namespace,
        account=f"system:serviceaccount:{namespace}:{account}",
        container=text(container.get("name")) or "operator",
        scope=_scope({text(one.get("name")): text(one.get("value")) for one in mappings(container.get("env"))}),
        body=body,
    )


def _scope(env: Mapping[str, str]) -> Scope:
    """Read which jobs an operator runs, as its own options read it."""
    listed = [name.strip() for name in env.get("WATCH_NAMESPACES", "").split(",")]
    return Scope(
        release=env.get("RELEASE_NAME", ""),
        namespaces=tuple(name for name in listed if name),
        controller=env.get("ELASTIPOD_CONTROLLER_NAME") or "elastipod",
        only_named=env.get("ELASTIPOD_ONLY_NAMED") == "true",
    )


def watching(operators: Sequence[RunningOperator], namespace: str) -> list[RunningOperator]:
    """Give the operators that run jobs of a namespace; all of them for the empty one."""
    return [one for one in operators if not namespace or one.scope.watches(namespace)]


def overlapping(operators: Sequence[RunningOperator]) -> Iterator[tuple[str, str]]:
    """Give the pairs of operators that may run the same job."""
    for one, other in combinations(operators, 2):
        if one.scope.overlaps(other.scope):
            yield one.name, other.name
