"""Priority classes, flavors and nodes: read when needed, and not again and again."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from tests.unit.kube.bodies import job_body
from tests.unit.kube.queue_bodies import flavor_body, workload_body

from elastipod_operator import clock
from elastipod_operator.core.actions import CreateWorkload
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.placement import PlacementError
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.queue_lookups import BaseNotPlaced, KueueLookups, QuotaError
from elastipod_operator.kube.workloads import Priority

Body = dict[str, Any]
RACK = "topology/rack"


class Cluster:
    """Answers reads from what it is given; counts them."""

    def __init__(self, **objects: Any) -> None:
        self.objects = objects
        self.reads: Counter[str] = Counter()

    async def _read(self, kind: str, name: str) -> Body:
        self.reads[f"{kind}/{name}"] += 1
        found = self.objects.get(kind, {}).get(name)
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise ApiError(404, f'"{name}" not found')
        return cast(Body, found)

    async def read_class(self, kind: str, name: str) -> Body:
        return await self._read(kind, name)

    async def read_flavor(self, name: str) -> Body:
        return await self._read("flavors", name)

    async def read_node(self, name: str) -> Body:
        return await self._read("nodes", name)

    async def list_priority_classes(self) -> list[Body]:
        return list(self.objects.get("PriorityClass", {}).values())


def lookups(cluster: Cluster) -> KueueLookups:
    return KueueLookups(cast(QueueApi, cluster))


def spec(base: Body | None = None, elastic: Body | None = None) -> Body:
    specs = [{"name": "workers", "template": base or {}}, {"name": "extra", "template": elastic or {}}]
    return {"replicaSpecs": specs}


BASE = CreateWorkload(0, (("workers", 2),), "gpus")
MORE = CreateWorkload(1, (("workers", 1),), "gpus")
EXTRA = CreateWorkload(1, (("extra", 1),), "gpus")
LABELLED = job_body(labels={"kueue.x-k8s.io/priority-class": "high"})


async def test_a_class_gives_its_value_and_is_named() -> None:
    cluster = Cluster(WorkloadPriorityClass={"high": {"value": 9}}, PriorityClass={"pods": {"value": 3}})
    assert await lookups(cluster).priority(LABELLED, spec(), BASE, None) == Priority(9, "WorkloadPriorityClass", "high")
    own = spec({"spec": {"priorityClassName": "pods"}})
    assert await lookups(cluster).priority(job_body(), own, BASE, None) == Priority(3, "PriorityClass", "pods")


async def test_a_missing_class_is_a_sentence() -> None:
    with pytest.raises(QuotaError, match=r"WorkloadPriorityClass high, which label .* names, does not exist") as caught:
        await lookups(Cluster()).priority(LABELLED, spec(), BASE, None)
    assert caught.value.reason == "PriorityClassMissing"
    own = spec({"spec": {"priorityClassName": "pods"}})
    with pytest.raises(QuotaError, match="PriorityClass pods, which priorityClassName names"):
        await lookups(Cluster()).priority(job_body(), own, BASE, None)


@pytest.mark.parametrize(
    ("classes", "found"),
    [
        ({}, Priority(0)),
        ({"a": 5}, Priority(0)),
        ({"a": 5, "b*": 7, "c*": 6}, Priority(6, "PriorityClass", "c*")),
    ],
)
async def test_the_default_of_the_cluster(classes: dict[str, int], found: Priority) -> None:
    bodies = {n: {"metadata": {"name": n}, "value": v, "globalDefault": n.endswith("*")} for n, v in classes.items()}
    assert await lookups(Cluster(PriorityClass=bodies)).priority(job_body(), spec(), BASE, None) == found


async def test_increments_follow_their_base_or_their_own_class() -> None:
    cluster = Cluster(PriorityClass={"low": {"value": -5}})
    base = workload_body(spec={"priority": 4})
    assert await lookups(cluster).priority(job_body(), spec(), MORE, base) == Priority(-999_999_996)
    assert await lookups(cluster).priority(LABELLED, spec(), MORE, {"spec": {}}) == Priority(-1_000_000_000)
    own = spec(elastic={"spec": {"priorityClassName": "low"}})
    assert await lookups(cluster).priority(job_body(), own, EXTRA, base) == Priority(-5, "PriorityClass", "low")


async def test_objects_are_kept_for_a_while_and_missing_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [datetime(2026, 3, 1, tzinfo=UTC)]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    cluster = Cluster(flavors={"gpus": flavor_body()})
    looking = lookups(cluster)
    for _ in range(3):
        assert set(await looking.flavors(["gpus", "gone"])) == {"gpus"}
    assert cluster.reads == {"flavors/gpus": 1, "flavors/gone": 3}
    now[0] += timedelta(seconds=31)
    await looking.flavors(["gpus"])
    assert cluster.reads["flavors/gpus"] == 2


async def test_a_refused_read_is_no_missing_object() -> None:
    cluster = Cluster(flavors={"gpus": ApiError(403, "forbidden")})
    with pytest.raises(ApiError, match="forbidden"):
        await lookups(cluster).flavors(["gpus"])


FLAVORS = {"gpus": flavor_body("gpus", {"type": "p5"})}


@pytest.mark.parametrize(
    ("base", "elastic", "order", "pins"),
    [
        pytest.param({}, {}, MORE, {"workers": {"type": "p5"}}, id="a spec of the base"),
        pytest.param({}, {}, EXTRA, {"extra": {"type": "p5"}}, id="another that asks for the same nodes"),
        pytest.param(
            {}, {"spec": {"nodeSelector": {"pool": "spot"}}}, EXTRA, {}, id="another that asks for other nodes"
        ),
    ],
)
async def test_increments_are_pinned_to_the_flavor_of_the_base(
    base: Body, elastic: Body, order: CreateWorkload, pins: Body
) -> None:
    found = await lookups(Cluster()).pins(workload_body(), spec(base, elastic), order, FLAVORS, ())
    assert found == pins


async def test_a_flavor_that_is_missing_is_a_sentence() -> None:
    with pytest.raises(PlacementError, match="ResourceFlavor gpus"):
        await lookups(Cluster()).pins(workload_body(), spec(), MORE, {}, ())


def in_topology(**domains: Any) -> Body:
    """Give a base that Kueue placed, first there where these domains say."""
    base = workload_body()
    place = {"levels": list(domains), "slices": [{"domainCount": 2, "valuesPerLevel": list(domains.values())}]}
    base["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"] = place if domains else None
    return base


HOST = "kubernetes.io/hostname"
HOSTS = {HOST: {"individual": {"prefix": "rack", "roots": ["ed", "x"]}}}


@pytest.mark.parametrize(
    ("base", "nodes"),
    [
        pytest.param(in_topology(**{RACK: {"universal": "r1"}, HOST: {"universal": "gone"}}), [], id="Kueue says it"),
        pytest.param(in_topology(**HOSTS), ["other"], id="Kueue says which host"),
        pytest.param(in_topology(), ["gone", "plain", "racked"], id="pods have nodes"),
    ],
)
async def test_a_required_domain_is_that_of_the_base(base: Body, nodes: list[str]) -> None:
    found = await lookups(RACKED).pins(base, REQUIRES, MORE, FLAVORS, nodes)
    assert found == {"workers": {"type": "p5", RACK: "r1"}}


NODES = {"racked": "r1", "other": "r2"}
RACKED = Cluster(nodes={n: {"metadata": {"labels": {RACK: r}}} for n, r in NODES.items()} | {"plain": {"metadata": {}}})
REQUIRES = spec({"metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": RACK}}})


@pytest.mark.parametrize("nodes", [[], ["gone"], ["plain"]], ids=str)
async def test_it_is_too_early_while_the_base_has_no_place(nodes: list[str]) -> None:
    with pytest.raises(BaseNotPlaced, match=RACK):
        await lookups(RACKED).pins(in_topology(), REQUIRES, MORE, FLAVORS, nodes)
