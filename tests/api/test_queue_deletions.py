"""Jobs in queues that are deleted, on a real Kueue: what they wait for is asked no more, and quota goes after pods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.api.churn_queues import watched_paths
from tests.api.compat_lives import operator
from tests.api.compat_nodes import PlayedNodes
from tests.api.etcd_history import Client, Recorder
from tests.api.kueue_objects import apply, is_converted_by_kueue, queues
from tests.api.queue_jobs import QUICK, Team, conditions
from tests.api.quota_checker import JOB, POD, WORKLOAD, check
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.controlplane import KUEUE
from elastipod_local.host import wait_until

KIND = "ml.trn1.32xlarge"
FLAVOR_LABELS = {"node.kubernetes.io/instance-type": KIND}
GRACE_S = 2.0


class SlowNodes(PlayedNodes):
    """Nodes on which the pods of some jobs take until the test lets them go."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(kubeconfig, {KIND: 1}, {})
        self._held: dict[str, asyncio.Event] = {}

    @contextmanager
    def slow(self, job: str) -> Iterator[None]:
        """Hold the pods of a job back when they are to end."""
        self._held[job] = asyncio.Event()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._held[job].set)

    async def _end(self, pod: dict[str, Any], *, delete: bool) -> None:
        await self._let_go(pod)
        await super()._end(pod, delete=delete)

    async def _succeed(self, pod: dict[str, Any]) -> None:
        await self._let_go(pod)
        await super()._succeed(pod)

    async def _let_go(self, pod: dict[str, Any]) -> None:
        held = self._held.get(pod["metadata"]["labels"]["HPJob"])
        if held is not None:
            await held.wait()


@pytest.fixture(scope="module")
def nodes(kueue_server: Cluster) -> Iterator[SlowNodes]:
    played = SlowNodes(kueue_server.kubeconfig)
    with played:
        yield played


@pytest.fixture(scope="module")
def running(kueue_server: Cluster, nodes: SlowNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The operator; its log."""
    with operator(kueue_server, tmp_path_factory.mktemp("operator"), ()) as log:
        yield log


@pytest.fixture
def team(kueue_server: Cluster, kueue_namespace: str, running: Path) -> Team:
    """A namespace with a queue for four pods."""
    flavor, *others = queues(
        kueue_namespace, kueue_namespace, cpu="4", preemption={"withinClusterQueue": "LowerPriority"}
    )
    flavor["spec"] = {"nodeLabels": FLAVOR_LABELS}
    apply(kueue_server, flavor, *others)
    return Team(kueue_server, kueue_namespace)


SIX = {**QUICK, "maxReplicas": 6}


def test_a_deleted_job_asks_no_more_at_once_and_gives_back_as_its_pods_go(team: Team, nodes: SlowNodes) -> None:
    with closing(Client(team.cluster)) as client, Recorder(client, watched_paths(team.namespace)) as recorder:
        granted = train_and_wait(team)
        team.submit("next", elasticPolicy=None, replicaSpecs=[{"name": "pods", "replicas": 4}])
        team.until(lambda: "insufficient unused quota" in team.waits("next")["message"], "Kueue's sentence", "next")
        with nodes.slow("leaves"):
            delete(team)
            team.until(lambda: set(team.workloads("leaves")) == granted, "what waits to be asked no more", "leaves")
            time.sleep(2)  # in which nothing else is given back: the checker sees all that was
        team.until(lambda: "leaves" not in recorder.now(JOB), "the job to be gone", "leaves")
        team.trains("next", 4)
        nodes.complete({"next"})
        team.until(lambda: team.state("next")["type"] == "Completed", "the next job to end", "next")
        team.until(lambda: all(map(is_finished, team.workloads("next").values())), "Kueue to know", "next")
        verdict = check(recorder.complete(), {team.namespace: 4000}, GRACE_S)
    assert verdict.violations == []
    assert verdict.counts["deleted jobs that are gone"] == 1


@pytest.mark.slow
def test_a_job_that_is_deleted_in_the_foreground_goes_after_its_pods(
    team: Team, nodes: SlowNodes, running: Path
) -> None:
    """When the garbage collector takes its Workloads is not ours to say (docs/design/queues.md)."""
    with closing(Client(team.cluster)) as client, Recorder(client, watched_paths(team.namespace)) as recorder:
        granted = train_and_wait(team)
        pods = {body["metadata"]["uid"] for body in team.pods("leaves")}
        with nodes.slow("leaves"):
            delete(team, "--cascade=foreground")
            team.until(lambda: set(team.workloads("leaves")) <= granted, "what waits to be asked no more", "leaves")
            time.sleep(2)
            assert {body["metadata"]["uid"] for body in team.pods("leaves")} == pods
        team.until(lambda: not recorder.now(JOB), "the job to be gone", "leaves")
        history = recorder.complete()
    last = {change.kind: change.version for change in history if change.type == "DELETED"}
    assert max(last, key=last.__getitem__) == JOB
    assert not recorder.now(POD)
    assert not recorder.now(WORKLOAD)
    began = next(c.version for c in history if c.kind == JOB and "deletionTimestamp" in c.body["metadata"])
    assert not [c for c in history if c.type == "ADDED" and c.version > began], "nothing is made or asked for any more"
    assert '"level": "error"' not in running.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_deleted_job_goes_without_kueue_or_says_that_it_waits_for_it(team: Team) -> None:
    train_and_wait(team)
    waits = is_converted_by_kueue(team.cluster)
    team.cluster.kill_role(KUEUE)
    try:
        delete(team)
        team.until(lambda: not team.pods("leaves"), "the pods to be gone", "leaves")
        if waits:
            why = "the job's quota could not be returned: "
            team.until(lambda: team.warning("leaves").startswith(why), "the reason why it stays", "leaves")
        else:
            wait_until(
                lambda: not names(team, "hyperpodpytorchjobs"),
                deadline_s=PATIENCE_S,
                what="the job to be gone",
                every_s=0.2,
            )
    finally:
        team.cluster.start_role(KUEUE)
    is_all_gone = lambda: not (names(team, "hyperpodpytorchjobs") or names(team, "workloads"))  # noqa: E731
    wait_until(is_all_gone, deadline_s=PATIENCE_S, what="the job and its Workloads to be gone", every_s=0.2)


def train_and_wait(team: Team) -> set[int]:
    """Have a job train on all that the queue has, and ask for more. Give the numbers of the Workloads that Kueue has admitted.

    Which increments those are is Kueue's choice.
    """
    team.submit("leaves", elasticPolicy=SIX)
    team.trains("leaves", 4)
    team.until(lambda: set(team.workloads("leaves")) == set(range(5)), "it to ask for more", "leaves")
    admitted = {
        number for number, body in team.workloads("leaves").items() if conditions(body).get("Admitted") == "True"
    }
    assert len(admitted) == 3
    assert 0 in admitted
    return admitted


def delete(team: Team, *how: str) -> None:
    team.cluster.kubectl("-n", team.namespace, "delete", "hpjob", "leaves", "--wait=false", *how)


def names(team: Team, kind: str) -> list[str]:
    """Give what there is of a kind."""
    return [body["metadata"]["name"] for body in list_objects(team.cluster, kind, team.namespace)]


def is_finished(workload: dict[str, Any]) -> bool:
    return conditions(workload).get("Finished") == "True"
