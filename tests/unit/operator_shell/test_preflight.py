"""What keeps an operator from running jobs: another's CRD, and other releases that run the same jobs. In virtual time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.unit.operator_shell.virtual_time import run_in_virtual_time

from elastipod_operator.api import crd
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.preflight import Refusal, check_crd, check_releases
from elastipod_operator.kube.scope import Scope

MINE = Scope("mine")


class Server:
    """Leases of several namespaces, some of which are renewed each second. error: what every call is answered with."""

    def __init__(self, *leases: dict[str, Any], renewed: tuple[str, ...] = (), error: ApiError | None = None) -> None:
        self.leases, self.renewed, self.error = leases, renewed, error
        self.crd: dict[str, Any] = crd.build()

    async def list_leases(self, name: str) -> list[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        assert name == "elastipod-operator"
        second = int(asyncio.get_running_loop().time())
        return [
            self._now(lease, second if lease["metadata"]["namespace"] in self.renewed else 0) for lease in self.leases
        ]

    def _now(self, lease: dict[str, Any], version: int) -> dict[str, Any]:
        return {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(version)}}

    async def read_crd(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return self.crd


def lease(namespace: str, scope: Scope, *, leads: bool = True, holder: str = "somebody") -> dict[str, Any]:
    metadata = {"namespace": namespace, "annotations": scope.annotations(leads=leads)}
    return {"metadata": metadata, "spec": {"holderIdentity": holder}}


def check(server: Server, scope: Scope = MINE, namespace: str = "m") -> None:
    run_in_virtual_time(check_releases(cast(Api, server), namespace, "elastipod-operator", scope))


@pytest.mark.parametrize(
    ("namespace", "leads"),
    [
        pytest.param("z", True, id="it leads"),
        pytest.param("a", False, id="it starts at the same time, and is the first by name"),
    ],
)
def test_a_release_that_runs_the_same_jobs_is_refused(namespace: str, leads: bool) -> None:
    server = Server(lease(namespace, Scope("theirs", ("x", "y")), leads=leads), renewed=(namespace,))
    with pytest.raises(Refusal) as told:
        check(server)
    assert str(told.value).startswith(
        f"release theirs in namespace {namespace} runs the jobs in namespaces x, y, and this release (mine in namespace m) would"
    )


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(Server(), id="alone"),
        pytest.param(Server(lease("m", Scope("mine")), renewed=("m",)), id="its own lease"),
        pytest.param(Server(lease("z", Scope("theirs"))), id="a lease that nobody renews"),
        pytest.param(Server(lease("z", Scope("theirs"), holder=""), renewed=("z",)), id="a lease that was released"),
        pytest.param(Server(lease("z", Scope("theirs"), leads=False), renewed=("z",)), id="the other one gives way"),
        pytest.param(
            Server(lease("z", Scope("canary", (), "canary", only_named=True)), renewed=("z",)), id="it runs other jobs"
        ),
        pytest.param(Server(error=ApiError(403, "forbidden")), id="no permission to see"),
    ],
)
def test_other_releases_do_no_harm(server: Server) -> None:
    check(server)


async def crd_check(server: Server, *, takes_over: bool = False) -> None:
    await check_crd(cast(Api, server), takes_over=takes_over)


async def test_the_crd_of_another_controller_is_refused_unless_it_is_taken_over() -> None:
    server = Server()
    await crd_check(server)
    del server.crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["elastipod"]
    await crd_check(server, takes_over=True)
    with pytest.raises(Refusal, match="belongs to another controller: its spec has no field elastipod"):
        await crd_check(server)


@pytest.mark.parametrize("status", [403, 404, 500])
async def test_a_crd_that_cannot_be_read_stops_nobody(status: int) -> None:
    await crd_check(Server(error=ApiError(status, "no")))
