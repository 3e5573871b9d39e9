"""What must hold before an operator may run jobs: the CRD is there and Elastipod's, and no other release runs the same jobs.

Each release writes its scope into its leader lease, which all releases may list. A lease counts when it changes while it is
watched, so clocks of other machines do not matter.
"""

from __future__ import annotations

import asyncio
import logging

from ..core.names import CRD_NAME, GROUP, PLURAL, VERSION
from .api import CALL_ERRORS, Api, ApiError, may_pass
from .reading import Body, mapping, mappings, text
from .scope import Scope, is_foreign, scope_of

log = logging.getLogger(__name__)

# Leaders renew every 2 s: one that lives changes its lease in this time.
WATCH_S = 5.0
# How often a leader without a CRD asks for it, and how often it says so.
CRD_RETRY_S, TELL_EVERY_S = 2.0, 60.0
# Until every API server of the cluster serves a CRD that one of them serves.
SETTLE_S = 5.0


class Refusal(Exception):
    """The operator must not run. The text says why, and what to do."""


async def check_crd(api: Api, *, takes_over: bool) -> None:
    """Raise Refusal if the CRD belongs to another controller and nobody asked for a takeover."""
    try:
        crd = await api.read_crd()
    except CALL_ERRORS as error:
        if not isinstance(error, ApiError) or error.status != 404:
            log.warning("cannot read CRD %s to see whose it is: %s", CRD_NAME, error)
        return
    if is_foreign(crd) and not takes_over:
        raise Refusal(
            f"CRD {CRD_NAME} belongs to another controller: its spec has no field elastipod. Two controllers must not run the "
            "same jobs. End that controller and set crds.takeOver=true (the CRD and its jobs stay), or uninstall this release"
        )


async def wait_for_crd(api: Api, *, takes_over: bool) -> None:
    """Wait until the API server serves jobs: kopf discovers resources once and never watches those that come later.

    A CRD that was applied meanwhile is checked like one that was there before. Raises Refusal, or ApiError if discovery is refused.
    """
    tell_at, now = 0.0, asyncio.get_running_loop().time
    while not await _serves_jobs(api):
        if now() >= tell_at:
            log.warning(
                "the API server does not serve %s yet; the operator waits for it and runs no jobs. Apply the CRD: "
                "kubectl apply --server-side -f crds/", CRD_NAME,
            )  # fmt: skip
            tell_at = now() + TELL_EVERY_S
        await asyncio.sleep(CRD_RETRY_S)
    if not tell_at:
        return
    await asyncio.sleep(SETTLE_S)
    log.info("the API server serves %s now", CRD_NAME)
    await check_crd(api, takes_over=takes_over)


async def _serves_jobs(api: Api) -> bool:
    """Whether the API server lists jobs where kopf looks for them. While it does not answer, ask again."""
    while True:
        try:
            groups = mappings((await api.call("GET", "/apis")).get("groups"))
            if not any(group.get("name") == GROUP for group in groups):
                return False
            resources = mappings((await api.call("GET", f"/apis/{GROUP}/{VERSION}")).get("resources"))
            return any(resource.get("name") == PLURAL for resource in resources)
        except CALL_ERRORS as error:
            if isinstance(error, ApiError) and error.status == 404:
                return False
            if not may_pass(error):
                raise
            log.warning("cannot discover what the API server serves yet: %s %s", type(error).__name__, error)
        await asyncio.sleep(CRD_RETRY_S)


async def check_releases(api: Api, namespace: str, name: str, scope: Scope) -> None:
    """Raise Refusal if another release runs some of the same jobs. The caller holds the lease `namespace`/`name`, and waits."""
    before = await _other_leases(api, namespace, name, scope)
    if not before:
        return
    await asyncio.sleep(WATCH_S)
    for where, lease in (await _other_leases(api, namespace, name, scope)).items():
        is_alive = _version(lease) != _version(before.get(where, {}))
        other, leads = scope_of(lease)
        # Of two that start at the same time, the first by name goes on.
        if is_alive and (leads or where < namespace):
            raise Refusal(
                f"release {other.release or 'of an earlier version'} in namespace {where} runs {_words(other)}, and this release "
                f"({scope.release} in namespace {namespace}) would run some of the same. Uninstall one of them, or set "
                "watchNamespaces or controller.name and controller.onlyNamed so that they share no job"
            )


async def _other_leases(api: Api, namespace: str, name: str, scope: Scope) -> dict[str, Body]:
    """Give the leases that other releases hold and that concern the same jobs, by namespace; empty if they cannot be read."""
    try:
        leases = await api.list_leases(name)
    except CALL_ERRORS as error:
        log.warning("cannot look for other releases of Elastipod: %s %s", type(error).__name__, error)
        return {}
    found = {text(mapping(lease.get("metadata")).get("namespace")): lease for lease in leases}
    return {
        where: lease
        for where, lease in found.items()
        if where != namespace
        and mapping(lease.get("spec")).get("holderIdentity")
        and scope.overlaps(scope_of(lease)[0])
    }


def _version(lease: Body) -> str:
    return text(mapping(lease.get("metadata")).get("resourceVersion"))


def _words(scope: Scope) -> str:
    where = f"in namespaces {', '.join(scope.namespaces)}" if scope.namespaces else "in all namespaces"
    return f"the jobs {where}{f' that name controller {scope.controller}' if scope.only_named else ''}"
