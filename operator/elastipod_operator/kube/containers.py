"""What the kubelet reports of a pod's containers: the one that runs the agent, and whether all have ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from ..core.names import AGENT_PORT_ENV, JOB_ENV, POD_ENV, RUN_ID_ENV
from ..core.snapshot import ContainerState, ObservedContainer
from .reading import mapping, mappings, text

AGENT_ENVS = frozenset({JOB_ENV, RUN_ID_ENV, POD_ENV, AGENT_PORT_ENV})
Container = TypeVar("Container", bound=Mapping[str, Any])
# Shared, because thousands of pods are in one of a few states.
_shared = lru_cache(maxsize=1024)(ObservedContainer)


def wanted_container(named: str, first_template: Mapping[str, Any]) -> str:
    """Give the name of the container that runs the agent in new pods of all templates; "" if none is known.

    named: by the spec, "" for none. Then it is the first one of the first template.
    """
    containers = mappings(mapping(first_template.get("spec")).get("containers"))
    return named or (text(containers[0].get("name")) if containers else "")


def agent_container(containers: Sequence[Container], wanted: str) -> Container | None:
    """Give the container that runs the agent in new pods: the one named `wanted`, else the first; None without containers.

    containers: of a template. The statuses do not show which one is first, because kubelets sort them by name.
    """
    named = (one for one in containers if one.get("name") == wanted)
    return next(named, containers[0] if containers else None)


def agent_container_of_pod(containers: Sequence[Container], wanted: str) -> Container | None:
    """Give the container that runs the agent of a pod that exists: the one that was made for it, whatever the job says since.

    wanted: decides for a pod whose variables do not tell; as for `agent_container`.
    """
    made_for_it = [one for one in containers if {text(e.get("name")) for e in mappings(one.get("env"))} >= AGENT_ENVS]
    return agent_container(made_for_it or containers, wanted)


def statuses_by_name(listed: Any) -> dict[str, Mapping[str, Any]]:
    """Give container statuses by the name of their container."""
    return {text(one["name"]): one for one in mappings(listed) if "name" in one}


def container_fact(spec: Mapping[str, Any], status: Mapping[str, Any]) -> ObservedContainer | None:
    """Read one container status; None when it has no state. spec: the pod's."""
    found = mapping(status.get("state"))
    state = next((one for one in ContainerState if one.value in found), None)
    if state is None:
        return None
    now, last = mapping(found[state.value]), mapping(mapping(status.get("lastState")).get("terminated"))
    exit_code = _number((now if state is ContainerState.TERMINATED else last).get("exitCode"))
    restart_count = _number(status.get("restartCount")) or 0
    has_ended = state is ContainerState.TERMINATED or (state is ContainerState.WAITING and restart_count > 0)
    restarts = has_ended and _restarts(spec, text(status.get("name")), exit_code)
    return _shared(state, exit_code, text(now.get("reason")), restart_count, restarts)


def all_ended(spec: Mapping[str, Any], statuses: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether every container has ended for good. The pod's phase follows a little later."""
    names = {text(one.get("name")) for one in mappings(spec.get("containers"))} or set(statuses)
    facts = [container_fact(spec, statuses[name]) for name in names if name in statuses]
    return len(facts) == len(names) > 0 and all(
        fact is not None and fact.state is ContainerState.TERMINATED and not fact.is_restarting for fact in facts
    )


def _restarts(spec: Mapping[str, Any], name: str, exit_code: int | None) -> bool:
    """Whether the kubelet restarts a container that ended. Its own restart policy overrides that of the pod."""
    own = next((one.get("restartPolicy") for one in mappings(spec.get("containers")) if one.get("name") == name), None)
    policy = own or spec.get("restartPolicy") or "Never"  # the operator's pods have Never
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def _number(found: Any) -> int | None:
    return found if isinstance(found, int) and not isinstance(found, bool) else None
