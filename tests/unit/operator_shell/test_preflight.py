"""What keeps an operator from running jobs: no CRD or another's, and other releases that run the same jobs. In virtual time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.nonempty import every
from tests.unit.operator_shell.virtual_time import run_in_virtual_time

from elastipod_operator.api import crd
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.preflight import Refusal, check_crd, check_releases, wait_for_crd
from elastipod_operator.kube.scope import Scope

MINE = Scope("mine")


class Server:
    """Leases of several namespaces, some of which are renewed each second. error: what every call is answered with."""

    def __init__(self, *leases: dict[str, Any], renewed: tuple[str, ...] = (), error: ApiError | None = None) -> None:
        self.leases, self.renewed, self.error = leases, renewed, error
        self.crd: dict[str, Any] = crd.build()
        self.discovery: list[tuple[float, dict[str, Any] | Exception]] = []

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

    async def call(self, method: str, path: str) -> dict[str, Any]:
        """Answer discovery with what holds since the last of some seconds."""
        second = asyncio.get_running_loop().time() - BEGIN_S
        found = [served for since, served in self.discovery if since <= second][-1]
        if isinstance(found, Exception):
            raise found
        if (method, path) == ("GET", "/apis"):
            return {"groups": [{"name": "apps"}, *({"name": group} for group in found)]}
        group = path.removeprefix("/apis/").removesuffix("/v1")
        if group not in found:
            raise ApiError(404, "the server could not find the requested resource")
        return {"resources": [{"name": name} for name in found[group]]}


BEGIN_S = 1000.0  # of virtual time
GROUP = "sagemaker.amazonaws.com"
SERVED = {GROUP: ["hyperpodpytorchjobs", "hyperpodpytorchjobs/status"]}


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


def wait(server: Server, *, takes_over: bool = False) -> float:
    """Wait for the CRD; give the seconds that it took."""

    async def timed() -> float:
        await wait_for_crd(cast(Api, server), takes_over=takes_over)
        return asyncio.get_running_loop().time() - BEGIN_S

    return run_in_virtual_time(timed())


@pytest.mark.parametrize(
    "before",
    [
        pytest.param({}, id="no CRD"),
        pytest.param({GROUP: []}, id="the group without a resource"),
        pytest.param({GROUP: ["others"]}, id="another resource of the group; this one is not established"),
    ],
)
def test_a_leader_waits_until_jobs_are_served_and_says_what_to_apply(
    before: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    server.discovery = [(0, before), (150, SERVED)]
    caplog.set_level("INFO")
    assert 150 <= wait(server) < 160, "some seconds more: another API server may serve it a little later"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4, "at once, twice more, and at the end"
    assert every("kubectl apply --server-side -f crds/" in message for message in told[:3])
    assert told[3] == "the API server serves hyperpodpytorchjobs.sagemaker.amazonaws.com now"


def test_a_crd_that_is_served_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.discovery = [(0, SERVED)]
    assert wait(server) == 0
    assert caplog.text == ""


def test_an_api_server_that_does_not_answer_has_not_lost_its_crd(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.discovery = [(0, ConnectionRefusedError()), (3, ApiError(503, "starting")), (9, SERVED)]
    assert 9 <= wait(server) < 12
    assert "cannot discover what the API server serves yet: ApiError starting" in caplog.text
    assert "crds/" not in caplog.text


def test_who_may_not_discover_is_not_kept_waiting() -> None:
    server = Server()
    server.discovery = [(0, ApiError(403, "forbidden"))]
    with pytest.raises(ApiError, match="forbidden"):
        wait(server)


def test_a_crd_that_came_late_is_checked_like_another() -> None:
    server = Server()
    del server.crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["elastipod"]
    server.discovery = [(0, {}), (20, SERVED)]
    with pytest.raises(Refusal, match="belongs to another controller"):
        wait(server)
    assert wait(server, takes_over=True) > 20
